"""All experiments by name: the published runs, the studies and the baselines, each group from its YAML file."""

from pathlib import Path

from some_moe.config import ConfigError, did_you_mean
from some_moe.lab.registry.catalogue import Catalogue
from some_moe.lab.registry.records import Experiment

_CATALOGUE = Catalogue()
PUBLISHED, STUDIES, BASELINES, _LADDER = (
    _CATALOGUE.read(name, (Path(__file__).parent / name).read_text(encoding="utf-8"))
    for name in ("published.yaml", "studies.yaml", "baselines.yaml", "ladder.yaml")
)
STUDIES += _LADDER  # which build on baselines too
EXPERIMENTS: tuple[Experiment, ...] = (*PUBLISHED, *STUDIES, *BASELINES)


def find_experiment(name: str) -> Experiment:
    """Return the experiment of that name; case does not matter."""
    known = {experiment.name.casefold(): experiment for experiment in EXPERIMENTS}
    if name.casefold() in known:
        return known[name.casefold()]
    hint = did_you_mean(name.casefold(), list(known))
    if not hint:
        raise ConfigError(f"{name!r} is not a registered experiment; `some experiments list` prints them all")
    nearest = hint.split("'")[1]
    raise ConfigError(f"{name!r} is not a registered experiment{hint.replace(nearest, known[nearest].name)}")


def group_by_series() -> dict[str, list[Experiment]]:
    """Return {series: its experiments}, in the order of registration."""
    groups: dict[str, list[Experiment]] = {}
    for experiment in EXPERIMENTS:
        groups.setdefault(experiment.series, []).append(experiment)
    return groups

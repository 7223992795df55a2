"""All experiments by name: the published runs, the studies and the baselines, each group from its YAML file."""

from collections.abc import Iterable
from pathlib import Path

from some_moe.config import ConfigError, did_you_mean
from some_moe.lab.registry.catalogue import Catalogue
from some_moe.lab.registry.records import Epoch, Experiment, Published, Source, Trace

__all__ = [
    "BASELINES",
    "EXPERIMENTS",
    "PUBLISHED",
    "STUDIES",
    "Epoch",
    "Experiment",
    "Published",
    "Source",
    "Trace",
    "find_experiment",
    "group_by_series",
]

_CATALOGUE = Catalogue()
PUBLISHED, STUDIES, BASELINES = (
    _CATALOGUE.read(name, (Path(__file__).parent / name).read_text(encoding="utf-8"))
    for name in ("published.yaml", "studies.yaml", "baselines.yaml")
)
EXPERIMENTS: tuple[Experiment, ...] = (*PUBLISHED, *STUDIES, *BASELINES)


def find_experiment(name: str, experiments: Iterable[Experiment] = EXPERIMENTS) -> Experiment:
    """Return the experiment of that name; case matters only between names that differ in nothing else."""
    by_name = {experiment.name: experiment for experiment in experiments}
    if name in by_name:
        return by_name[name]
    alike = [known for known in by_name if known.casefold() == name.casefold()]
    if len(alike) == 1:
        return by_name[alike[0]]
    if alike:
        raise ConfigError(f"{name!r} could be {' or '.join(alike)}; write it with its capitals")
    raise ConfigError(f"{name!r} is not a registered experiment{_suggest(name, list(by_name))}")


def _suggest(name: str, names: list[str]) -> str:
    """Name the nearest experiment: found without regard to case, written as it is registered."""
    written = {known.casefold(): known for known in names}
    hint = did_you_mean(name.casefold(), list(written))
    if not hint:
        return "; `some experiments list` prints them all"
    nearest = hint.split("'")[1]
    return hint.replace(nearest, written[nearest])


def group_by_series(experiments: Iterable[Experiment] = EXPERIMENTS) -> dict[str, list[Experiment]]:
    """Return {series: its experiments}, in the order of registration."""
    groups: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        groups.setdefault(experiment.series, []).append(experiment)
    return groups

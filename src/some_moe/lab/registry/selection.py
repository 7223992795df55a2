"""Experiments by the words that a person gives: single names, the name of a series, or a whole group."""

import difflib
from collections.abc import Iterable, Sequence

from some_moe.config import ConfigError
from some_moe.lab.registry import BASELINES, EXPERIMENTS, PUBLISHED, STUDIES, find_experiment, group_by_series
from some_moe.lab.registry.records import Experiment

GROUPS: dict[str, Sequence[Experiment]] = {
    # "a" stands for the series "A (v4)", "depth and collapse" for "Studies: depth and collapse"
    name.casefold(): experiments
    for series, experiments in group_by_series().items()
    for name in (series, series.removeprefix("Studies: ").partition(" (")[0])
} | {"published": PUBLISHED, "studies": STUDIES, "baselines": BASELINES, "all": EXPERIMENTS}


def select_experiments(words: Iterable[str]) -> list[Experiment]:
    """Return the experiments that the words name, each once, in the order in which they are first named."""
    chosen = {experiment.name: experiment for word in words for experiment in _expand(word)}
    return list(chosen.values())


def _expand(word: str) -> Sequence[Experiment]:
    if word.casefold() in GROUPS:
        return GROUPS[word.casefold()]
    try:
        return (find_experiment(word),)
    except ConfigError:
        # A misspelt group is taken for one only where it is nearer than any experiment would be.
        near = difflib.get_close_matches(word.casefold(), GROUPS, n=1, cutoff=0.75)
        if not near or len(near[0]) < 3:
            raise
        raise ConfigError(f"{word!r} is neither an experiment nor a series; did you mean {near[0]!r}?") from None

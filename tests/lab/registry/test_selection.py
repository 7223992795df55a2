"""Words on the command line become experiments."""

import pytest

from some_moe.config import ConfigError
from some_moe.lab.registry import EXPERIMENTS
from some_moe.lab.registry.selection import select_experiments


def test_series_and_groups_expand_to_their_runs() -> None:
    def names(*words: str) -> list[str]:
        return [experiment.name for experiment in select_experiments(words)]

    assert names("b", "a1", "B1") == ["B1", "B2", "B3", "A1"]
    assert names("A") == [f"A{n}" for n in range(1, 7)]
    assert names("V") == [f"V{n}" for n in range(1, 11)]
    assert len(names("published")) == 30
    assert names("all") == [experiment.name for experiment in EXPERIMENTS]
    assert names("baselines")[0] == "dense-equal-trainable"
    assert "D1-beta-scale" in names("depth and collapse")
    assert len(names("studies")) + 30 + len(names("Baselines")) == len(EXPERIMENTS)
    with pytest.raises(ConfigError, match="'publishd' is neither an experiment nor a series; did you mean 'published'"):
        names("publishd")
    with pytest.raises(ConfigError, match="'frozen-kys' is not a registered experiment; did you mean 'frozen-keys'"):
        names("frozen-kys")

"""Presets by name: those of presets.yaml, for a first look, and every registered experiment."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

from some_moe.config import ConfigError, RunConfig, did_you_mean
from some_moe.lab.registry import EXPERIMENTS, find_experiment

PRESETS: dict[str, Callable[[], RunConfig]] = {
    name: partial(RunConfig, name=name, **values)
    for name, values in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
smoke, demo = PRESETS["smoke"], PRESETS["demo"]


def find_preset(name: str) -> RunConfig:
    """Return a preset, or the config of a registered experiment, by name."""
    if name in PRESETS:
        return PRESETS[name]()
    try:
        return find_experiment(name).config
    except ConfigError:
        names = [*PRESETS, *(experiment.name for experiment in EXPERIMENTS)]
        hint = did_you_mean(name, names) or f"; presets are {', '.join(PRESETS)}, and every registered experiment"
        raise ConfigError(f"{name!r} is not a preset{hint}") from None

"""What a sweep searches: a YAML file with a base, the settings that vary, and how many trials. Imports no torch."""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field

from some_moe.config import Config, ConfigError, RunConfig
from some_moe.config.base import Count, Natural, Seed, did_you_mean
from some_moe.lab.registry.presets import find_preset

MOST_AXES, MOST_CHOICES, MOST_TRIALS = 40, 100, 100_000
NOT_SEARCHED = {"name", "experiment", "format_version", "train.seed", "train.device"}
LIKE = "write it like {low: 0.001, high: 0.1, log: true} or [linear, mlp]"


class Axis(NamedTuple):
    """One setting that varies: between two numbers, or among choices."""

    name: str  # dotted
    kind: Literal["int", "float", "choice"]
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    def ends(self) -> tuple[Any, ...]:
        """The two ends of its range, or all choices."""
        return self.choices or tuple(int(end) if self.kind == "int" else end for end in (self.low, self.high))

    def place(self, value: Any) -> float:
        """Where a value lies on this axis, from 0 to 1."""
        if self.kind == "choice":
            return self.choices.index(value) / max(1, len(self.choices) - 1)
        scale = math.log if self.log else float
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))


class Sweep(Config):
    """A sweep's file."""

    preset: str | None = None
    """A preset or registered experiment to begin from."""
    config: str | None = None
    """A config.yaml to begin from, as seen from the sweep's file."""
    settings: dict[str, Any] = Field(default={})
    """Settings of every trial, by dotted name."""
    space: dict[str, Any]
    """Settings that vary, by dotted name: {low, high, log} or a list of choices."""
    trials: Count = 20
    """How many are tried."""
    seeds: list[Seed] = Field(default=[0])
    """Each trial is run with each of them; its value is their mean."""
    metric: Literal["best_val_loss", "val_loss", "bits_per_byte"] = "best_val_loss"
    """What is to be small, as result.json names it. Never the test loss: that is for reporting."""
    sampler: Literal["tpe", "random"] = "tpe"
    """Who proposes: optuna's TPE, or chance."""
    sampler_seed: Seed = 0
    """What the proposals follow from."""
    prune: bool = True
    """Stop a trial whose validation loss is above the median of the others at the same step."""
    prune_after: Natural = 5
    """Trials that are finished before any is stopped so."""

    def find_problems(self) -> Iterator[str]:
        if self.preset and self.config:
            yield f"preset {self.preset} and config {self.config} exclude each other; give one of them"
        if not 0 < len(self.space) <= MOST_AXES:
            yield f"space names {len(self.space)} settings; name 1 to {MOST_AXES}"
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            yield f"seeds {self.seeds} are not different numbers; give one or more, such as [0, 1]"
        if twice := self.settings.keys() & self.space.keys():
            yield f"settings and space both name {', '.join(sorted(twice))}; leave it out of one of them"
        if self.trials > MOST_TRIALS:
            yield f"trials {self.trials} are too many; ask for {MOST_TRIALS:,} at most"

    def base_config(self, folder: Path) -> RunConfig:
        """What every trial shares. folder: where the sweep's file is."""
        base = RunConfig()
        if self.preset is not None:
            base = find_preset(self.preset)
        elif self.config is not None:
            base = RunConfig.load(folder / self.config)
        return base.override(self.settings)

    def axes(self, base: RunConfig) -> list[Axis]:
        """The settings that vary; one that is none, or whose ends no run can have, is refused."""
        values = base.flatten()
        for name in self.space:
            if name not in values:
                raise ConfigError(f"space names {name}, which is no setting{did_you_mean(name, [*values])}")
            if name in NOT_SEARCHED:
                cure = "seeds says with which each trial is run" if name == "train.seed" else "leave it out"
                raise ConfigError(f"space names {name}, which is not searched; {cure}")
        axes = []
        for name, given in self.space.items():
            room, _, field = name.partition(".")
            axes.append(read_axis(name, given, type(getattr(base, room)).model_fields[field].annotation))
        for axis in axes:
            refuse_ends(axis, axes, base)
        return axes

    def digest(self, base: RunConfig) -> str:
        """What must be the same for trials to belong together: all but how many there are."""
        told = self.model_dump(mode="json", exclude={"trials", "preset", "config", "settings"}) | base.flatten()
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def read_axis(name: str, given: Any, annotation: Any) -> Axis:
    """An axis as the file says it; annotation: the setting's, which tells whole numbers from others."""
    if isinstance(given, list):
        if not 2 <= len(given) <= MOST_CHOICES or any(given.count(one) > 1 for one in given):
            raise ConfigError(f"space.{name} {str(given)[:80]} is no list of different choices; {LIKE}")
        return Axis(name, "choice", choices=tuple(given))
    log = given.get("log", False) if isinstance(given, dict) else None
    if not isinstance(log, bool) or not {"low", "high"} <= given.keys() <= {"low", "high", "log"}:
        raise ConfigError(f"space.{name} {str(given)[:80]!r} cannot be read; {LIKE}")
    low, high = (read_number(name, given[end]) for end in ("low", "high"))
    if not low < high or (log and low <= 0):
        raise ConfigError(f"space.{name} from {low:g} to {high:g} is no range; low is below high, and above 0 with log")
    if not takes(annotation, float) and not takes(annotation, int):
        raise ConfigError(f"space.{name} is a range, but the setting is no number; give a list of choices")
    whole = not takes(annotation, float) and low == int(low) and high == int(high)
    return Axis(name, "int" if whole else "float", low, high, log)


def takes(annotation: Any, kind: type) -> bool:
    """Whether a field's annotation, such as `Count | None`, has this kind in it."""
    return annotation is kind or any(takes(one, kind) for one in get_args(annotation))


def read_number(name: str, given: Any) -> float:
    """A number; YAML takes 1e-3 for a word."""
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"space.{name} has the bound {str(given)[:80]!r}, which is no number; {LIKE}")
    return number


def refuse_ends(axis: Axis, axes: list[Axis], base: RunConfig) -> None:
    """Refuse an end, or a choice, that no run can have: as the base is, or with the others at either of their ends."""
    others: list[dict[str, Any]] = [{}]
    others += [{one.name: one.ends()[place] for one in axes if one.name != axis.name} for place in (0, -1)]
    for value in axis.ends():
        errors = []
        for more in others:
            try:
                base.override(more | {axis.name: value})
            except ConfigError as error:
                errors.append(error)
        if len(errors) == len(others):
            raise ConfigError(f"space.{axis.name} cannot be {value}: {errors[0]}")

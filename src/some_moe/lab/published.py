"""Published figures beside measured ones: the results folder is read, and each run compared epoch by epoch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from some_moe.config import ConfigError
from some_moe.lab.registry import EXPERIMENTS
from some_moe.lab.registry.records import Experiment, Published
from some_moe.lab.registry.selection import select_experiments
from some_moe.lab.registry.tolerances import Tolerance, find_tolerance
from some_moe.system.reading import clean, parse_json, read_text

WITHIN, OUTSIDE, NO_TOLERANCE = "within", "outside", "no tolerance"
NOT_PUBLISHED, NOT_MEASURED = "not published", "not measured"
VERDICTS = {
    WITHIN: "within the tolerance",
    OUTSIDE: "outside the tolerance",
    NO_TOLERANCE: "published and measured, no tolerance set",
    NOT_PUBLISHED: "measured, not published",
    NOT_MEASURED: "published, not measured yet",
}
"""What can be said of a loss, and what it means."""

Figures = dict[str, float]
"""Measured figures by name; one that is not known has no entry. `_all`: every position counts, padding too."""

READ = ("step", "train_loss", "val_loss", "val_loss_padded", "best_val_loss", "perplexity", "bits_per_byte",
        "experts_used")  # fmt: skip
TOLD = ("steps", "tokens", "seconds", "tokens_per_second", "total_parameters", "trainable_parameters", "status",
        "device", "date", "commit", "command", "epochs_scaled")  # fmt: skip
PRINTED = ("train_loss", "val_loss", "perplexity", "gini", "entropy_bits", "experts_used")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One file of the results folder: a run of a registered experiment with one seed."""

    file: Path
    experiment: Experiment
    seed: int | None
    record: Mapping[str, Any]

    def text(self, name: str) -> str:
        """A field that holds words, or "" where it is absent."""
        return str(self.record.get(name) or "")

    def number(self, name: str) -> float | None:
        """A field that holds a number, or None where it is absent or no finite number."""
        return finite_number(self.record.get(name))

    @property
    def overrides(self) -> Mapping[str, Any]:
        """Settings that were chosen otherwise than registered, the data and the seed apart."""
        found = self.record.get("overrides")
        return found if isinstance(found, dict) else {}

    @property
    def data(self) -> dict[str, Any]:
        """What the record says of its data; of an old one only how many documents each split had."""
        found, counts = self.record.get("data"), self.record.get("stories")
        return found if isinstance(found, dict) else {"documents": counts}

    @property
    def documents(self) -> dict[str, int]:
        """How many documents each split had, where that is known."""
        found = self.data.get("documents")
        return {name: n for name, n in found.items() if type(n) is int} if isinstance(found, dict) else {}

    def setting(self, field: str) -> Any:
        """A setting as it was run; field: "data.batch_size"."""
        return self.overrides.get(field, attrgetter(field)(self.experiment.config))

    def read_figures(self) -> dict[int | None, Figures]:
        """The figures at the end of each epoch, as the published run counts epochs; under None, at the last step."""
        rows = list_rows(self.record.get("published_epochs"))
        # Where the number of epochs was changed, the run's own epochs are not the published ones.
        if not rows and not self.record.get("epochs_scaled"):
            rows = list_rows(self.record.get("epochs"))
        epochs = {row["epoch"]: self._read(row) for row in rows if type(row.get("epoch")) is int}
        layers, middle = list_rows(self.record.get("layers")), self.record.get("middle_layer")
        end = self._read(dict(self.record) | next((layer for layer in layers if layer.get("layer") == middle), {}))
        last = epochs[max(epochs)] if epochs else {}
        if last.get("step") == self.record.get("steps"):
            end = last | end  # the same moment: one may know what the other does not
        # The end of a run is the end of its last epoch, also where nothing was written down on the way.
        return {**(epochs or {self.experiment.config.train.epochs: end}), None: end}

    def _read(self, row: Mapping[str, Any]) -> Figures:
        """Read a record's figures; what it calls gini counts padding where the run does."""
        found = {name: row.get(name) for name in READ}
        padded = finite_number(row.get("val_loss_padded"))
        if padded is not None:
            found["perplexity_padded"] = math.exp(min(padded, 700.0))
        counted = "all" if self.setting("data.count_padding") else "real"
        for name in ("gini", "entropy_bits"):
            found[f"{name}_real"] = row.get(f"{name}_real")
            found[f"{name}_{counted}"] = row.get(name)
        if finite_number(row.get("experts_used")) is not None:
            found["num_experts"] = row.get("num_experts", self.setting("model.num_experts"))
        return {name: number for name, value in found.items() if (number := finite_number(value)) is not None}


def finite_number(value: Any) -> float | None:
    """The value, or None where it is no finite number that a float can hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and -1e300 < value < 1e300 else None


def _to_number(value: Decimal | int | None) -> float | int | None:
    return float(value) if isinstance(value, Decimal) else value


def list_rows(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; none where it is no list."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def read_results(folder: Path) -> tuple[list[Result], list[str]]:
    """Read FOLDER/*.json: the results in the registry's order, and the names of files that are none."""
    cure = "`some experiments run NAME` writes one"
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {str(folder)!r} with results; {cure}, or name another with --results")
    found = {file: _read_result(file) for file in sorted(folder.glob("*.json"))}
    results = [result for result in found.values() if result is not None]
    if not results:
        raise ConfigError(f"{str(folder)!r} holds no result of a registered experiment; {cure}")
    results.sort(key=lambda r: (EXPERIMENTS.index(r.experiment), -1 if r.seed is None else r.seed, r.file.name))
    for one, other in pairwise(results):
        if one.experiment is other.experiment and one.seed == other.seed:
            both, run = f"{one.file.name} and {other.file.name}", one.experiment.name
            raise ConfigError(f"{both} both hold {run} with seed {one.seed}; keep one of them")
    return results, [file.name for file, result in found.items() if result is None]


def take_published_sizes(found: list[Result], folder: Path) -> list[Result]:
    """The results, those in FOLDER/published, at the published sizes, in the place of older ones on fewer stories."""
    if not any((folder / "published").glob("*.json")):
        return found
    newer = [result for result in read_results(folder / "published")[0] if result.record.get("status") != "failed"]
    measured = {result.experiment.name for result in newer}
    both = [result for result in found if result.experiment.name not in measured] + newer
    return sorted(both, key=lambda result: (EXPERIMENTS.index(result.experiment), result.seed or 0))


def _read_result(file: Path) -> Result | None:
    """Read one file; None where it is not a result of a registered experiment."""
    cure = "remove it, or measure it again"
    try:
        record = clean(parse_json(read_text(file)))
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read ({error}); {cure}") from None
    if not isinstance(record, dict):
        return None
    name, _, digits = file.stem.rpartition("-seed")  # for a record that does not say them
    run, seed = record.get("experiment") or name, record.get("seed", int(digits) if digits.isdecimal() else None)
    if seed is not None and (not isinstance(seed, int) or abs(seed) >= 2**63):
        raise ConfigError(f"{str(file)!r} is damaged: its seed is no whole number; {cure}")
    found = [Result(file=file, experiment=e, seed=seed, record=record) for e in EXPERIMENTS if e.name == run]
    return found[0] if found else None


# --- published against measured -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """One figure over the seeds that have it, at least one."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def stdev(self) -> float | None:
        return stdev(self.values) if len(self.values) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        low, high = min(self.values), max(self.values)
        return {"mean": self.mean, "stdev": self.stdev, "low": low, "high": high, "values": list(self.values)}


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was published and what was measured at one moment: the end of an epoch, or of the run (epoch None)."""

    experiment: Experiment
    epoch: int | None
    published: Mapping[str, Decimal | int]  # what was printed; nothing else has an entry
    measured: Mapping[str, Spread]

    @property
    def name(self) -> str:
        return self.experiment.name

    @property
    def tolerance(self) -> Tolerance | None:
        return find_tolerance(self.experiment)

    @property
    def loss_name(self) -> str:
        """The measured loss of the kind that the report prints: over padding too, or over real tokens."""
        return "val_loss_padded" if self.experiment.config.data.loss_on == "all_positions" else "val_loss"

    @property
    def loss(self) -> Spread | None:
        return self.measured.get(self.loss_name)

    @cached_property
    def difference(self) -> Decimal | None:
        """Measured (the mean over seeds) minus published loss, in nats."""
        published, measured = self.published.get("val_loss"), self.loss
        return None if published is None or measured is None else Decimal(str(measured.mean)) - published

    @property
    def verdict(self) -> str:
        if "val_loss" not in self.published:
            return NOT_PUBLISHED
        if self.difference is None:
            return NOT_MEASURED
        if self.tolerance is None:
            return NO_TOLERANCE
        return WITHIN if abs(self.difference) <= self.tolerance.allow(Decimal(self.published["val_loss"])) else OUTSIDE

    def to_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "published": {name: _to_number(value) for name, value in self.published.items()},
            "measured": {name: spread.to_dict() for name, spread in self.measured.items()},
            "difference": None if self.difference is None else float(self.difference),
            "verdict": self.verdict,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison(Point):
    """The end of an experiment, with its results and each epoch of which something was published or measured."""

    results: Sequence[Result]
    epochs: Sequence[Point]

    @property
    def judged(self) -> Sequence[Point]:
        """The moments to be judged: the epochs, or the end alone where no epoch's loss was published."""
        return self.epochs if any("val_loss" in point.published for point in self.epochs) else (self,)

    def describe(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        published, count = self.experiment.published or Published(), self.experiment.parameters
        millions = ("total_parameters_millions", "trainable_parameters_millions")
        return {
            "name": self.name,
            "series": self.experiment.series,
            "title": self.experiment.title,
            "total_parameters": count.total,
            "trainable_parameters": count.trainable,
            **{f"published_{name}": _to_number(getattr(published, name)) for name in millions},
            "published_steps": published.steps,
            "loss": self.loss_name,
            "tolerance": None if self.tolerance is None else str(self.tolerance),
            "final": self.to_dict(),
            "epochs": [point.to_dict() for point in self.epochs],
            "results": [
                {"file": result.file.name, "seed": result.seed} | {name: result.record.get(name) for name in TOLD}
                for result in self.results
            ],
        }


def compare_results(results: Sequence[Result], names: Sequence[str] = ()) -> list[Comparison]:
    """Compare the named experiments and series, or every published and every measured run, in the registry's order."""
    found = {e.name: [result for result in results if result.experiment is e] for e in EXPERIMENTS}
    chosen = select_experiments(names) if names else [e for e in EXPERIMENTS if found[e.name] or e.published]
    if names and not any(found[experiment.name] for experiment in chosen):
        words = " ".join(names)
        raise ConfigError(f"no result of {words} is there; `some experiments run {words}` makes it")
    return [compare_experiment(e, found[e.name]) for e in EXPERIMENTS if e in chosen]


def compare_experiment(experiment: Experiment, results: Sequence[Result]) -> Comparison:
    """Set what was published of an experiment beside its results, one a seed (none: nothing measured yet)."""
    published = experiment.published or Published()
    printed = {row.epoch: row for row in published.epochs}
    seeds = [result.read_figures() for result in results]
    moments = {*printed, *(epoch for figures in seeds for epoch in figures if epoch is not None)}
    epochs = [
        Point(experiment=experiment, epoch=epoch, **_set_beside(printed.get(epoch), seeds, epoch))
        for epoch in sorted(moments)
    ]
    end = _set_beside(published, seeds, None)
    return Comparison(experiment=experiment, epoch=None, results=results, epochs=epochs, **end)


def _set_beside(printed: Any, seeds: Sequence[Mapping[int | None, Figures]], epoch: int | None) -> dict[str, Any]:
    """What was published of an epoch or a whole run, and what the seeds measured then, as fields of a point."""
    found = [figures[epoch] for figures in seeds if epoch in figures]
    names = dict.fromkeys(name for figures in found for name in figures)
    return {
        "published": {name: value for name in PRINTED if (value := getattr(printed, name, None)) is not None},
        "measured": {name: Spread(tuple(figures[name] for figures in found if name in figures)) for name in names},
    }


def judge(comparisons: Iterable[Comparison]) -> dict[str, dict[str, list[int | None]]]:
    """Return {verdict: {run: epochs whose loss it is about}}, for every verdict there is; no epochs: all of the run."""
    verdicts: dict[str, dict[str, list[int | None]]] = {verdict: {} for verdict in VERDICTS}
    for comparison in comparisons:
        found: dict[str, list[int | None]] = {}
        for point in comparison.judged:
            found.setdefault(point.verdict, []).append(point.epoch)
        for verdict, epochs in found.items():
            verdicts[verdict][comparison.name] = epochs if len(found) > 1 else []
    return verdicts

"""The tables of the audit that ask: what was assumed, what exceeds the spread between seeds, what made A6 collapse."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from some_moe.lab.card import list_changes
from some_moe.lab.published import Comparison, Point, compare_experiment
from some_moe.lab.published_tables import ABSENT, Cell, make_sheet, show_difference, show_spread
from some_moe.lab.registry import EXPERIMENTS, find_experiment
from some_moe.lab.registry.records import Experiment
from tools.audit_cells import (
    GINI_ALL,
    GINI_REAL,
    HONEST,
    LENGTH_FILES,
    PADDED,
    SEEDS,
    USED,
    AuditTable,
    list_departures,
    padded_loss,
    published_loss,
    recorded,
    show_common,
    show_printed,
)
from tools.audit_evidence import Evidence, Length

# --- what had to be assumed -----------------------------------------------------------------------------------

ASSUMED = {
    "V1": ("steady", "sines", "post-norm", "dropout"),
    "V2": ("steady", "sines", "post-norm", "dropout"),
    "V8": ("steady", "sines", "dropout"),
    "A1": ("steady", "sines", "post-norm", "dropout"),
    "A4": ("steady", "sines", "dropout"),
    "B1": ("steady", "sines"),
}
"""Published runs, and the other choices that each was run with."""


@dataclass(frozen=True)
class Choice:
    """A published run, or that run with another choice, beside what was published."""

    base: Experiment
    run: Comparison

    @property
    def point(self) -> Point:
        """Its end, judged as if the report had made the same choice."""
        published = compare_experiment(self.base, ()).final.published
        return Point(run=self.base, epoch=None, published=published, measured=self.run.final.measured)


def make_assumptions(evidence: Evidence) -> AuditTable:
    """Published runs with one assumption changed at a time, each against the published loss."""
    names = [name for base, others in ASSUMED.items() for name in (base, *(f"{base}-{other}" for other in others))]
    runs, missing = evidence.part(names)
    rows = [Choice(find_experiment(run.name.split("-")[0]), run) for run in runs]
    cells = (
        Cell[Choice]("run", lambda row: row.run.name, numeric=False, names=True),
        Cell[Choice]("published loss", lambda row: show_printed(row.point.published.get("val_loss"))),
        Cell[Choice]("padded loss", lambda row: PADDED.say(row.run)),
        Cell[Choice]("difference", lambda row: show_difference(row.point)),
        Cell[Choice]("verdict", lambda row: row.point.verdict, numeric=False),
        Cell[Choice]("honest loss", lambda row: HONEST.say(row.run)),
        Cell[Choice]("published gini", lambda row: show_printed(row.point.published.get("gini"))),
        Cell[Choice]("gini, padding counted", lambda row: GINI_ALL.say(row.run)),
        Cell[Choice]("seeds", lambda row: SEEDS.say(row.run), names=True),
    )
    return AuditTable(make_sheet("", cells, rows), missing, list_departures(runs))


# --- differences and seeds ------------------------------------------------------------------------------------

PAIRS = (
    ("V9", "V8"), ("V10", "V8"), ("V10", "V9"), ("B1", "A4"), ("B2", "A4"), ("B3", "A4"), ("A2", "A1"), ("A3", "A1"),
    ("A4", "A1"), ("A4", "A2"), ("A5", "A3"),
)  # fmt: skip
"""The differences from which the reports draw conclusions."""


@dataclass(frozen=True)
class Pair:
    """Two runs whose difference is asked for, and how far single seeds of one run lie from their mean."""

    later: Comparison
    base: Comparison
    deviation: float | None

    @property
    def published(self) -> Decimal | None:
        later, base = published_loss(self.later), published_loss(self.base)
        return None if later is None or base is None else later - base

    @property
    def measured(self) -> float | None:
        later, base = padded_loss(self.later), padded_loss(self.base)
        return None if later is None or base is None else later.mean - base.mean

    def compare(self, difference: float | Decimal | None, later_seeds: int, base_seeds: int) -> str:
        """A difference between means over so many seeds, in its standard errors."""
        if difference is None or not self.deviation:
            return ABSENT
        return f"{abs(float(difference)) / (self.deviation * math.sqrt(1 / later_seeds + 1 / base_seeds)):.1f}"


def pool(runs: Sequence[Comparison]) -> tuple[float | None, int]:
    """The standard deviation between seeds of one run, pooled over runs with several; and its degrees of freedom."""
    several = [loss for run in runs if (loss := padded_loss(run)) is not None and len(loss.values) > 1]
    degrees = sum(len(loss.values) - 1 for loss in several)
    squares = sum((len(loss.values) - 1) * (loss.stdev or 0.0) ** 2 for loss in several)
    return (math.sqrt(squares / degrees) if degrees else None), degrees


def make_spread(evidence: Evidence) -> AuditTable:
    """Differences from which the reports conclude, beside the spread between seeds."""
    runs, missing = evidence.part(dict.fromkeys(name for pair in PAIRS for name in pair))
    by_name = {run.name: run for run in runs}
    every, _ = evidence.part(dict.fromkeys(result.experiment.name for result in evidence.results))
    deviation, degrees = pool(every)
    pairs = [Pair(by_name[a], by_name[b], deviation) for a, b in PAIRS if a in by_name and b in by_name]

    def sign(value: float | Decimal | None) -> str:
        return ABSENT if value is None else f"{value:+.4f}"

    def count(pair: Pair) -> tuple[int, int]:
        return len(pair.later.results), len(pair.base.results)

    spread = ABSENT if deviation is None else f"{deviation:.4f} ({degrees})"
    cells = (
        Cell[Pair]("runs", lambda pair: f"{pair.later.name} − {pair.base.name}", numeric=False, names=True),
        Cell[Pair]("published difference", lambda pair: sign(pair.published)),
        Cell[Pair]("measured difference", lambda pair: sign(pair.measured)),
        Cell[Pair]("deviation between seeds (degrees of freedom)", lambda _: spread),
        Cell[Pair]("published, in standard errors", lambda pair: pair.compare(pair.published, 1, 1)),
        Cell[Pair]("measured, in standard errors", lambda pair: pair.compare(pair.measured, *count(pair))),
        Cell[Pair]("seeds", lambda pair: "{} and {}".format(*count(pair)), names=True),
    )
    return AuditTable(make_sheet("", cells, pairs), missing, list_departures(runs))


# --- the collapse ---------------------------------------------------------------------------------------------

TRAIN, VALID = "epoch {}, train", "epoch {}, val"


def make_collapse(evidence: Evidence) -> AuditTable:
    """A6 as published and as measured, what was changed to find its fault, and a predictor that ignores its input."""
    base = find_experiment("A6")
    runs, missing = evidence.part(e.name for e in EXPERIMENTS if e is base or e.derived_from == base.name)
    if not runs:
        return AuditTable((), missing)
    assert base.published is not None
    printed = {"run": "A6, published"}
    for row in base.published.epochs:
        printed |= {TRAIN.format(row.epoch): show_printed(row.train_loss)}
        printed |= {VALID.format(row.epoch): show_printed(row.val_loss)}
    rows = [printed, *(_describe_collapse(run) for run in runs)]
    seq_len = base.config.data.seq_len
    constant = find_constant(evidence, seq_len, base.config.model.vocab_size)
    if constant is None:
        missing.append(f"the constant predictor in rows of {seq_len} ({LENGTH_FILES})")
    else:
        rows.append(
            {
                "run": f"constant predictor (on the {constant.split} rows of {constant.run}, {seq_len} long)",
                VALID.format(base.config.train.epochs): show_common(constant.find("constant_loss_padded"), 4),
                "honest loss": show_common(constant.find("constant_loss"), 4),
            }
        )
    epochs = [kind.format(row.epoch) for row in base.published.epochs for kind in (TRAIN, VALID)]
    headers = (
        "run",
        "changed",
        *epochs,
        "honest loss",
        "gini, padding counted",
        "gini, real tokens",
        "experts used",
        "largest logged gradient norm",
        "seeds",
    )
    cells = [Cell[dict[str, str]](header, _look_up(header), numeric=header not in ("run", "changed"))
             for header in headers]  # fmt: skip
    return AuditTable(make_sheet("", cells, rows), missing, list_departures(runs))


def _look_up(header: str) -> Callable[[dict[str, str]], str]:
    return lambda row: row.get(header, ABSENT)


def _describe_collapse(run: Comparison) -> dict[str, str]:
    changes = list_changes(find_experiment("A6"), run.experiment)
    row = {
        "run": run.name,
        "changed": ", ".join(f"{c.field} {c.before} → {c.after}" for c in changes) or "nothing",
        "honest loss": HONEST.say(run),
        "gini, padding counted": GINI_ALL.say(run),
        "gini, real tokens": GINI_REAL.say(run),
        "experts used": USED.say(run),
        "largest logged gradient norm": recorded("max_gradient_norm", 2)(run),
        "seeds": SEEDS.say(run),
    }
    for point in run.epochs:
        row[TRAIN.format(point.epoch)] = show_spread(point.measured.get("train_loss"), 4)
        row[VALID.format(point.epoch)] = show_spread(point.measured.get("val_loss_padded"), 4)
    return row


def find_constant(evidence: Evidence, seq_len: int, vocab_size: int) -> Length | None:
    """Rows like A6's: of that length and vocabulary, of series A and of validation where there are some."""
    alike = []
    for length in evidence.lengths:
        run = next((e for e in EXPERIMENTS if e.name == length.run), None)
        if run and length.seq_len == seq_len and run.config.model.vocab_size == vocab_size:
            strangeness = (run.series != find_experiment("A6").series, length.split != "valid")
            alike.append((strangeness, length))
    return min(alike, key=lambda found: found[0])[1] if alike else None

"""The tables of the audit by name, each a function from what was measured to Markdown."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from some_moe.lab.card import list_changes
from some_moe.lab.published import Comparison, Result, compare_experiment
from some_moe.lab.published_tables import RUN, SEEDS, figure_column, show_difference, show_spread
from some_moe.lab.registry import EXPERIMENTS, find_experiment
from some_moe.layout import ABSENT, Column, format_number
from tools.audit_cells import (
    A_NAMES,
    B_NAMES,
    V_NAMES,
    Say,
    find_loss,
    find_printed_loss,
    pick,
    show_common,
    tabulate,
    write_table,
)
from tools.audit_evidence import Evidence, Length

LENGTH_FILES = "`results/audit/lengths-*.json`"
LENGTH_COLUMNS = {
    "share of text": ("text_share", True),
    "padded loss": ("loss_padded", False),
    "honest loss": ("loss", False),
    "constant predictor, padded": ("constant_loss_padded", True),
    "constant predictor, honest": ("constant_loss", True),
    "gini, padding counted": ("gini_padded", False),
    "gini, real tokens": ("gini", False),
}
"""{header: (field of the record, whether all seeds have it in common)}"""


def write_lengths(evidence: Evidence) -> str:
    """Trained models, scored again in rows of several lengths."""

    def find(name: str, is_common: bool) -> Callable[[Length], str]:
        show = show_common if is_common else show_spread
        return lambda row: show(row.find(name), 4)

    columns = (
        Column("run", lambda row: row.run),
        Column("split", lambda row: row.split),
        figure_column("seq_len", lambda row: str(row.seq_len)),
        *(figure_column(header, find(*column)) for header, column in LENGTH_COLUMNS.items()),
        figure_column("seeds", lambda row: str(len(row.records))),
    )
    missing = () if evidence.lengths else (f"trained models in rows of other lengths ({LENGTH_FILES})",)
    return write_table(columns, evidence.lengths, missing)


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


def write_assumptions(evidence: Evidence) -> str:
    """Published runs with one assumption changed at a time, each against the published loss."""

    def judge(run: Comparison) -> Comparison:
        """The run, with its end judged as if the report had made the same choice."""
        base = find_experiment(run.name.split("-")[0])
        published = compare_experiment(base, ()).published
        return replace(run, experiment=replace(run.experiment, series=base.series), published=published)

    runs, missing = evidence.part(
        name for base, others in ASSUMED.items() for name in (base, *(f"{base}-{other}" for other in others))
    )
    columns = (
        RUN,
        *pick("published loss", "padded loss"),
        figure_column("difference", show_difference),
        Column("verdict", lambda run: run.verdict),
        *pick("honest loss", "published gini", "gini, padding counted"),
        SEEDS,
    )
    return write_table(columns, [judge(run) for run in runs], missing, runs)


# --- differences and seeds ------------------------------------------------------------------------------------

PAIRS = (
    ("V9", "V8"), ("V10", "V8"), ("V10", "V9"), ("B1", "A4"), ("B2", "A4"), ("B3", "A4"), ("A2", "A1"), ("A3", "A1"),
    ("A4", "A1"), ("A4", "A2"), ("A5", "A3"),
)  # fmt: skip
"""The differences from which the reports draw conclusions."""
Pair = tuple[Comparison, Comparison]
Find = Callable[[Comparison], float | None]


def write_spread(evidence: Evidence) -> str:
    """Differences from which the reports conclude, beside the spread between seeds."""
    runs, missing = evidence.part(dict.fromkeys(name for pair in PAIRS for name in pair))
    found = {run.name: run for run in runs}
    deviation, degrees = pool_seeds(evidence)

    def subtract(pair: Pair, find: Find) -> float | None:
        later, base = map(find, pair)
        return None if later is None or base is None else later - base

    def sign(find: Find) -> Callable[[Pair], str]:
        return lambda pair: ABSENT if (value := subtract(pair, find)) is None else f"{value:+.4f}"

    def weigh(pair: Pair, find: Find, *seeds: int) -> str:
        """A difference between means over so many seeds, in its standard errors."""
        difference = subtract(pair, find)
        if difference is None or not deviation:
            return ABSENT
        return f"{abs(difference) / (deviation * math.sqrt(sum(1 / num for num in seeds))):.1f}"

    def count(pair: Pair) -> tuple[int, int]:
        return len(pair[0].results), len(pair[1].results)

    spread = ABSENT if deviation is None else f"{deviation:.4f} ({degrees})"
    columns = (
        Column("runs", lambda pair: f"{pair[0].name} − {pair[1].name}"),
        figure_column("published difference", sign(find_printed_loss)),
        figure_column("measured difference", sign(find_loss)),
        figure_column("deviation between seeds (degrees of freedom)", lambda _: spread),
        figure_column("published, in standard errors", lambda pair: weigh(pair, find_printed_loss, 1, 1)),
        figure_column("measured, in standard errors", lambda pair: weigh(pair, find_loss, *count(pair))),
        figure_column("seeds", lambda pair: "{} and {}".format(*count(pair))),
    )
    return write_table(columns, [(found[a], found[b]) for a, b in PAIRS if a in found and b in found], missing, runs)


def pool_seeds(evidence: Evidence) -> tuple[float | None, int]:
    """The standard deviation between seeds of one run, pooled over runs with several; and its degrees of freedom."""
    runs, _ = evidence.part(dict.fromkeys(result.experiment.name for result in evidence.results))
    losses = [run.measured["val_loss_padded"] for run in runs if "val_loss_padded" in run.measured]
    degrees = sum(len(loss.values) - 1 for loss in losses)
    squares = sum((len(loss.values) - 1) * (loss.stdev or 0.0) ** 2 for loss in losses)
    return (math.sqrt(squares / degrees) if degrees else None), degrees


def write_order(evidence: Evidence) -> str:
    """A1 to A5 from the lowest measured loss to the highest, with their places in the published order."""
    found, missing = evidence.part(A_NAMES[:5])

    def rank(runs: Sequence[Comparison], find: Find) -> list[Comparison]:
        return sorted(runs, key=lambda run: math.inf if (loss := find(run)) is None else loss)

    runs = rank(found, find_loss)
    places = {run.name: str(place) for place, run in enumerate(runs, 1)}
    published = {run.name: str(place) for place, run in enumerate(rank(runs, find_printed_loss), 1)}
    columns = (
        figure_column("place", lambda run: places[run.name]),
        RUN,
        *pick("padded loss"),
        figure_column("published place", lambda run: published[run.name]),
        *pick("published loss"),
        SEEDS,
    )
    return write_table(columns, runs, missing, runs)


# --- training losses, and the course of the other reports -----------------------------------------------------


def write_training(evidence: Evidence) -> str:
    """The training loss of the last published epoch, as published and as measured, beside that of validation."""
    runs, missing = evidence.part((*V_NAMES, *A_NAMES, *B_NAMES))

    def last(run: Comparison, name: str) -> tuple[float, float] | None:
        """A loss of the last epoch, published and measured."""
        point = run.epochs[-1]
        measured = point.measured.get("train_loss" if name == "train_loss" else point.loss_name)
        return (float(point.published[name]), measured.mean) if name in point.published and measured else None

    def cell(name: str, say: Callable[[float, float], str]) -> Say:
        return lambda run: ABSENT if (pair := last(run, name)) is None else say(*pair)

    columns = [RUN]
    for name, head in (("train_loss", "training"), ("val_loss", "validation")):
        columns += [
            figure_column(f"published {head}", cell(name, lambda there, _: f"{there:.4f}")),
            figure_column(f"{head} here", cell(name, lambda _, here: f"{here:.4f}")),
            figure_column(f"{head}, difference", cell(name, lambda there, here: f"{here / there - 1:+.1%}")),
        ]
    return write_table([*columns, SEEDS], runs, missing, runs)


def write_course(evidence: Evidence) -> str:
    """The reports from v2 on: the loss as each counts it, after each published epoch, and the keys that respawned."""
    runs, missing = evidence.part(REPORTS)

    def at(epoch: int) -> Say:
        return lambda run: show_spread(next((point.loss for point in run.epochs if point.epoch == epoch), None))

    columns = (
        RUN,
        *pick("published loss"),
        *(figure_column(f"after epoch {epoch}", at(epoch)) for epoch in range(1, 5)),
        *pick("respawns"),
        SEEDS,
    )
    return write_table(columns, runs, missing, runs)


# --- the collapse ---------------------------------------------------------------------------------------------


def write_collapse(evidence: Evidence) -> str:
    """A6 as published and as measured, what was changed to find its fault, and a predictor that ignores its input."""
    base = find_experiment("A6")
    assert base.published is not None
    runs, missing = evidence.part(e.name for e in EXPERIMENTS if e is base or e.derived_from == base.name)
    if not runs:
        return write_table((), (), missing)

    def at(epoch: int, name: str) -> Say:
        return lambda run: show_spread(next((p.measured.get(name) for p in run.epochs if p.epoch == epoch), None))

    def list_changed(run: Comparison) -> str:
        changes = list_changes(base, run.experiment)
        return ", ".join(f"{name} {change}" for name, change in changes) or "nothing"

    epochs, published = [], {"run": "A6, published"}
    for row in base.published.epochs:
        for kind, name, value in (("train", "train_loss", row.train_loss), ("val", "val_loss_padded", row.val_loss)):
            epochs.append(figure_column(f"epoch {row.epoch}, {kind}", at(row.epoch, name)))
            published[epochs[-1].header] = ABSENT if value is None else str(value)
    columns = (
        RUN,
        Column("changed", list_changed),
        *epochs,
        *pick("honest loss", "gini, padding counted", "gini, real tokens", "experts used"),
        *pick("largest logged gradient norm"),
        SEEDS,
    )
    rows = [published, *({cell.header: cell.say(run) for cell in columns} for run in runs)]
    seq_len = base.config.data.seq_len
    constant = find_constant(evidence, seq_len, base.config.model.vocab_size)
    if constant is None:
        missing.append(f"the constant predictor in rows of {seq_len} ({LENGTH_FILES})")
    else:
        row_name = f"constant predictor (on the {constant.split} rows of {constant.run}, {seq_len} long)"
        padded, honest = (show_common(constant.find(name), 4) for name in ("constant_loss_padded", "constant_loss"))
        rows.append({"run": row_name, epochs[-1].header: padded, "honest loss": honest})

    def look_up(header: str) -> Callable[[dict[str, str]], str]:
        return lambda row: row.get(header, ABSENT)

    return write_table([replace(c, say=look_up(c.header)) for c in columns], rows, missing, runs)


def find_constant(evidence: Evidence, seq_len: int, vocab_size: int) -> Length | None:
    """Rows like A6's: of that length and vocabulary, of series A and of validation where there are some."""
    alike = []
    for length in evidence.lengths:
        run = next((e for e in EXPERIMENTS if e.name == length.run), None)
        if run and length.seq_len == seq_len and run.config.model.vocab_size == vocab_size:
            strangeness = (run.series != find_experiment("A6").series, length.split != "valid")
            alike.append((strangeness, length))
    return min(alike, key=lambda found: found[0])[1] if alike else None


# --- the cost -------------------------------------------------------------------------------------------------

Group = tuple[str, Sequence[Result]]
"""A series and its results."""


def write_cost(evidence: Evidence) -> str:
    """Steps, seconds and speed of every result, by series and in all."""
    series = dict.fromkeys(result.experiment.series for result in evidence.results)
    groups: list[Group] = [(one, [r for r in evidence.results if r.experiment.series == one]) for one in series]
    if groups:
        groups.append(("all", evidence.results))

    def add(group: Group, name: str) -> float | None:
        """The sum; None where a result does not say its part."""
        parts = [part for result in group[1] if (part := result.number(name)) is not None]
        return sum(parts) if len(parts) == len(group[1]) else None

    def find_speed(group: Group) -> float | None:
        tokens, seconds = add(group, "tokens"), add(group, "seconds")
        return tokens / seconds if tokens is not None and seconds else None

    columns = (
        Column("series", lambda group: group[0]),
        figure_column("runs", lambda group: str(len(group[1]))),
        figure_column("steps", lambda group: format_number(add(group, "steps"), ",.0f")),
        figure_column("seconds of training", lambda group: format_number(add(group, "seconds"), ",.0f")),
        figure_column("real tokens per second", lambda group: format_number(find_speed(group), ",.0f")),
    )
    _, missing = evidence.part(e.name for e in EXPERIMENTS if e.published is not None)
    return write_table(columns, groups, missing)


REPORTS = ("v2-professional", "v3.5-decay-fix", "v5-linear", "v5-mlp", "v6-decay-fix", "v7-clamp-fix")

# --- by name --------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[Evidence], str]] = {
    "context": tabulate(
        ("V2", "V8", "V7"),
        "seq_len", "batch", "share of text", "published loss", "published ÷ share of text", "padded loss",
        "honest loss", "bits per byte",
    ),
    "lengths": write_lengths,
    "gini": tabulate(
        (*A_NAMES, *B_NAMES, *V_NAMES),
        "published gini", "gini, padding counted", "gini, real tokens", "published entropy, bits",
        "entropy, padding counted", "entropy, real tokens", "published used", "experts used",
        "chosen in the first pass of training",
    ),
    "pace": tabulate(
        ("V7", "V8", "V7-half", "V8-long"),
        "batch", "steps", "rows seen", "published loss", "padded loss", "honest loss",
    ),
    "vocabulary": tabulate(
        ("V2", "V4"),
        "vocabulary asked for", "ids of the tokenizer", "nats per token", "bits per byte", "padded loss",
        "published loss",
    ),
    "experts": tabulate(
        ("A4", *B_NAMES),
        "experts", "parameters", "published loss", "padded loss", "honest loss", "gini, real tokens", "experts used",
        "seconds",
    ),
    "passes": tabulate(
        (*V_NAMES, *A_NAMES, *B_NAMES),
        "passes over the stories", "steps", "best step", "honest loss then", "honest loss at the end",
    ),
    "assumptions": write_assumptions,
    "spread": write_spread,
    "order": write_order,
    "mvp": tabulate(
        ("mvp-v2", "mvp-v3", "mvp-v4", "mvp-v6", *REPORTS),
        "published loss", "published perplexity", "loss as the report counts", "honest loss",
        "perplexity of the honest loss", "share of text",
    ),
    "training": write_training,
    "course": write_course,
    "collapse": write_collapse,
    "cost": write_cost,
}  # fmt: skip

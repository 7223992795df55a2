"""Published against measured as tables, narrow enough for a terminal of 80 columns and for a phone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from some_moe.lab.published import (
    NO_TOLERANCE,
    NOT_MEASURED,
    NOT_PUBLISHED,
    OUTSIDE,
    WITHIN,
    Comparison,
    Point,
    Result,
    Spread,
    judge,
    loss_name,
)
from some_moe.lab.registry import EXPERIMENTS
from some_moe.lab.result_notes import list_notes
from some_moe.layout import Column, Style, format_table, wrap

ABSENT = "–"
WIDEST_TEXT = 100
T = TypeVar("T")

MEANINGS = {
    WITHIN: "within the tolerance",
    OUTSIDE: "outside the tolerance",
    NO_TOLERANCE: "published and measured, no tolerance set",
    NOT_PUBLISHED: "measured, not published",
    NOT_MEASURED: "published, not measured yet",
}

LOSSES = {"val_loss_padded": "padding counted", "val_loss": "real tokens"}
LOSS_NOTE = "Validation, in nats; difference: measured minus published."
REAL_NOTE = (
    "Loss in nats per real token at the end and at the best step, and the perplexity at the end. The reports up to v4 "
    "count padding, which is easy to foresee: their perplexities belong beside the column with padding."
)
USAGE_NOTE = "Of selections in validation. The reports up to v4 count all positions, padding too."


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table, with its title and how to read it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Cell(Generic[T]):
    """One column: its header, and what it says of a row. The headers of `names` stand for the row itself."""

    header: str
    say: Callable[[T], str]
    numeric: bool = True
    names: bool = False
    wraps: bool = False


def make_sheet(title: str, cells: Sequence[Cell[T]], rows: Sequence[T], note: str = "") -> list[Sheet]:
    """Return the table without the columns that say nothing; no table where nothing is said."""
    filled = [(cell, [cell.say(row) for row in rows]) for cell in cells]
    filled = [(cell, texts) for cell, texts in filled if set(texts) - {ABSENT}]
    if all(cell.names for cell, _ in filled):
        return []
    columns = [Column(cell.header, numeric=cell.numeric, wraps=cell.wraps) for cell, _ in filled]
    return [Sheet(title=title, columns=columns, rows=list(zip(*(t for _, t in filled), strict=True)), note=note)]


# --- cells ----------------------------------------------------------------------------------------------------


def show_spread(spread: Spread | None, digits: int) -> str:
    """The figure, or mean ± standard deviation over several seeds."""
    if spread is None:
        return ABSENT
    text = f"{spread.mean:,.{digits}f}"
    return text if spread.stdev is None else f"{text} ± {spread.stdev:.{digits}f}"


def show_number(value: float | None, digits: int = 0) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"


def show_difference(point: Point) -> str:
    """Measured minus published, and as a share of the published loss where the tolerance is one."""
    if point.difference is None:
        return ABSENT
    text = f"{point.difference:+.4f}"
    if point.tolerance is not None and point.tolerance.share:
        text += f" ({float(point.difference) / float(point.published['val_loss']):+.1%})"
    return text


def _published(name: str) -> Callable[[Point], str]:
    return lambda point: str(point.published.get(name, ABSENT))


def _measured(name: str, digits: int) -> Callable[[Point], str]:
    return lambda point: show_spread(point.measured.get(name), digits)


RUN = Cell[Point]("run", lambda point: point.run.name, numeric=False, names=True)
EPOCH = Cell[Point]("epoch", lambda point: "end" if point.epoch is None else str(point.epoch), names=True)

LOSS = (
    Cell[Point]("published", _published("val_loss")),
    Cell[Point]("measured", lambda point: show_spread(point.loss, 4)),
    Cell[Point]("difference", show_difference),
    Cell[Point]("verdict", lambda point: point.verdict, numeric=False),
)
REAL = (
    Cell[Point]("loss", _measured("val_loss", 4)),
    Cell[Point]("best", _measured("best_val_loss", 4)),
    Cell[Point]("bits per byte", _measured("bits_per_byte", 4)),
    Cell[Point]("perplexity", _measured("perplexity", 2)),
    Cell[Point]("with padding", _measured("perplexity_padded", 2)),
    Cell[Point]("published", _published("perplexity")),
)
GINI = (
    Cell[Point]("published", _published("gini")),
    Cell[Point]("all positions", _measured("gini_all", 3)),
    Cell[Point]("real tokens", _measured("gini_real", 3)),
)
ENTROPY = (
    Cell[Point]("published", _published("entropy_bits")),
    Cell[Point]("all positions", _measured("entropy_bits_all", 3)),
    Cell[Point]("real tokens", _measured("entropy_bits_real", 3)),
)
USED = (
    Cell[Point]("published", _published("experts_used")),
    Cell[Point]("measured", lambda point: show_spread(point.measured.get("experts_used"), _used_digits(point))),
    Cell[Point]("of", lambda point: show_experts(point), names=True),
)


def show_experts(point: Point) -> str:
    """How many experts a layer has; all seeds have as many."""
    experts = point.measured.get("num_experts")
    return ABSENT if experts is None else show_number(experts.values[0])


def _used_digits(point: Point) -> int:
    """Whole experts, unless it is a mean over seeds."""
    return int(len(point.measured["experts_used"].values) > 1)


# --- tables ---------------------------------------------------------------------------------------------------


def point_sheets(points: Sequence[Point], rows: Sequence[Cell[Point]]) -> list[Sheet]:
    """Everything that was published and measured at some moments. rows: the cells that name a row."""
    measured = [point for point in points if point.measured]
    kinds = {loss_name(point.run) for point in points}
    kind = "as each report counts it" if len(kinds) > 1 else LOSSES[kinds.pop()] if kinds else ""
    return [
        *make_sheet(f"Validation loss, {kind}", (*rows, *LOSS), points, LOSS_NOTE),
        *make_sheet("Validation over real tokens, and perplexity", (*rows, *REAL), measured, REAL_NOTE),
        *make_sheet("Gini of the middle layer", (*rows, *GINI), measured, USAGE_NOTE),
        *make_sheet("Entropy of the middle layer, bits", (*rows, *ENTROPY), measured),
        *make_sheet("Experts used in the middle layer", (*rows, *USED), measured),
    ]


def final_sheets(comparisons: Sequence[Comparison]) -> list[Sheet]:
    """The ends of the runs; those not measured yet are there with their published loss."""
    return point_sheets([comparison.final for comparison in comparisons], (RUN,))


def epoch_sheets(comparisons: Sequence[Comparison]) -> list[Sheet]:
    """Every epoch of the runs that were measured."""
    return point_sheets([point for c in comparisons if c.results for point in c.epochs], (RUN, EPOCH))


def moment_sheets(comparisons: Sequence[Comparison]) -> list[Sheet]:
    """Epochs and ends together, run by run; a run of one epoch has its end alone."""
    points: list[Point] = []
    for comparison in comparisons:
        steps = comparison.epochs if comparison.results and len(comparison.epochs) > 1 else ()
        points += [*steps, comparison.final]
    return point_sheets(points, (RUN, EPOCH))


def count_series(series: str) -> int:
    """How many registered experiments belong to a series."""
    return sum(experiment.series == series for experiment in EXPERIMENTS)


def make_overview(comparisons: Sequence[Comparison]) -> list[Sheet]:
    """One row a series: how many of its runs were measured, and how many published losses were met."""

    def count(verdict: str) -> Callable[[Sequence[Comparison]], str]:
        return lambda members: str(sum(point.verdict == verdict for c in members for point in c.judged))

    cells = (
        Cell[Sequence[Comparison]]("series", lambda m: m[0].experiment.series, numeric=False, names=True),
        Cell[Sequence[Comparison]]("tolerance", lambda m: str(m[0].final.tolerance or ABSENT), numeric=False),
        Cell[Sequence[Comparison]]("registered", lambda m: str(count_series(m[0].experiment.series))),
        Cell[Sequence[Comparison]]("measured", lambda m: str(sum(bool(c.results) for c in m))),
        Cell[Sequence[Comparison]](WITHIN, count(WITHIN)),
        Cell[Sequence[Comparison]](OUTSIDE, count(OUTSIDE)),
    )
    note = "Within and outside (on either side) count published losses, of every epoch that a report prints."
    return make_sheet("Published losses", cells, list(group_comparisons(comparisons).values()), note)


def size_sheet(comparisons: Sequence[Comparison]) -> list[Sheet]:
    """Exact sizes beside the published ones, in millions."""

    def published(name: str) -> Callable[[Comparison], str]:
        return lambda c: str(getattr(c.experiment.published, name, None) or ABSENT)

    cells = (
        Cell[Comparison]("run", lambda c: c.name, numeric=False, names=True),
        Cell[Comparison]("parameters", lambda c: show_number(_count(c, "total_parameters"))),
        Cell[Comparison]("published M", published("total_parameters_millions")),
        Cell[Comparison]("trained", lambda c: show_number(_count(c, "trainable_parameters"))),
        Cell[Comparison]("published M", published("trainable_parameters_millions")),
    )
    return make_sheet("Size", cells, [c for c in comparisons if c.results])


def _count(comparison: Comparison, name: str) -> float | None:
    """The parameters that the runs had; all seeds have as many."""
    return next((count for result in comparison.results if (count := result.number(name)) is not None), None)


def cost_sheet(results: Sequence[Result]) -> list[Sheet]:
    """One row a file: steps, speed, seconds, device."""

    def published_steps(result: Result) -> str:
        published = result.experiment.published
        return show_number(published.steps if published else None)

    cells = (
        Cell[Result]("file", lambda r: r.file.name, numeric=False, names=True),
        Cell[Result]("steps", lambda r: show_number(r.number("steps"))),
        Cell[Result]("published", published_steps),
        Cell[Result]("tokens/s", lambda r: show_number(r.number("tokens_per_second"))),
        Cell[Result]("seconds", lambda r: show_number(r.number("seconds"), digits=1)),
        Cell[Result]("runs at once", lambda r: show_number(r.number("at_once"))),
        Cell[Result]("device", lambda r: r.text("device") or ABSENT, numeric=False, wraps=True),
    )
    return make_sheet(
        "Steps and speed",
        cells,
        results,
        "Seconds are of training steps alone, on a machine that other runs may have shared.",
    )


def seed_sheet(comparisons: Sequence[Comparison]) -> list[Sheet]:
    """How far seeds lie apart, for the runs that have several."""

    def spread(name: str, digits: int) -> Callable[[Comparison], str]:
        return lambda c: show_spread(c.final.measured.get(name), digits)

    def extent(comparison: Comparison) -> str:
        loss = comparison.final.measured.get("val_loss")
        return ABSENT if loss is None else f"{min(loss.values):.4f} to {max(loss.values):.4f}"

    cells = (
        Cell[Comparison]("run", lambda c: c.name, numeric=False, names=True),
        Cell[Comparison]("seeds", lambda c: str(len(c.results)), names=True),
        Cell[Comparison]("with padding", spread("val_loss_padded", 4)),
        Cell[Comparison]("real tokens", spread("val_loss", 4)),
        Cell[Comparison]("lowest to highest", extent),
    )
    rows = [c for c in comparisons if len(c.results) > 1]
    note = "Mean ± standard deviation at the last step; lowest and highest are over real tokens."
    return make_sheet("Validation loss over seeds", cells, rows, note)


# --- text -----------------------------------------------------------------------------------------------------


def group_comparisons(comparisons: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    """Return {series: its comparisons}, in the registry's order."""
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(comparison.experiment.series, []).append(comparison)
    return groups


def head_series(series: str, comparisons: Sequence[Comparison]) -> str:
    tolerance = comparisons[0].final.tolerance
    return series if tolerance is None else f"{series}, tolerance {tolerance}"


def list_verdicts(comparisons: Sequence[Comparison]) -> list[tuple[str, str]]:
    """Pairs of a verdict's meaning and the losses it is about; verdicts about none are left out."""
    pairs = []
    for verdict, judgements in judge(comparisons).items():
        runs: dict[tuple[int, ...], list[str]] = {}
        for judgement in judgements:
            runs.setdefault(judgement.epochs, []).append(judgement.run)
        parts = [", ".join(names) + _name_epochs(epochs) for epochs, names in runs.items()]
        if parts:
            pairs.append((MEANINGS[verdict], "; ".join(parts)))
    return pairs


def _name_epochs(epochs: Sequence[int]) -> str:
    if not epochs:
        return ""
    return f" (epoch{'s' if len(epochs) > 1 else ''} {', '.join(map(str, epochs))})"


def format_comparisons(
    comparisons: Sequence[Comparison],
    *,
    every_epoch: bool,
    left_out: Sequence[str] = (),
    width: int | None,
    style: Style,
) -> str:
    """What `some experiments compare` prints: the ends of the runs, or every epoch too."""
    lines: list[str] = []
    for series, members in group_comparisons(comparisons).items():
        results = [result for comparison in members for result in comparison.results]
        if not results:
            continue
        lines += [style.bold(head_series(series, members)), ""]
        points = moment_sheets(members) if every_epoch else final_sheets(members)
        for sheet in (*points, *seed_sheet(members), *size_sheet(members), *cost_sheet(results)):
            lines.append("  " + sheet.title)
            lines += [*format_table(sheet.columns, sheet.rows, width=width, style=style, indent="    "), ""]
    text_width = min(width or WIDEST_TEXT, WIDEST_TEXT)
    lines.append(style.bold("Validation losses, published and measured"))
    for meaning, which in list_verdicts(comparisons):
        lines += wrap(which, width=text_width, indent="  ", bullet=f"{meaning}: ")
    notes = [*list_notes(comparisons), *(f"{name} is no result of a registered experiment." for name in left_out)]
    if notes:
        lines += ["", style.bold("Notes")]
        lines += [line for note in notes for line in wrap(note, width=text_width, indent="  ", bullet="- ")]
    if not every_epoch:
        lines += ["", "`some experiments compare NAME` shows every epoch of a run or a series."]
    return "\n".join(lines) + "\n"

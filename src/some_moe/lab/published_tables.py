"""Published against measured as tables, narrow enough for a terminal of 80 columns and for a phone."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from some_moe.lab.published import OUTSIDE, VERDICTS, WITHIN, Comparison, Point, Result, Spread, judge, loss_name
from some_moe.lab.registry import EXPERIMENTS
from some_moe.lab.result_notes import list_notes
from some_moe.layout import Column, Style, format_table, wrap

ABSENT = "–"
WIDEST_TEXT = 100
T = TypeVar("T")
Row = TypeVar("Row", contravariant=True)

LOSSES = {"val_loss_padded": "padding counted", "val_loss": "real tokens"}
LOSS_NOTE = "Validation, in nats; difference: measured minus published."
REAL_NOTE = (
    "Loss in nats per real token at the end and at the best step, and the perplexity at the end. The reports up to v4 "
    "count padding, which is easy to foresee: their perplexities belong beside the column with padding."
)
SEED_NOTE = "Mean ± standard deviation at the last step; lowest and highest are over real tokens."
COST_NOTE = "Seconds are of training steps alone, on a machine that other runs may have shared."
OVERVIEW_NOTE = "Within and outside (on either side) count published losses, of every epoch that a report prints."
USAGE_NOTE = "Of selections in validation. The reports up to v4 count all positions, padding too."


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table, with its title and how to read it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Cell(Generic[Row]):
    """One column: its header, and what it says of a row. The headers of `names` stand for the row itself."""

    header: str
    say: Callable[[Row], str]
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


Moment = Comparison | Point
"""What has a name, published figures and measured ones; a run stands for its end."""


def show_number(value: float | None, digits: int = 0) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"


def show_spread(spread: Spread | None, digits: int = 4) -> str:
    """The figure, or mean ± standard deviation over several seeds."""
    if spread is None:
        return ABSENT
    return show_number(spread.mean, digits) + ("" if spread.stdev is None else f" ± {spread.stdev:.{digits}f}")


def show_difference(point: Point) -> str:
    """Measured minus published, and as a share of the published loss where the tolerance is one."""
    if point.difference is None:
        return ABSENT
    text = f"{point.difference:+.4f}"
    if point.tolerance is not None and point.tolerance.share:
        text += f" ({float(point.difference) / float(point.published['val_loss']):+.1%})"
    return text


def show_used(moment: Moment) -> str:
    """Experts used: whole ones, unless it is a mean over seeds."""
    used = moment.measured.get("experts_used")
    return show_spread(used, int(used is not None and len(used.values) > 1))


def show_experts(moment: Moment) -> str:
    """How many experts a layer has; all seeds have as many."""
    experts = moment.measured.get("num_experts")
    return ABSENT if experts is None else show_number(experts.values[0])


def printed(name: str) -> Callable[[Moment], str]:
    """A published figure, digit for digit."""
    return lambda moment: str(moment.published.get(name, ABSENT))


def measured(name: str, digits: int = 4) -> Callable[[Moment], str]:
    """A figure over all seeds."""
    return lambda moment: show_spread(moment.measured.get(name), digits)


RUN = Cell[Moment]("run", lambda moment: moment.name, numeric=False, names=True)
SEEDS = Cell[Comparison]("seeds", lambda run: str(len(run.results)), names=True)
EPOCH = Cell[Point]("epoch", lambda point: "end" if point.epoch is None else str(point.epoch), names=True)
LOSS: Sequence[Cell[Point]] = (
    Cell("published", printed("val_loss")),
    Cell("measured", lambda point: show_spread(point.loss)),
    Cell("difference", show_difference),
    Cell("verdict", lambda point: point.verdict, numeric=False),
)
REAL: Sequence[Cell[Point]] = (
    Cell("loss", measured("val_loss")),
    Cell("best", measured("best_val_loss")),
    Cell("bits per byte", measured("bits_per_byte")),
    Cell("perplexity", measured("perplexity", 2)),
    Cell("with padding", measured("perplexity_padded", 2)),
    Cell("published", printed("perplexity")),
)
GINI, ENTROPY = (
    (
        Cell[Point]("published", printed(name)),
        Cell[Point]("all positions", measured(f"{name}_all", 3)),
        Cell[Point]("real tokens", measured(f"{name}_real", 3)),
    )
    for name in ("gini", "entropy_bits")
)
USED: Sequence[Cell[Point]] = (
    Cell("published", printed("experts_used")),
    Cell("measured", show_used),
    Cell("of", show_experts, names=True),
)


def _show_extent(run: Comparison) -> str:
    loss = run.measured.get("val_loss")
    return ABSENT if loss is None else f"{min(loss.values):.4f} to {max(loss.values):.4f}"


def _count(name: str) -> Callable[[Comparison], str]:
    """The parameters that the runs had; all seeds have as many."""
    return lambda run: show_number(next((n for r in run.results if (n := r.number(name)) is not None), None))


def _published_size(name: str) -> Callable[[Comparison], str]:
    return lambda run: str(getattr(run.experiment.published, name, None) or ABSENT)


def _recorded(name: str, digits: int = 0) -> Callable[[Result], str]:
    return lambda result: show_number(result.number(name), digits)


OVER_SEEDS: Sequence[Cell[Comparison]] = (
    RUN,
    SEEDS,
    Cell("with padding", measured("val_loss_padded")),
    Cell("real tokens", measured("val_loss")),
    Cell("lowest to highest", _show_extent),
)
SIZE: Sequence[Cell[Comparison]] = (
    RUN,
    Cell("parameters", _count("total_parameters")),
    Cell("published M", _published_size("total_parameters_millions")),
    Cell("trained", _count("trainable_parameters")),
    Cell("published M", _published_size("trainable_parameters_millions")),
)
COST: Sequence[Cell[Result]] = (
    Cell("file", lambda result: result.file.name, numeric=False, names=True),
    Cell("steps", _recorded("steps")),
    Cell("published", lambda result: show_number(getattr(result.experiment.published, "steps", None))),
    Cell("tokens/s", _recorded("tokens_per_second")),
    Cell("seconds", _recorded("seconds", 1)),
    Cell("runs at once", _recorded("at_once")),
    Cell("device", lambda result: result.text("device") or ABSENT, numeric=False, wraps=True),
)


# --- tables ---------------------------------------------------------------------------------------------------


def list_sheets(comparisons: Sequence[Comparison], *, every_epoch: bool = False) -> list[Sheet]:
    """All tables of some runs: their ends, published losses of those not measured too, then seeds, sizes and cost.

    every_epoch: before each end stand the epochs, where there are several.
    """
    points: list[Point] = []
    for run in comparisons:
        points += run.epochs if every_epoch and run.results and len(run.epochs) > 1 else ()
        points.append(run.final)
    results = [result for run in comparisons for result in run.results]
    return [
        *point_sheets(points, (RUN, EPOCH) if every_epoch else (RUN,)),
        *make_sheet(
            "Validation loss over seeds", OVER_SEEDS, [c for c in comparisons if len(c.results) > 1], SEED_NOTE
        ),
        *make_sheet("Size", SIZE, [run for run in comparisons if run.results]),
        *make_sheet("Steps and speed", COST, results, COST_NOTE),
    ]


def epoch_sheets(comparisons: Sequence[Comparison]) -> list[Sheet]:
    """Every epoch of the runs that were measured."""
    return point_sheets([point for run in comparisons if run.results for point in run.epochs], (RUN, EPOCH))


def point_sheets(points: Sequence[Point], rows: Sequence[Cell[Point]]) -> list[Sheet]:
    """Everything that was published and measured at some moments. rows: the cells that name a row."""
    found = [point for point in points if point.measured]
    kinds = {loss_name(point.run) for point in points}
    kind = "as each report counts it" if len(kinds) > 1 else LOSSES[kinds.pop()] if kinds else ""
    return [
        *make_sheet(f"Validation loss, {kind}", (*rows, *LOSS), points, LOSS_NOTE),
        *make_sheet("Validation over real tokens, and perplexity", (*rows, *REAL), found, REAL_NOTE),
        *make_sheet("Gini of the middle layer", (*rows, *GINI), found, USAGE_NOTE),
        *make_sheet("Entropy of the middle layer, bits", (*rows, *ENTROPY), found),
        *make_sheet("Experts used in the middle layer", (*rows, *USED), found),
    ]


def make_overview(comparisons: Sequence[Comparison]) -> list[Sheet]:
    """One row a series: how many of its runs were measured, and how many published losses were met."""
    registered = Counter(experiment.series for experiment in EXPERIMENTS)

    def count(verdict: str) -> Callable[[Sequence[Comparison]], str]:
        return lambda members: str(sum(point.verdict == verdict for c in members for point in c.judged))

    cells: Sequence[Cell[Sequence[Comparison]]] = (
        Cell("series", lambda members: members[0].experiment.series, numeric=False, names=True),
        Cell("tolerance", lambda members: str(members[0].final.tolerance or ABSENT), numeric=False),
        Cell("registered", lambda members: str(registered[members[0].experiment.series])),
        Cell("measured", lambda members: str(sum(bool(c.results) for c in members))),
        Cell(WITHIN, count(WITHIN)),
        Cell(OUTSIDE, count(OUTSIDE)),
    )
    return make_sheet("Published losses", cells, list(group_comparisons(comparisons).values()), OVERVIEW_NOTE)


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
        if runs:
            which = "; ".join(", ".join(names) + _name_epochs(epochs) for epochs, names in runs.items())
            pairs.append((VERDICTS[verdict], which))
    return pairs


def _name_epochs(epochs: Sequence[int]) -> str:
    return f" (epoch{'s' if len(epochs) > 1 else ''} {', '.join(map(str, epochs))})" if epochs else ""


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
        if not any(run.results for run in members):
            continue
        lines += [style.bold(head_series(series, members)), ""]
        for sheet in list_sheets(members, every_epoch=every_epoch):
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

"""Published against measured as tables, narrow enough for a terminal of 80 columns and for a phone, with notes."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from some_moe.config.run import EXECUTION
from some_moe.lab.card import WIDEST_TEXT, format_value
from some_moe.lab.published import VERDICTS, Comparison, Point, Result, Spread, finite_number, judge
from some_moe.layout import ABSENT, Column, Style, Table, format_number, format_table, make_table, split_table, wrap

LOSSES = {"val_loss_padded": "padding counted", "val_loss": "real tokens"}
NAMES = {"run", "epoch", "seeds", "file", "of"}
"""Headers that stand for a row itself: alone they say nothing."""


def show_spread(spread: Spread | None, digits: int = 4) -> str:
    """The figure, or mean ± standard deviation over several seeds."""
    if spread is None:
        return ABSENT
    return f"{spread.mean:,.{digits}f}" + ("" if spread.stdev is None else f" ± {spread.stdev:.{digits}f}")


def show_difference(point: Point) -> str:
    """Measured minus published, and as a share of the published loss where the tolerance is one."""
    if point.difference is None:
        return ABSENT
    shared = point.tolerance is not None and point.tolerance.share
    share = f" ({float(point.difference) / float(point.published['val_loss']):+.1%})" if shared else ""
    return f"{point.difference:+.4f}{share}"


def show_used(point: Point) -> str:
    """Experts used: whole ones, unless it is a mean over seeds."""
    used = point.measured.get("experts_used")
    return show_spread(used, int(used is not None and len(used.values) > 1))


def show_experts(point: Point) -> str:
    """How many experts a layer has; all seeds have as many."""
    experts = point.measured.get("num_experts")
    return ABSENT if experts is None else f"{experts.values[0]:,.0f}"


def _show_extent(run: Comparison) -> str:
    loss = run.measured.get("val_loss")
    return ABSENT if loss is None else f"{min(loss.values):.4f} to {max(loss.values):.4f}"


def figure_column(header: str, say: Callable[[Any], str]) -> Column:
    return Column(header, say, numeric=True)


def printed_column(header: str, name: str) -> Column:
    """A published figure, digit for digit."""
    return figure_column(header, lambda point: str(point.published.get(name, ABSENT)))


def measured_column(header: str, name: str, digits: int = 4) -> Column:
    """A figure over all seeds."""
    return figure_column(header, lambda point: show_spread(point.measured.get(name), digits))


def _usage_columns(name: str) -> tuple[Column, ...]:
    every, real = measured_column("all positions", f"{name}_all", 3), measured_column("real tokens", f"{name}_real", 3)
    return printed_column("published", name), every, real


def _recorded_column(header: str, name: str, form: str = ",.0f") -> Column:
    """What one result says."""
    return figure_column(header, lambda result: format_number(result.number(name), form))


def _stated_column(header: str, name: str, form: str = "") -> Column:
    """What the report of a result's experiment says."""
    return figure_column(header, lambda result: format_number(getattr(result.experiment.published, name, None), form))


# --- tables ---------------------------------------------------------------------------------------------------

RUN = Column("run", lambda row: row.experiment.name)
EPOCH = figure_column("epoch", lambda point: "end" if point.epoch is None else str(point.epoch))
SEEDS = figure_column("seeds", lambda run: str(len(run.results)))
LOSS = (
    printed_column("published", "val_loss"),
    figure_column("measured", lambda point: show_spread(point.loss)),
    figure_column("difference", show_difference),
    Column("verdict", lambda point: point.verdict),
)
FIGURES = {
    "Validation over real tokens, and perplexity": (
        measured_column("loss", "val_loss"),
        measured_column("best", "best_val_loss"),
        measured_column("bits per byte", "bits_per_byte"),
        measured_column("perplexity", "perplexity", 2),
        measured_column("with padding", "perplexity_padded", 2),
        printed_column("published", "perplexity"),
    ),
    "Gini of the middle layer": _usage_columns("gini"),
    "Entropy of the middle layer, bits": _usage_columns("entropy_bits"),
    "Experts used in the middle layer": (
        printed_column("published", "experts_used"),
        figure_column("measured", show_used),
        figure_column("of", show_experts),
    ),
}
"""Tables of what is measured besides the loss that is judged."""
OVER_SEEDS = (
    RUN,
    SEEDS,
    measured_column("with padding", "val_loss_padded"),
    measured_column("real tokens", "val_loss"),
    figure_column("lowest to highest", _show_extent),
)
SIZE = (
    RUN,
    _recorded_column("parameters", "total_parameters"),
    _stated_column("published M", "total_parameters_millions"),
    _recorded_column("trained", "trainable_parameters"),
    _stated_column("published M", "trainable_parameters_millions"),
)
COST = (
    Column("file", lambda result: result.file.name),
    _recorded_column("steps", "steps"),
    _stated_column("published", "steps", ","),
    _recorded_column("tokens/s", "tokens_per_second"),
    _recorded_column("seconds", "seconds", ",.1f"),
    _recorded_column("runs at once", "at_once"),
    Column("device", lambda result: result.text("device") or ABSENT, wraps=True),
)


def make_tables(*parts: tuple[str, Sequence[Column], Sequence[Any]]) -> dict[str, Table]:
    """Return {title: table} without the columns, and the tables, that say nothing. parts: (title, columns, rows)."""
    tables = {title: make_table(columns, rows, silence=ABSENT) for title, columns, rows in parts if rows}
    return {title: table for title, table in tables.items() if {column.header for column in table.columns} - NAMES}


def list_tables(comparisons: Sequence[Comparison], *, every_epoch: bool = False) -> dict[str, Table]:
    """All tables of some runs: their ends, published losses of those not measured too, then seeds, sizes and cost.

    every_epoch: before each end stand the epochs, where there are several.
    """
    points: list[Point] = []
    for run in comparisons:
        points += [*run.epochs, run] if every_epoch and run.results and len(run.epochs) > 1 else [run]
    return tabulate_points(points, (RUN, EPOCH) if every_epoch else (RUN,)) | make_tables(
        ("Validation loss over seeds", OVER_SEEDS, [run for run in comparisons if len(run.results) > 1]),
        ("Size", SIZE, [run.results[0] for run in comparisons if run.results]),  # all seeds have as many parameters
        ("Steps and speed", COST, [result for run in comparisons for result in run.results]),
    )


def tabulate_points(points: Sequence[Point], names: Sequence[Column]) -> dict[str, Table]:
    """Everything that was published and measured at some moments. names: the columns that name a row."""
    found = [point for point in points if point.measured]
    kinds = {LOSSES[point.loss_name] for point in points}
    kind = kinds.pop() if len(kinds) == 1 else "as each report counts it"
    return make_tables(
        (f"Validation loss, {kind}", (*names, *LOSS), points),
        *((title, (*names, *columns), found) for title, columns in FIGURES.items()),
    )


# --- where a run is not the published one ---------------------------------------------------------------------


def list_notes(comparisons: Collection[Comparison]) -> list[str]:
    """One sentence a difference, with the runs that it is about before it."""
    num_seeds = {run.name: len(run.results) for run in comparisons if run.results}
    found: dict[str, dict[str, list[str]]] = {}  # {sentence: {run: its seeds}}
    for run in comparisons:
        for result in run.results:
            for sentence in explain_differences(result):
                found.setdefault(sentence, {}).setdefault(run.name, []).append(str(result.seed))
    notes = []
    for sentence, runs in found.items():
        whole = [name for name, seeds in runs.items() if len(seeds) == num_seeds[name]]
        names = [name if name in whole else f"{name} (seed {', '.join(seeds)})" for name, seeds in runs.items()]
        everyone = len(whole) > 1 and len(whole) == len(num_seeds)
        notes.append(f"{'all runs' if everyone else ', '.join(names)}: {sentence}")
    return notes


def explain_differences(result: Result) -> Iterator[str]:
    """Say in which ways a run is not the registered one, or not the published one."""
    data, published = result.experiment.config.data, result.experiment.published
    yield from explain_departures(result)
    if (source := result.text("source")) not in ("", data.source):
        yield f"trained on {source}, where {data.source} is registered."
    # Fewer stories than registered: read more often in training, and a smaller sample in validation.
    scaled, documents = result.record.get("epochs_scaled"), result.documents
    told = ("stories", "published_stories", "epochs", "published_epochs")
    if isinstance(scaled, dict) and all(finite_number(scaled.get(name)) is not None for name in told):
        why = ", so that the steps are as many" if "train.max_steps" not in result.overrides else ""
        yield (
            f"{scaled['stories']:,} training stories instead of {scaled['published_stories']:,}, read "
            f"{scaled['epochs']:,.2f} times instead of {scaled['published_epochs']:,}{why}."
        )
    found = documents.get("valid")
    if found is not None and data.val_subset_size is not None and found < data.val_subset_size:
        yield f"validated on {found:,} stories instead of {data.val_subset_size:,}."
    total, count = result.number("total_parameters"), result.experiment.parameters.total
    if total not in (None, count):
        yield f"its model has {total:,.0f} parameters, the registered one {count:,}."
    steps = result.number("steps")
    if steps is not None and published is not None and published.steps not in (None, steps):
        yield f"{steps:,.0f} steps, where {published.steps:,} were published."


def explain_departures(result: Result) -> Iterator[str]:
    """Whether it came to its end, and settings that were not as registered, but for how a machine computes."""
    if (status := result.text("status")) not in ("", "finished"):
        yield f"{status}."
    changed = [f"{name} {format_value(value)}" for name, value in result.overrides.items() if name not in EXECUTION]
    if changed:
        yield f"with changed settings: {', '.join(changed)}."


# --- text -----------------------------------------------------------------------------------------------------


def group_comparisons(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Return {series: its comparisons}, in the registry's order."""
    names = dict.fromkeys(run.experiment.series for run in comparisons)
    return {series: [run for run in comparisons if run.experiment.series == series] for series in names}


def head_series(series: str, comparisons: Sequence[Comparison]) -> str:
    tolerance = comparisons[0].tolerance
    return series if tolerance is None else f"{series}, tolerance {tolerance}"


def list_verdicts(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """Return {a verdict's meaning: the losses it is about}; verdicts about none are left out."""
    verdicts = {}
    for verdict, judged in judge(comparisons).items():
        runs: dict[str, list[str]] = {}
        for name, epochs in judged.items():
            which = f" (epoch{'s' if len(epochs) > 1 else ''} {', '.join(map(str, epochs))})" if epochs else ""
            runs.setdefault(which, []).append(name)
        if runs:
            verdicts[VERDICTS[verdict]] = "; ".join(", ".join(names) + which for which, names in runs.items())
    return verdicts


def fit_table(table: Table, width: int | None) -> Iterator[Table]:
    """The table, in parts below each other where the terminal is narrow; run and epoch name the rows of each part."""
    columns, rows = table
    if any(column.wraps for column in columns):
        yield table
        return
    if width is not None and columns[1] is EPOCH:
        columns = [Column("run, epoch"), *columns[2:]]
        rows = [[f"{run}, {epoch}", *rest] for run, epoch, *rest in rows]
    yield from split_table(columns, rows, width)


def format_comparisons(
    comparisons: Sequence[Comparison], left_out: Sequence[str], *, every_epoch: bool, width: int | None, style: Style
) -> str:
    """What `some experiments compare` prints: the ends of the runs, or every epoch too."""
    lines: list[str] = []
    for series, members in group_comparisons(comparisons).items():
        if not any(run.results for run in members):
            continue
        lines += [style.bold(head_series(series, members)), ""]
        for title, table in list_tables(members, every_epoch=every_epoch).items():
            lines.append("  " + title)
            for part in fit_table(table, width and width - 4):
                lines += [*format_table(*part, width=width, style=style, indent="    "), ""]
    text_width = min(width or WIDEST_TEXT, WIDEST_TEXT)
    lines.append(style.bold("Validation losses, published and measured"))
    for meaning, which in list_verdicts(comparisons).items():
        lines += wrap(which, width=text_width, indent="  ", bullet=f"{meaning}: ")
    notes = [*list_notes(comparisons), *(f"{name} is no result of a registered experiment." for name in left_out)]
    if notes:
        lines += ["", style.bold("Notes")]
        lines += [line for note in notes for line in wrap(note, width=text_width, indent="  ", bullet="- ")]
    if not every_epoch:
        lines += ["", "`some experiments compare NAME` shows every epoch of a run or a series."]
    return "\n".join(lines) + "\n"

"""What the audit's tables are made of: cells that say one thing of a run, and how a table is written."""

from collections.abc import Callable, Sequence
from typing import Any

from some_moe.glass.page.markdown import plain, sentence, write_rows
from some_moe.lab.published import Comparison, Result, Spread, finite_number, list_rows
from some_moe.lab.published_tables import (
    RUN,
    SEEDS,
    explain_departures,
    figure_column,
    make_tables,
    measured_column,
    printed_column,
    show_experts,
    show_spread,
    show_used,
)
from some_moe.layout import ABSENT, Column
from tools.audit_evidence import Evidence, gather

V_NAMES = tuple(f"V{number}" for number in range(1, 11))
A_NAMES = tuple(f"A{number}" for number in range(1, 7))
B_NAMES = ("B1", "B2", "B3")
Say = Callable[[Comparison], str]


def write_table(
    columns: Sequence[Column], rows: Sequence[Any], missing: Sequence[str], runs: Sequence[Comparison] = ()
) -> str:
    """A table as Markdown, and below it what is not measured yet, and which of the runs are not as registered."""
    parts = [write_rows(*table) for table in make_tables(("", columns, rows)).values()]
    if missing:
        parts.append(f"Not measured yet: {sentence(', '.join(missing))}.")
    results = [result for run in runs for result in run.results]
    told = [(result, " ".join(explain_departures(result))) for result in results]
    departures = [f"{r.experiment.name} (seed {r.seed}): {text}" for r, text in told if text]
    if departures:
        parts.append("Not as registered: " + " ".join(map(plain, departures)))
    return "\n\n".join(parts)


def tabulate(names: Sequence[str], *headers: str) -> Callable[[Evidence], str]:
    """A table with one row a run: its name, the cells under these headers, and the number of seeds."""

    def write(evidence: Evidence) -> str:
        runs, missing = evidence.part(names)
        return write_table((RUN, *pick(*headers), SEEDS), runs, missing, runs)

    return write


def pick(*headers: str) -> list[Column]:
    return [COLUMNS[header] for header in headers]


# --- what a cell says -----------------------------------------------------------------------------------------


def show_common(spread: Spread | None, digits: int) -> str:
    """What all seeds should have in common: one figure, or every one that there is."""
    values = spread.values if spread else ()
    return " or ".join(dict.fromkeys(f"{value:,.{digits}f}" for value in values)) or ABSENT


def recorded(header: str, name: str, digits: int) -> Column:
    """A field of the record, over all seeds."""
    return figure_column(header, lambda run: show_spread(find_recorded(run, name), digits))


def common(header: str, find: Callable[[Result], Any], digits: int = 0) -> Column:
    """Something that chance does not touch."""
    return figure_column(header, lambda run: show_common(gather(map(find, run.results)), digits))


def field(header: str, name: str, digits: int = 0) -> Column:
    """A field of the record that chance does not touch."""
    return common(header, lambda result: result.number(name), digits)


def setting(header: str, name: str) -> Column:
    """A whole number among the settings, as it was run."""
    return common(header, lambda result: result.setting(name))


def find_recorded(run: Comparison, name: str) -> Spread | None:
    return gather(result.number(name) for result in run.results)


def find_loss(run: Comparison) -> float | None:
    """Measured, padding counted: the mean over seeds."""
    loss = run.measured.get("val_loss_padded")
    return loss.mean if loss else None


def find_printed_loss(run: Comparison) -> float | None:
    return float(run.published["val_loss"]) if "val_loss" in run.published else None


def divide_by_share(run: Comparison) -> str:
    """What the published loss would be over text alone, if padding cost nothing."""
    share, loss = find_recorded(run, "text_share"), find_printed_loss(run)
    return f"{loss / share.mean:.4f}" if share and loss is not None else ABSENT


def count_rows(result: Result) -> float | None:
    """Stories seen in training: steps × batch."""
    steps = result.number("steps")
    return None if steps is None else steps * result.setting("data.batch_size")


def count_passes(result: Result) -> Any:
    """How often a run went over its stories."""
    scaled = result.record.get("epochs_scaled")
    return scaled.get("epochs") if scaled else result.setting("train.epochs")


def count_first_pass(result: Result) -> float | None:
    """Experts of the middle layer that training chose at least once in its first pass over the stories."""
    first = next(iter(list_rows(result.record.get("epochs"))), {})
    return finite_number(first.get("train_experts_used"))


def count_respawns(result: Result) -> float | None:
    """Keys that the phoenix moved, in all layers and steps."""
    counts = [finite_number(layer.get("respawns")) for layer in list_rows(result.record.get("layers"))]
    return sum(found) if (found := [count for count in counts if count is not None]) else None


def find_ids(result: Result) -> Any:
    """How many ids the tokenizer has, where the record says it."""
    tokenizer = result.data.get("tokenizer")
    return finite_number(tokenizer.get("vocab_size")) if isinstance(tokenizer, dict) else None


def count_used(run: Comparison) -> str:
    return f"{show_used(run)} of {show_experts(run)}" if "experts_used" in run.measured else ABSENT


ALL_COLUMNS = (
    setting("seq_len", "data.seq_len"),
    setting("batch", "data.batch_size"),
    setting("vocabulary asked for", "model.vocab_size"),
    common("ids of the tokenizer", find_ids),
    setting("experts", "model.num_experts"),
    field("parameters", "total_parameters"),
    field("share of text", "text_share", 4),
    field("steps", "steps"),
    common("rows seen", count_rows),
    common("passes over the stories", count_passes, 1),
    recorded("seconds", "seconds", 1),
    recorded("largest logged gradient norm", "max_gradient_norm", 2),
    printed_column("published loss", "val_loss"),
    figure_column("published ÷ share of text", divide_by_share),
    measured_column("padded loss", "val_loss_padded"),
    figure_column("loss as the report counts", lambda run: show_spread(run.loss)),
    measured_column("honest loss", "val_loss"),
    measured_column("nats per token", "val_loss"),
    measured_column("bits per byte", "bits_per_byte"),
    field("best step", "best_step"),
    recorded("honest loss then", "best_val_loss", 4),
    measured_column("honest loss at the end", "val_loss"),
    printed_column("published perplexity", "perplexity"),
    measured_column("perplexity of the honest loss", "perplexity", 2),
    printed_column("published gini", "gini"),
    measured_column("gini, padding counted", "gini_all"),
    measured_column("gini, real tokens", "gini_real"),
    printed_column("published entropy, bits", "entropy_bits"),
    measured_column("entropy, padding counted", "entropy_bits_all"),
    measured_column("entropy, real tokens", "entropy_bits_real"),
    printed_column("published used", "experts_used"),
    figure_column("experts used", count_used),
    common("chosen in the first pass of training", count_first_pass),
    common("respawns", count_respawns),
)
COLUMNS = {column.header: column for column in ALL_COLUMNS}
"""What a column says of a run, by its header."""

"""What the audit's tables are made of: cells that say one thing of a run, and how a table is written."""

from collections.abc import Callable, Sequence
from typing import Any

from some_moe.glass.page.markdown import plain, sentence, write_rows
from some_moe.lab.published import Comparison, Result, Spread
from some_moe.lab.published_tables import (
    ABSENT,
    RUN,
    SEEDS,
    Cell,
    T,
    make_sheet,
    measured,
    printed,
    show_experts,
    show_number,
    show_spread,
    show_used,
)
from some_moe.lab.result_notes import explain_overrides, explain_status
from tools.audit_evidence import Evidence, gather

V_NAMES = tuple(f"V{number}" for number in range(1, 11))
A_NAMES = tuple(f"A{number}" for number in range(1, 7))
B_NAMES = ("B1", "B2", "B3")
Say = Callable[[Comparison], str]
Run = Cell[Comparison]


def write_table(
    cells: Sequence[Cell[T]], rows: Sequence[T], missing: Sequence[str], runs: Sequence[Comparison] = ()
) -> str:
    """A table as Markdown, and below it what is not measured yet, and which of the runs are not as registered."""
    parts = [write_rows(sheet.columns, sheet.rows) for sheet in make_sheet("", cells, rows)]
    if missing:
        parts.append(f"Not measured yet: {sentence(', '.join(missing))}.")
    results = [result for run in runs for result in run.results]
    told = [(result, " ".join((*explain_status(result), *explain_overrides(result)))) for result in results]
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


def pick(*headers: str) -> list[Run]:
    return [Run(header, CELLS[header]) for header in headers]


# --- what a cell says -----------------------------------------------------------------------------------------


def show_common(spread: Spread | None, digits: int) -> str:
    """What all seeds should have in common: one figure, or every one that there is."""
    values = spread.values if spread else ()
    return " or ".join(dict.fromkeys(show_number(value, digits) for value in values)) or ABSENT


def recorded(name: str, digits: int) -> Say:
    """A field of the record, over all seeds."""
    return lambda run: show_spread(find_recorded(run, name), digits)


def common(find: Callable[[Result], Any], digits: int = 0) -> Say:
    """Something that chance does not touch."""
    return lambda run: show_common(gather(map(find, run.results)), digits)


def field(name: str, digits: int = 0) -> Say:
    """A field of the record that chance does not touch."""
    return common(lambda result: result.number(name), digits)


def setting(name: str) -> Say:
    """A whole number among the settings, as it was run."""
    return common(lambda result: result.setting(name))


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


def count_used(run: Comparison) -> str:
    return f"{show_used(run)} of {show_experts(run)}" if "experts_used" in run.measured else ABSENT


CELLS: dict[str, Say] = {
    "seq_len": setting("data.seq_len"),
    "batch": setting("data.batch_size"),
    "vocabulary": setting("model.vocab_size"),
    "experts": setting("model.num_experts"),
    "parameters": field("total_parameters"),
    "share of text": field("text_share", 4),
    "steps": field("steps"),
    "rows seen": common(count_rows),
    "passes over the stories": common(count_passes, 1),
    "seconds": recorded("seconds", 1),
    "largest logged gradient norm": recorded("max_gradient_norm", 2),
    "published loss": printed("val_loss"),
    "published ÷ share of text": divide_by_share,
    "padded loss": measured("val_loss_padded"),
    "loss as the report counts": lambda run: show_spread(run.final.loss),
    "honest loss": measured("val_loss"),
    "nats per token": measured("val_loss"),
    "bits per byte": measured("bits_per_byte"),
    "best step": field("best_step"),
    "honest loss then": recorded("best_val_loss", 4),
    "honest loss at the end": measured("val_loss"),
    "published perplexity": printed("perplexity"),
    "perplexity of the honest loss": measured("perplexity", 2),
    "published gini": printed("gini"),
    "gini, padding counted": measured("gini_all"),
    "gini, real tokens": measured("gini_real"),
    "published entropy, bits": printed("entropy_bits"),
    "entropy, padding counted": measured("entropy_bits_all"),
    "entropy, real tokens": measured("entropy_bits_real"),
    "published used": printed("experts_used"),
    "experts used": count_used,
}
"""What a column says of a run, by its header."""

"""What the audit's tables are made of: cells that say one thing of a run, and tables with one row a run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from some_moe.lab.published import Comparison, Result, Spread
from some_moe.lab.published_tables import ABSENT, Cell, Sheet, make_sheet, show_number, show_spread
from some_moe.lab.result_notes import explain_overrides
from tools.audit_evidence import Evidence, gather

LENGTH_FILES = "`results/audit/lengths-*.json`"


@dataclass(frozen=True)
class AuditTable:
    """A table, or none where nothing of it was measured; what is missing, and what is not as registered."""

    sheets: Sequence[Sheet]
    missing: Sequence[str] = ()
    departures: Sequence[str] = ()


# --- cells ----------------------------------------------------------------------------------------------------

Run = Cell[Comparison]


def published(name: str) -> Callable[[Comparison], str]:
    """A printed figure, digit for digit."""

    return lambda run: show_printed(getattr(run.experiment.published, name, None))


def show_printed(value: Decimal | int | None) -> str:
    return ABSENT if value is None else str(value)


def measured(name: str, digits: int = 4) -> Callable[[Comparison], str]:
    """A figure at the last step, over all seeds."""
    return lambda run: show_spread(run.final.measured.get(name), digits)


def recorded(name: str, digits: int) -> Callable[[Comparison], str]:
    """A field of the record, over all seeds."""
    return lambda run: show_spread(gather(result.number(name) for result in run.results), digits)


def common(name: str, digits: int = 0) -> Callable[[Comparison], str]:
    """A field of the record that chance does not touch."""
    return lambda run: show_common(gather(result.number(name) for result in run.results), digits)


def setting(field: str) -> Callable[[Comparison], str]:
    """A whole number among the settings, as it was run."""
    return lambda run: show_common(gather(get_setting(result, field) for result in run.results), 0)


def get_setting(result: Result, field: str) -> Any:
    return result.overrides.get(field, result.experiment.config.flatten()[field])


def show_common(spread: Spread | None, digits: int) -> str:
    """What all seeds should have in common: one figure, or every one that there is."""
    if spread is None:
        return ABSENT
    return " or ".join(dict.fromkeys(show_number(value, digits) for value in spread.values))


def divide_by_share(run: Comparison) -> str:
    """What the published loss would be over text alone, if padding cost nothing."""
    share, loss = gather(result.number("text_share") for result in run.results), published_loss(run)
    return f"{float(loss) / share.mean:.4f}" if share and loss is not None else ABSENT


def padded_loss(run: Comparison) -> Spread | None:
    """Measured, padding counted, over all seeds."""
    return run.final.measured.get("val_loss_padded")


def published_loss(run: Comparison) -> Decimal | None:
    return None if run.experiment.published is None else run.experiment.published.val_loss


def show_used(run: Comparison) -> str:
    """Experts used of how many."""
    used, experts = run.final.measured.get("experts_used"), run.final.measured.get("num_experts")
    if used is None or experts is None:
        return ABSENT
    return f"{show_spread(used, int(len(used.values) > 1))} of {show_number(experts.mean)}"


def show_rows(run: Comparison) -> str:
    """Stories seen in training: steps × batch."""
    steps = [(result.number("steps"), get_setting(result, "data.batch_size")) for result in run.results]
    seen = gather(None if count is None else count * batch for count, batch in steps)
    return show_common(seen, 0)


def show_passes(run: Comparison) -> str:
    """How often a run went over its stories."""
    passes = (
        result.record.get("epochs_scaled") or {"epochs": get_setting(result, "train.epochs")} for result in run.results
    )
    return show_common(gather(one.get("epochs") for one in passes), 1)


NAME = Run("run", lambda run: run.name, numeric=False, names=True)
SEEDS = Run("seeds", lambda run: str(len(run.results)), names=True)
SHARE = Run("share of text", common("text_share", 4))
PUBLISHED = Run("published loss", published("val_loss"))
PADDED = Run("padded loss", measured("val_loss_padded"))
HONEST = Run("honest loss", measured("val_loss"))
BITS = Run("bits per byte", measured("bits_per_byte"))
GINI_ALL = Run("gini, padding counted", measured("gini_all"))
GINI_REAL = Run("gini, real tokens", measured("gini_real"))
USED = Run("experts used", show_used)


def tabulate(*names: str, cells: Sequence[Run]) -> Callable[[Evidence], AuditTable]:
    """A table with one row a run: its name, the cells, and the number of seeds."""

    def make(evidence: Evidence) -> AuditTable:
        runs, missing = evidence.part(names)
        return AuditTable(make_sheet("", (NAME, *cells, SEEDS), runs), missing, list_departures(runs))

    return make


def list_departures(runs: Sequence[Comparison]) -> list[str]:
    """One sentence for each result that is not the registered run, its data apart."""

    def explain(result: Result) -> Iterator[str]:
        status = result.text("status")
        if status and status != "finished":
            yield f"{status}."
        yield from explain_overrides(result)

    results = [result for run in runs for result in run.results]
    return [f"{r.experiment.name} (seed {r.seed}): {text}" for r in results if (text := " ".join(explain(r)))]

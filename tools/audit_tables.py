"""The tables of the audit, by name: each a function from what was measured to rows of text."""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal

from some_moe.lab.published import Comparison, Result, loss_name
from some_moe.lab.published_tables import ABSENT, Cell, make_sheet, show_number, show_spread
from some_moe.lab.registry import EXPERIMENTS
from tools.audit_cells import (
    BITS,
    GINI_ALL,
    GINI_REAL,
    HONEST,
    LENGTH_FILES,
    NAME,
    PADDED,
    PUBLISHED,
    SEEDS,
    SHARE,
    USED,
    AuditTable,
    Run,
    common,
    divide_by_share,
    list_departures,
    measured,
    padded_loss,
    published,
    published_loss,
    recorded,
    setting,
    show_common,
    show_passes,
    show_rows,
    tabulate,
)
from tools.audit_evidence import Evidence, Length
from tools.audit_studies import make_assumptions, make_collapse, make_spread

V_NAMES = tuple(f"V{number}" for number in range(1, 11))
A_NAMES = tuple(f"A{number}" for number in range(1, 7))
B_NAMES = ("B1", "B2", "B3")


def make_lengths(evidence: Evidence) -> AuditTable:
    """Trained models, scored again in rows of several lengths."""

    def find(name: str) -> Callable[[Length], str]:
        return lambda row: show_spread(row.find(name), 4)

    def find_common(name: str) -> Callable[[Length], str]:
        return lambda row: show_common(row.find(name), 4)

    cells = (
        Cell[Length]("run", lambda row: row.run, numeric=False, names=True),
        Cell[Length]("split", lambda row: row.split, numeric=False, names=True),
        Cell[Length]("seq_len", lambda row: str(row.seq_len), names=True),
        Cell[Length]("share of text", find_common("text_share")),
        Cell[Length]("padded loss", find("loss_padded")),
        Cell[Length]("honest loss", find("loss")),
        Cell[Length]("constant predictor, padded", find_common("constant_loss_padded")),
        Cell[Length]("constant predictor, honest", find_common("constant_loss")),
        Cell[Length]("gini, padding counted", find("gini_padded")),
        Cell[Length]("gini, real tokens", find("gini")),
        Cell[Length]("seeds", lambda row: str(len(row.records)), names=True),
    )
    missing = () if evidence.lengths else (f"trained models in rows of other lengths ({LENGTH_FILES})",)
    return AuditTable(make_sheet("", cells, evidence.lengths), missing)


def make_order(evidence: Evidence) -> AuditTable:
    """A1 to A5 from the lowest measured loss to the highest, with their places in the published order."""
    found, missing = evidence.part(A_NAMES[:5])
    runs = sorted(found, key=_mean_loss)
    by_published = [run.name for run in sorted(runs, key=lambda run: published_loss(run) or Decimal("Infinity"))]
    places = {run.name: place for place, run in enumerate(runs, 1)}
    cells = (
        Run("place", lambda run: str(places[run.name]), names=True),
        NAME,
        PADDED,
        Run("published place", lambda run: str(by_published.index(run.name) + 1)),
        PUBLISHED,
        SEEDS,
    )
    return AuditTable(make_sheet("", cells, runs), missing, list_departures(runs))


def _mean_loss(run: Comparison) -> float:
    loss = padded_loss(run)
    return math.inf if loss is None else loss.mean


Group = tuple[str, Sequence[Result]]
"""A series and its results."""


def make_cost(evidence: Evidence) -> AuditTable:
    """Steps, seconds and speed of every result, by series and in all."""
    groups: dict[str, list[Result]] = {}
    for result in evidence.results:
        groups.setdefault(result.experiment.series, []).append(result)
    rows: list[Group] = list(groups.items())
    if rows:
        rows.append(("all", evidence.results))

    def add(results: Sequence[Result], name: str) -> float | None:
        """The sum; None where a result does not say its part."""
        parts = [result.number(name) for result in results]
        return None if None in parts else sum(part for part in parts if part is not None)

    def show_speed(results: Sequence[Result]) -> str:
        tokens, seconds = add(results, "tokens"), add(results, "seconds")
        return show_number(tokens / seconds) if tokens is not None and seconds else ABSENT

    cells = (
        Cell[Group]("series", lambda group: group[0], numeric=False, names=True),
        Cell[Group]("runs", lambda group: str(len(group[1]))),
        Cell[Group]("steps", lambda group: show_number(add(group[1], "steps"))),
        Cell[Group]("seconds of training", lambda group: show_number(add(group[1], "seconds"))),
        Cell[Group]("real tokens per second", lambda group: show_speed(group[1])),
    )
    _, missing = evidence.part(e.name for e in EXPERIMENTS if e.published is not None)
    return AuditTable(make_sheet("", cells, rows), missing)


# --- by name --------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[Evidence], AuditTable]] = {
    "context": tabulate(
        "V2", "V8", "V7",
        cells=(
            Run("seq_len", setting("data.seq_len")), Run("batch", setting("data.batch_size")), SHARE, PUBLISHED,
            Run("published ÷ share of text", divide_by_share), PADDED, HONEST, BITS,
        ),
    ),
    "lengths": make_lengths,
    "gini": tabulate(
        *A_NAMES, *B_NAMES, *V_NAMES,
        cells=(
            Run("published gini", published("gini")), GINI_ALL, GINI_REAL,
            Run("published entropy, bits", published("entropy_bits")),
            Run("entropy, padding counted", measured("entropy_bits_all")),
            Run("entropy, real tokens", measured("entropy_bits_real")),
            Run("published used", published("experts_used")), USED,
        ),
    ),
    "pace": tabulate(
        "V7", "V8", "V7-half", "V8-long",
        cells=(
            Run("batch", setting("data.batch_size")), Run("steps", common("steps")), Run("rows seen", show_rows),
            PUBLISHED, PADDED, HONEST,
        ),
    ),
    "vocabulary": tabulate(
        "V2", "V4",
        cells=(
            Run("vocabulary", setting("model.vocab_size")), Run("nats per token", measured("val_loss")), BITS, PADDED,
            PUBLISHED,
        ),
    ),
    "experts": tabulate(
        "A4", *B_NAMES,
        cells=(
            Run("experts", setting("model.num_experts")), Run("parameters", common("total_parameters")),
            PUBLISHED, PADDED, HONEST, GINI_REAL, USED, Run("seconds", recorded("seconds", 1)),
        ),
    ),
    "passes": tabulate(
        *V_NAMES, *A_NAMES, *B_NAMES,
        cells=(
            Run("passes over the stories", show_passes), Run("steps", common("steps")),
            Run("best step", common("best_step")), Run("honest loss then", recorded("best_val_loss", 4)),
            Run("honest loss at the end", measured("val_loss")),
        ),
    ),
    "assumptions": make_assumptions,
    "spread": make_spread,
    "order": make_order,
    "mvp": tabulate(
        "mvp-v2", "mvp-v3", "mvp-v4", "mvp-v6", "v2-professional", "v3.5-decay-fix", "v5-linear", "v5-mlp",
        "v6-decay-fix", "v7-clamp-fix",
        cells=(
            PUBLISHED, Run("published perplexity", published("perplexity")),
            Run("loss as the report counts", lambda run: measured(loss_name(run.experiment))(run)), HONEST,
            Run("perplexity of the honest loss", measured("perplexity", 2)), SHARE,
        ),
    ),
    "collapse": make_collapse,
    "cost": make_cost,
}  # fmt: skip

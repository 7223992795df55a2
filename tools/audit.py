"""docs/audit.md: prose by hand; the tables between its markers and the figures that it shows are made from results."""

import re
from collections.abc import Callable, Iterable

from some_moe.config import ConfigError, did_you_mean
from some_moe.lab.published import loss_name
from some_moe.lab.published_figures import PublishedFigure
from some_moe.lab.published_tables import measured, printed
from tools.audit_cells import (
    A_NAMES,
    B_NAMES,
    BATCH,
    BITS,
    GINI_ALL,
    GINI_REAL,
    HONEST,
    PADDED,
    PUBLISHED,
    SHARE,
    STEPS,
    USED,
    V_NAMES,
    Run,
    common,
    count_passes,
    count_rows,
    divide_by_share,
    field,
    recorded,
    setting,
    tabulate,
)
from tools.audit_evidence import Evidence
from tools.audit_studies import (
    write_assumptions,
    write_collapse,
    write_cost,
    write_lengths,
    write_order,
    write_spread,
)
from tools.figures_audit_lines import draw_collapse, draw_lengths
from tools.figures_audit_rows import draw_gini, draw_seeds

MARKER = re.compile(r"<!--\s*(?:table\b(?P<name>.*?)|end)\s*-->")
SHOWN = re.compile(r"!\[[^\]]*\]\(figures/(audit-[^)\s]*)\.svg\)")

TABLES: dict[str, Callable[[Evidence], str]] = {
    "context": tabulate(
        "V2", "V8", "V7",
        cells=(
            Run("seq_len", setting("data.seq_len")), BATCH, SHARE, PUBLISHED,
            Run("published ÷ share of text", divide_by_share), PADDED, HONEST, BITS,
        ),
    ),
    "lengths": write_lengths,
    "gini": tabulate(
        *A_NAMES, *B_NAMES, *V_NAMES,
        cells=(
            Run("published gini", printed("gini")), GINI_ALL, GINI_REAL,
            Run("published entropy, bits", printed("entropy_bits")),
            Run("entropy, padding counted", measured("entropy_bits_all")),
            Run("entropy, real tokens", measured("entropy_bits_real")),
            Run("published used", printed("experts_used")), USED,
        ),
    ),
    "pace": tabulate(
        "V7", "V8", "V7-half", "V8-long",
        cells=(BATCH, STEPS, Run("rows seen", common(count_rows)), PUBLISHED, PADDED, HONEST),
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
            Run("experts", setting("model.num_experts")), Run("parameters", field("total_parameters")),
            PUBLISHED, PADDED, HONEST, GINI_REAL, USED, Run("seconds", recorded("seconds", 1)),
        ),
    ),
    "passes": tabulate(
        *V_NAMES, *A_NAMES, *B_NAMES,
        cells=(
            Run("passes over the stories", common(count_passes, 1)), STEPS, Run("best step", field("best_step")),
            Run("honest loss then", recorded("best_val_loss", 4)), Run("honest loss at the end", measured("val_loss")),
        ),
    ),
    "assumptions": write_assumptions,
    "spread": write_spread,
    "order": write_order,
    "mvp": tabulate(
        "mvp-v2", "mvp-v3", "mvp-v4", "mvp-v6", "v2-professional", "v3.5-decay-fix", "v5-linear", "v5-mlp",
        "v6-decay-fix", "v7-clamp-fix",
        cells=(
            PUBLISHED, Run("published perplexity", printed("perplexity")),
            Run("loss as the report counts", lambda run: measured(loss_name(run.experiment))(run)), HONEST,
            Run("perplexity of the honest loss", measured("perplexity", 2)), SHARE,
        ),
    ),
    "collapse": write_collapse,
    "cost": write_cost,
}  # fmt: skip
"""The tables by name, each a function from what was measured to Markdown."""

FIGURES: dict[str, Callable[[Evidence], PublishedFigure | None]] = {
    "audit-lengths": draw_lengths,
    "audit-collapse": draw_collapse,
    "audit-gini": draw_gini,
    "audit-seeds": draw_seeds,
}
"""The figures by name; None stands for too little to draw."""


def fill_audit(text: str, evidence: Evidence, *, file: str = "the audit") -> str:
    """Return the text with every table between `<!-- table NAME -->` and `<!-- end -->` made anew.

    file: what refusals call the text.
    """
    parts: list[str] = []
    opened, done = "", 0  # the table that is open, and the character up to which the text was taken over
    for marker in [*MARKER.finditer(text), None]:
        ends = marker is not None and marker["name"] is None
        if opened and not ends:
            raise ConfigError(f"{file} opens the table {opened!r} and does not close it; write `<!-- end -->` after it")
        if ends and not opened:
            raise ConfigError(f"{file} has an `<!-- end -->` that closes no table; remove it")
        if marker is None:
            break
        if ends:
            parts.append(f"\n\n{TABLES[opened](evidence)}\n\n")
            opened, done = "", marker.start()
        else:
            opened = marker["name"].strip()
            _check_name(opened, TABLES, f"{file} asks for the table")
            parts.append(text[done : marker.end()])
    return "".join([*parts, text[done:]])


def draw_shown(text: str, evidence: Evidence, *, file: str = "the audit") -> dict[str, PublishedFigure]:
    """Return {name: figure} for each figure that the text shows and that can be drawn by now."""
    drawn = {}
    for name in dict.fromkeys(SHOWN.findall(text)):
        _check_name(name, FIGURES, f"{file} shows the figure")
        figure = FIGURES[name](evidence)
        if figure is not None:
            drawn[name] = figure
    return drawn


def _check_name(name: str, known: Iterable[str], where: str) -> None:
    if name not in known:
        hint = did_you_mean(name, list(known)) or f"; there are {', '.join(known)}"
        raise ConfigError(f"{where} {name!r}, which is not known{hint}")

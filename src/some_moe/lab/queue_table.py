"""A queue of experiments in the terminal: what it would run, and what it has run."""

from collections.abc import Sequence
from typing import Any

from some_moe.layout import Column, Style, format_table, make_table, number_column, text_column, wrap

STANDINGS = {"new": "to run", "begun": "to continue", "done": "done already"}
PLAN = (
    text_column("name", "experiment"),
    number_column("seed", "seed"),
    number_column("stories", "stories", ","),
    number_column("epochs", "epochs", ".2f"),
    number_column("steps", "steps", ",d"),
    Column("train M", lambda row: f"{row['trainable_parameters'] / 1e6:.2f}", numeric=True),
    Column("total M", lambda row: f"{row['total_parameters'] / 1e6:.2f}", numeric=True),
    Column("state", lambda row: STANDINGS[row["standing"]]),
)
SUMMARY = (
    text_column("name", "experiment"),
    number_column("seed", "seed"),
    number_column("steps", "steps", ",d"),
    number_column("val loss", "val_loss", ".4f"),
    number_column("padded", "val_loss_padded", ".4f"),
    number_column("published", "published_val_loss", ".4f"),
    number_column("gini", "gini", ".3f"),
    number_column("tokens/s", "tokens_per_second", ",.0f"),
    number_column("seconds", "seconds", ",.0f"),
    text_column("state", "state"),
)
LEGEND = (
    "val loss: nats per real token. padded: over padding too, as the published losses up to v4 are; compare those "
    "with it, and the later ones with val loss. seconds: of training steps."
)


def format_plan(rows: Sequence[dict[str, Any]], *, width: int | None, style: Style) -> str:
    """What `some experiments run --dry-run` prints: one row a job."""
    return "\n".join(format_table(*make_table(PLAN, rows), width=width, style=style)) + "\n"


def format_summary(rows: Sequence[dict[str, Any]], *, width: int | None, style: Style) -> str:
    """What `some experiments run` prints last: one row a job, then why some failed."""
    text_width = min(width or 100, 100)
    lines = ["", *format_table(*make_table(SUMMARY, rows), width=width, style=style), *wrap(LEGEND, width=text_width)]
    for row in rows:
        if row["reason"]:
            lines += wrap(f"{row['experiment']}, seed {row['seed']}: {row['reason']}", width=text_width, bullet="- ")
    return "\n".join(lines) + "\n"

"""A queue of experiments in the terminal: what it would run, and what it has run."""

from collections.abc import Sequence
from typing import Any

from some_moe.layout import Column, Style, format_table, wrap

PLAN_COLUMNS = (
    Column("name"),
    Column("seed", numeric=True),
    Column("stories", numeric=True),
    Column("epochs", numeric=True),
    Column("steps", numeric=True),
    Column("train M", numeric=True),
    Column("total M", numeric=True),
    Column("state"),
)
SUMMARY_COLUMNS = (
    Column("name"),
    Column("seed", numeric=True),
    Column("steps", numeric=True),
    Column("val loss", numeric=True),
    Column("padded", numeric=True),
    Column("published", numeric=True),
    Column("gini", numeric=True),
    Column("tokens/s", numeric=True),
    Column("seconds", numeric=True),
    Column("state"),
)
LEGEND = (
    "val loss: nats per real token. padded: over padding too, as the published losses up to v4 are; compare those "
    "with it, and the later ones with val loss. seconds: of training steps."
)
STANDINGS = {"new": "to run", "begun": "to continue", "done": "done already"}


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def format_plan(rows: Sequence[dict[str, Any]], *, width: int | None, style: Style) -> str:
    """What `some experiments run --dry-run` prints: one row a job."""
    cells = [
        [
            row["experiment"],
            str(row["seed"]),
            f"{row['stories']:,}",
            f"{row['epochs']:.2f}",
            _figure(row["steps"], ",d"),
            f"{row['trainable_parameters'] / 1e6:.2f}",
            f"{row['total_parameters'] / 1e6:.2f}",
            STANDINGS[row["standing"]],
        ]
        for row in rows
    ]
    return "\n".join(format_table(PLAN_COLUMNS, cells, width=width, style=style)) + "\n"


def format_summary(rows: Sequence[dict[str, Any]], *, width: int | None, style: Style) -> str:
    """What `some experiments run` prints last: one row a job, then why some failed."""
    cells = [
        [
            row["experiment"],
            str(row["seed"]),
            _figure(row["steps"], ",d"),
            _figure(row["val_loss"], ".4f"),
            _figure(row["val_loss_padded"], ".4f"),
            _figure(row["published_val_loss"], ".4f"),
            _figure(row["gini"], ".3f"),
            _figure(row["tokens_per_second"], ",.0f"),
            _figure(row["seconds"], ",.0f"),
            row["state"],
        ]
        for row in rows
    ]
    text_width = min(width or 100, 100)
    lines = ["", *format_table(SUMMARY_COLUMNS, cells, width=width, style=style), *wrap(LEGEND, width=text_width)]
    for row in rows:
        if row["reason"]:
            lines += wrap(f"{row['experiment']}, seed {row['seed']}: {row['reason']}", width=text_width, bullet="- ")
    return "\n".join(lines) + "\n"

"""The list of all experiments, as text by series and as JSON."""

from collections.abc import Sequence
from typing import Any

from some_moe.config.parameters import format_millions
from some_moe.lab.registry import EXPERIMENTS, group_by_series
from some_moe.lab.registry.records import Experiment
from some_moe.layout import Column, Style, format_table, wrap

LEGEND = (
    "d×L: width × layers. E/k/f: experts, how many run for a token, their width. M: millions of parameters. "
    "val: the published validation loss; the reports up to v4 average it over padding, v5 to v7 do not, so the "
    "two do not compare."
)


def format_listing(*, width: int | None = None, style: Style = Style()) -> str:  # noqa: B008 (frozen)
    """Return one table a series, no wider than `width` (None: as wide as needed)."""
    lines: list[str] = []
    for series, experiments in group_by_series().items():
        bases = {experiment.derived_from for experiment in experiments}
        one_base = f", from {experiments[0].derived_from}" if len(bases) == 1 and None not in bases else ""
        shows_base = not one_base and experiments[0].published is None
        lines += [style.bold(series + one_base), *_format_series(experiments, shows_base, width, style), ""]
    lines += wrap(LEGEND, width=min(width or 100, 100))
    lines.append(f"{len(EXPERIMENTS)} experiments; `some experiments show NAME` prints all about one.")
    return "\n".join(lines) + "\n"


def _format_series(experiments: Sequence[Experiment], shows_base: bool, width: int | None, style: Style) -> list[str]:
    published = any(experiment.published for experiment in experiments)
    columns = [
        Column("name"),
        Column("what it is", wraps=True),
        *([Column("from")] if shows_base else []),
        Column("d×L"),
        Column("E/k/f"),
        Column("train M", numeric=True),
        Column("total M", numeric=True),
        *([Column("val", numeric=True)] if published else []),
    ]
    rows = []
    for experiment in experiments:
        model, count = experiment.config.model, experiment.parameters
        rows.append(
            [
                experiment.name,
                experiment.title,
                *([experiment.derived_from or ""] if shows_base else []),
                f"{model.d_model}×{model.num_layers}",
                _describe_feed_forward(experiment),
                format_millions(count.trainable),
                format_millions(count.total),
                *([_format_val_loss(experiment)] if published else []),
            ]
        )
    return format_table(columns, rows, width=width, style=style, indent="  ")


def _describe_feed_forward(experiment: Experiment) -> str:
    model = experiment.config.model
    if model.ffn != "some":
        return f"dense {model.dense_width}"
    return f"{model.num_experts}/{model.top_k}/{model.d_ffn}"


def _format_val_loss(experiment: Experiment) -> str:
    published = experiment.published
    return "" if published is None or published.val_loss is None else str(published.val_loss)


def describe_all() -> list[dict[str, Any]]:
    """Return one short object an experiment, ready for JSON."""
    return [_describe(experiment) for experiment in EXPERIMENTS]


def _describe(experiment: Experiment) -> dict[str, Any]:
    model, count, published = experiment.config.model, experiment.parameters, experiment.published
    return {
        "name": experiment.name,
        "series": experiment.series,
        "title": experiment.title,
        "derived_from": experiment.derived_from,
        "d_model": model.d_model,
        "num_layers": model.num_layers,
        "ffn": model.ffn,
        "num_experts": model.num_experts if model.ffn == "some" else None,
        "top_k": model.top_k if model.ffn == "some" else None,
        "d_ffn": model.d_ffn if model.ffn == "some" else model.dense_width,
        "trainable_parameters": count.trainable,
        "total_parameters": count.total,
        "steps": experiment.steps,
        "published_val_loss": float(published.val_loss) if published and published.val_loss is not None else None,
    }

"""The list of all experiments, as text by series and as JSON."""

from typing import Any

from some_moe.config.parameters import format_millions
from some_moe.lab.registry import EXPERIMENTS, group_by_series
from some_moe.lab.registry.records import Experiment
from some_moe.layout import Column, Style, format_number, format_table, make_table, wrap

LEGEND = (
    "d×L: width × layers. E/k/f: experts, how many run for a token, their width. M: millions of parameters. "
    "val: the published validation loss; the reports up to v4 average it over padding, v5 to v7 do not, so the "
    "two do not compare."
)


def _describe_feed_forward(experiment: Experiment) -> str:
    model = experiment.config.model
    return f"{model.num_experts}/{model.top_k}/{model.d_ffn}" if model.ffn == "some" else f"dense {model.dense_width}"


def _val_loss(experiment: Experiment) -> Any:
    return None if experiment.published is None else experiment.published.val_loss


COLUMNS = (
    Column("name", lambda experiment: experiment.name),
    Column("what it is", lambda experiment: experiment.title, wraps=True),
    Column("from", lambda experiment: experiment.derived_from or ""),
    Column("d×L", lambda experiment: f"{experiment.config.model.d_model}×{experiment.config.model.num_layers}"),
    Column("E/k/f", _describe_feed_forward),
    Column("train M", lambda experiment: format_millions(experiment.parameters.trainable), numeric=True),
    Column("total M", lambda experiment: format_millions(experiment.parameters.total), numeric=True),
    Column("val", lambda experiment: format_number(_val_loss(experiment), absent=""), numeric=True),
)


def format_listing(*, width: int | None = None, style: Style = Style()) -> str:  # noqa: B008 (frozen)
    """Return one table a series, no wider than `width` (None: as wide as needed)."""
    lines: list[str] = []
    for series, experiments in group_by_series().items():
        bases = {experiment.derived_from for experiment in experiments}
        one_base = f", from {experiments[0].derived_from}" if len(bases) == 1 and None not in bases else ""
        shows_base = not one_base and experiments[0].published is None
        columns = [column for column in COLUMNS if shows_base or column.header != "from"]
        lines.append(style.bold(series + one_base))
        lines += [*format_table(*make_table(columns, experiments), width=width, style=style, indent="  "), ""]
    lines += wrap(LEGEND, width=min(width or 100, 100))
    lines.append(f"{len(EXPERIMENTS)} experiments; `some experiments show NAME` prints all about one.")
    return "\n".join(lines) + "\n"


def describe_all() -> list[dict[str, Any]]:
    """Return one short object an experiment, ready for JSON."""
    return [_describe(experiment) for experiment in EXPERIMENTS]


def _describe(experiment: Experiment) -> dict[str, Any]:
    model, count, val_loss = experiment.config.model, experiment.parameters, _val_loss(experiment)
    named = {name: getattr(experiment, name) for name in ("name", "series", "title", "derived_from")}
    shape = {name: getattr(model, name) for name in ("d_model", "num_layers", "ffn", "num_experts", "top_k", "d_ffn")}
    if model.ffn != "some":
        shape |= {"num_experts": None, "top_k": None, "d_ffn": model.dense_width}
    return {
        **named,
        **shape,
        "trainable_parameters": count.trainable,
        "total_parameters": count.total,
        "steps": experiment.steps,
        "published_val_loss": None if val_loss is None else float(val_loss),
    }

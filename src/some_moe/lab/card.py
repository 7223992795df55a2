"""All about one experiment, as a card of text and as JSON."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from decimal import Decimal
from itertools import groupby
from typing import Any

from some_moe.lab.registry import find_experiment
from some_moe.lab.registry.records import Experiment, Published
from some_moe.layout import Column, Style, format_grid, format_number, format_table, make_table, wrap

WIDEST_TEXT = 100
INDENT = "  "

EXECUTION = {
    "model.expert_dtype", "model.residual_dtype", "train.device", "train.precision", "train.compile", "train.kernel",
    "train.checkpoint_activations",
}  # fmt: skip
"""Fields that say how a machine computes the run, not what is computed: left off the card."""

Fields = dict[str, Any]
CONDITIONS: tuple[tuple[Callable[[Fields], bool], tuple[str, ...]], ...] = (
    (lambda f: f["model.init_method"] == "sparse", ("model.sparsity",)),
    (lambda f: f["model.trainability"] == "lora", ("model.lora_rank",)),
    (lambda f: f["model.score"] == "cosine", ("model.cosine_scale",)),
    (lambda f: f["model.learn_temperature"], ("model.temperature_bounds",)),
    (lambda f: f["model.entropy_band"] is not None, ("model.entropy_band_weight",)),
    (lambda f: f["model.router"] != "hash", ("model.temperature", "model.score", "model.query")),
    (lambda f: f["model.center_queries"], ("gravity.center_decay",)),
    (lambda f: f["gravity.use_alpha"], ("gravity.alpha", "gravity.alpha_floor", "gravity.inertia")),
    (lambda f: f["gravity.use_beta"], ("gravity.beta", "gravity.beta_schedule")),
    (lambda f: f["gravity.beta_schedule"] != "constant", ("gravity.beta_end",)),
    (
        lambda f: f["gravity.use_delta"],
        ("gravity.delta", "gravity.decay_mode", "gravity.theta", "gravity.theta_percentile"),
    ),
    (lambda f: f["gravity.use_delta"] and f["gravity.theta"] is not None, ("gravity.theta_window",)),
    (lambda f: f["gravity.respawn_below"] > 0, ("gravity.respawn_patience", "gravity.respawn_max")),
    (
        lambda f: f["gravity.respawn_below"] > 0 or (f["gravity.use_delta"] and f["gravity.decay_mode"] == "seek"),
        ("gravity.num_samples",),
    ),
)
ONLY_WHEN = {name: condition for condition, names in CONDITIONS for name in names}
"""A field that another one puts out of use says nothing about the run."""

EXPERT_FIELDS = {
    "num_experts", "d_ffn", "top_k", "init_method", "sparsity", "trainability", "lora_rank", "expert_seed",
    "router", "query", "query_hidden", "score", "cosine_scale", "temperature", "temperature_bounds",
    "entropy_band_weight",
}  # fmt: skip


def describe(experiment: Experiment) -> dict[str, Any]:
    """Return everything about an experiment, ready for JSON; printed figures become numbers."""
    count = experiment.parameters
    return {
        "name": experiment.name,
        "series": experiment.series,
        "title": experiment.title,
        "question": experiment.question,
        "source": asdict(experiment.source),
        "derived_from": experiment.derived_from,
        "config": experiment.config.model_dump(mode="json"),
        "assumed": list(experiment.assumed),
        "trainable_parameters": count.trainable,
        "total_parameters": count.total,
        "steps": experiment.steps,
        "published": None if experiment.published is None else _to_numbers(asdict(experiment.published)),
        "notes": list(experiment.notes),
    }


def _to_numbers(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {name: _to_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_numbers(inner) for inner in value]
    return value


def format_card(experiment: Experiment, *, width: int | None = None, style: Style = Style()) -> str:  # noqa: B008
    """Return the card's text, no wider than `width`."""
    width = min(width or WIDEST_TEXT, WIDEST_TEXT)
    lines = [f"{style.bold(experiment.name)}  {experiment.title}"]
    if experiment.question:
        lines += wrap(experiment.question, width=width)
    lines += ["", *_format_facts(experiment, style)]
    if experiment.derived_from:
        lines += ["", style.bold(f"Changed from {experiment.derived_from}"), *_format_changes(experiment)]
    lines += ["", *_format_config(experiment, width, style)]
    if experiment.published is not None:
        lines += ["", *_format_published(experiment.published, width, style)]
    if experiment.notes:
        lines += ["", *_format_list("Notes", experiment.notes, width, style)]
    return "\n".join(lines) + "\n"


def _format_facts(experiment: Experiment, style: Style) -> list[str]:
    count, steps = experiment.parameters, experiment.steps
    facts = [
        ("series", experiment.series),
        ("source", experiment.source.report),
        *(("", file) for file in experiment.source.files),
        ("parameters", f"{count.total:,} in all, {count.trainable:,} trained ({count.trainable_percent:.2f} %)"),
        ("steps", f"{steps:,}" if steps is not None else "as many as the data gives"),
    ]
    return [style.dim(name.ljust(12)) + value for name, value in facts]


@dataclass(frozen=True)
class Change:
    """One setting in which two experiments differ, as text."""

    field: str
    before: str
    after: str


def list_changes(base: Experiment, experiment: Experiment) -> list[Change]:
    """Every setting that is not as in `base`, in the order of the config."""
    before, after = base.config.flatten(), experiment.config.flatten()
    changed = [name for name in after if name not in ("name", "experiment") and before[name] != after[name]]
    return [Change(name, format_value(before[name]), format_value(after[name])) for name in changed]


def _format_changes(experiment: Experiment) -> list[str]:
    assert experiment.derived_from is not None
    changes = list_changes(find_experiment(experiment.derived_from), experiment)
    longest = max((len(change.field) for change in changes), default=0)
    lines = [f"{INDENT}{change.field.ljust(longest)}  {change.before} → {change.after}" for change in changes]
    return lines or [INDENT + "nothing"]


def _format_config(experiment: Experiment, width: int, style: Style) -> list[str]:
    fields = experiment.config.flatten()
    defaults = type(experiment.config)().flatten()
    rooms: dict[str, list[tuple[str, str]]] = {}
    for name, value in fields.items():
        room, _, field = name.partition(".")
        assumed = name in experiment.assumed
        # What is off, as it is by default, and was not a choice, need not be read.
        at_rest = not assumed and value == defaults[name] and value in (False, None, 0, [])
        if field and name not in EXECUTION and not at_rest and matters(name, fields):
            rooms.setdefault(room, []).append((field, ("~" if assumed else " ") + format_value(value)))
    pairs = [pair for room in rooms.values() for pair in room]
    name_width = max(len(name) for name, _ in pairs)
    lines = [
        style.bold("Config") + (style.dim("  ~ assumed: the report does not state it") if experiment.assumed else "")
    ]
    for room, cells in rooms.items():
        lines.append(INDENT + room)
        lines += format_grid(cells, width=width, style=style, name_width=name_width, value_width=15, indent=INDENT * 2)
    return lines


def matters(name: str, fields: Fields) -> bool:
    room, _, field = name.partition(".")
    if fields["model.ffn"] != "some" and (room == "gravity" or (room == "model" and field in EXPERT_FIELDS)):
        return False
    return name not in ONLY_WHEN or bool(ONLY_WHEN[name](fields))


def format_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        runs = [(inner, len(list(same))) for inner, same in groupby(value)]
        return ", ".join(f"{n} × {format_value(v)}" if n > 1 else format_value(v) for v, n in runs) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _printed(header: str, name: str) -> Column:
    return Column(header, lambda epoch: format_number(getattr(epoch, name)), numeric=True)


EPOCHS = (
    _printed("epoch", "epoch"),
    _printed("train loss", "train_loss"),
    _printed("val loss", "val_loss"),
    _printed("perplexity", "perplexity"),
    _printed("gini", "gini"),
    _printed("entropy bits", "entropy_bits"),
)


def _format_published(published: Published, width: int, style: Style) -> list[str]:
    lines = [style.bold("Published")]
    if published.epochs:
        lines += [*format_table(*make_table(EPOCHS, published.epochs), width=None, style=style, indent=INDENT), ""]
    lines += [f"{INDENT}{name.ljust(12)}{value}" for name, value in _final_figures(published)]
    for (layer, experts), traces in groupby(published.traces, key=lambda t: (t.layer, t.experts)):
        chosen, tokens = ", ".join(map(str, experts)), ", ".join(t.token for t in traces)
        trace = f"layer {layer}, experts {chosen}: {tokens}"
        lines += wrap(trace, width=width, indent=INDENT, bullet="trace".ljust(12))
    for name, texts in (
        ("Also printed", published.also_printed),
        ("What the report concludes", published.findings),
    ):
        if texts:
            lines += ["", *_format_list(name, texts, width, style)]
    return lines


def _final_figures(p: Published) -> list[tuple[str, str]]:
    """Name and text of each figure that was printed."""
    share = "" if p.trainable_percent is None else f" ({p.trainable_percent} %)"
    figures = (
        ("train loss", p.train_loss, ""),
        ("val loss", p.val_loss, ""),
        ("perplexity", p.perplexity, ""),
        ("gini", p.gini, "" if p.middle_layer is None else f" (layer {p.middle_layer})"),
        ("entropy", p.entropy_bits, f" bits of at most {p.max_entropy_bits}" if p.max_entropy_bits else " bits"),
        ("used", p.experts_used, f" of {p.num_experts} experts"),
        ("parameters", p.total_parameters_millions, f" M, {p.trainable_parameters_millions} M trained{share}"),
        ("steps", None if p.steps is None else f"{p.steps:,}", ""),
    )
    return [(name, f"{value}{rest}") for name, value, rest in figures if value is not None]


def _format_list(heading: str, texts: tuple[str, ...], width: int, style: Style) -> list[str]:
    lines = [style.bold(heading)]
    for text in texts:
        lines += wrap(text, width=width, indent=INDENT, bullet="- ")
    return lines

"""All about one experiment, as a card of text and as JSON."""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from some_moe.config.run import EXECUTION
from some_moe.lab.registry import find_experiment
from some_moe.lab.registry.records import Afterwards, Experiment, Published
from some_moe.layout import Style, format_grid, format_table, make_table, number_columns, wrap

WIDEST_TEXT = 100
INDENT = "  "
EPOCHS = number_columns(epoch="", train_loss="", val_loss="", perplexity="", gini="", entropy_bits="")

Fields = dict[str, Any]
CONDITIONS: tuple[tuple[str, Callable[[Fields], bool]], ...] = (
    ("model.sparsity", lambda f: f["model.init_method"] == "sparse"),
    ("model.lora_rank", lambda f: f["model.trainability"] == "lora"),
    ("model.cosine_scale", lambda f: f["model.score"] == "cosine"),
    ("model.temperature_bounds", lambda f: f["model.learn_temperature"]),
    ("model.entropy_band_weight", lambda f: f["model.entropy_band"] is not None),
    ("model.temperature model.score model.query", lambda f: f["model.router"] != "hash"),
    ("gravity.center_decay", lambda f: f["model.center_queries"]),
    ("gravity.alpha gravity.alpha_floor gravity.inertia gravity.inertia_by", lambda f: f["gravity.use_alpha"]),
    ("gravity.beta gravity.beta_schedule", lambda f: f["gravity.use_beta"]),
    ("gravity.beta_end", lambda f: f["gravity.beta_schedule"] != "constant"),
    ("gravity.delta gravity.decay_mode gravity.theta gravity.theta_percentile", lambda f: f["gravity.use_delta"]),
    ("gravity.theta_window", lambda f: f["gravity.use_delta"] and f["gravity.theta"] is not None),
    ("gravity.respawn_patience gravity.respawn_max", lambda f: f["gravity.respawn_below"] > 0),
    (
        "gravity.num_samples",
        lambda f: f["gravity.respawn_below"] > 0 or (f["gravity.use_delta"] and f["gravity.decay_mode"] == "seek"),
    ),
)
ONLY_WHEN = {name: condition for names, condition in CONDITIONS for name in names.split()}
"""A field that another one puts out of use says nothing about the run."""

EXPERT_FIELDS = {
    "num_experts", "d_ffn", "top_k", "init_method", "sparsity", "trainability", "lora_rank", "expert_seed",
    "router", "query", "query_hidden", "score", "cosine_scale", "temperature", "temperature_bounds",
    "entropy_band_weight",
}  # fmt: skip


def describe(experiment: Experiment) -> dict[str, Any]:
    """Return everything about an experiment, ready for JSON; printed figures become numbers."""
    count = experiment.parameters
    return (
        {name: getattr(experiment, name) for name in ("name", "series", "title", "question")}
        | {
            "source": experiment.source.model_dump(mode="json"),
            "derived_from": experiment.derived_from,
            "config": experiment.config.model_dump(mode="json"),
            "assumed": list(experiment.assumed),
            "trainable_parameters": count.trainable,
            "total_parameters": count.total,
            "steps": experiment.steps,
            "published": experiment.published and experiment.published.model_dump(mode="json"),
            "notes": list(experiment.notes),
        }
        | ({"afterwards": experiment.afterwards.model_dump()} if experiment.afterwards else {})
    )


def format_card(experiment: Experiment, *, width: int | None = None, style: Style = Style()) -> str:  # noqa: B008
    """Return the card's text, no wider than `width`."""
    width = min(width or WIDEST_TEXT, WIDEST_TEXT)
    title = f"{style.bold(experiment.name)}  {experiment.title}"
    published = experiment.published or Published()
    assumed = style.dim("  ~ assumed: the report does not state it") if experiment.assumed else ""
    sections = (
        ("", [title, *wrap(experiment.question, width=width)]),
        ("", _format_facts(experiment, style)),
        (style.bold(f"Changed from {experiment.derived_from}"), _format_changes(experiment)),
        (style.bold("Config") + assumed, _format_config(experiment, width, style)),
        (style.bold("Published"), _format_published(published, width, style)),
        (style.bold("Also printed"), _format_list(published.also_printed, width)),
        (style.bold("What the report concludes"), _format_list(published.findings, width)),
        (style.bold("Notes"), _format_list(experiment.notes, width)),
        (style.bold("Afterwards"), _format_afterwards(experiment.afterwards)),
    )
    blocks = [[heading, *lines] if heading else lines for heading, lines in sections if lines]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


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


def list_changes(base: Experiment, experiment: Experiment) -> list[tuple[str, str]]:
    """Every setting that is not as in `base`, in the order of the config, and how it changed."""
    before, after = base.config.flatten(), experiment.config.flatten()
    changed = [name for name in after if name not in ("name", "experiment") and before[name] != after[name]]
    return [(name, f"{format_value(before[name])} → {format_value(after[name])}") for name in changed]


def _format_afterwards(then: Afterwards | None) -> list[str]:
    return [f"{INDENT}{then.command}", f"{INDENT}this experiment is its row {then.row!r}"] if then else []


def _format_changes(experiment: Experiment) -> list[str]:
    if experiment.derived_from is None:
        return []
    changes = list_changes(find_experiment(experiment.derived_from), experiment)
    longest = max((len(name) for name, _ in changes), default=0)
    return [f"{INDENT}{name.ljust(longest)}  {change}" for name, change in changes] or [INDENT + "nothing"]


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
    longest = max(len(name) for pairs in rooms.values() for name, _ in pairs)
    lines = []
    for room, pairs in rooms.items():
        lines.append(INDENT + room)
        lines += format_grid(pairs, width=width, style=style, name_width=longest, value_width=15, indent=INDENT * 2)
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


def _format_published(published: Published, width: int, style: Style) -> list[str]:
    lines = [f"{INDENT}{name.ljust(12)}{value}" for name, value in _final_figures(published)]
    if published.epochs:
        epochs = make_table(EPOCHS, [dict(epoch) for epoch in published.epochs])
        lines = [*format_table(*epochs, width=None, style=style, indent=INDENT), "", *lines]
    for (layer, experts), traces in groupby(published.traces, key=lambda t: (t.layer, t.experts)):
        chosen, tokens = ", ".join(map(str, experts)), ", ".join(t.token for t in traces)
        trace = f"layer {layer}, experts {chosen}: {tokens}"
        lines += wrap(trace, width=width, indent=INDENT, bullet="trace".ljust(12))
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


def _format_list(texts: Iterable[str], width: int) -> list[str]:
    return [line for text in texts for line in wrap(text, width=width, indent=INDENT, bullet="- ")]

"""The report of one run, in the order of the published ones: configuration, architecture, results, utilisation,
key stores, traces, samples; and where it all comes from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError, RunConfig
from some_moe.config.parameters import count_parameters
from some_moe.glass.inspect.runs import RunRecord
from some_moe.glass.page.blocks import (
    Block,
    Code,
    Facts,
    Figure,
    Fold,
    Notice,
    Number,
    Numbers,
    Page,
    Section,
    Story,
    Table,
    Text,
)
from some_moe.glass.page.tables import Record, figure, make_table, millions, number, word
from some_moe.lab.card import EXECUTION, format_value, matters
from some_moe.lab.registry import find_experiment
from some_moe.lab.registry.records import Published
from some_moe.layout import Column

HOUSEKEEPING = {
    "train.log_every", "train.eval_every", "train.save_every", "train.keep_last", "train.snapshot_every",
    "train.sample_every", "train.sample_prompt", "train.sample_tokens", "train.tensorboard", "data.workers",
    "data.prefetch",
}  # fmt: skip
"""Fields that say what is written down and how often: they change no result."""

SHOWN_SAMPLES = 2


def make_page(run: RunRecord, curve: Figure | None, inside: list[Section], missing: list[str]) -> Page:
    """The report. curve: the drawn loss curve; inside: the sections that analysis gives; missing: what it lacks."""
    sections = [
        Section("At a glance", [Numbers(headline(run)), *_padding_notice(run)]),
        Section("Configuration", _configuration(run.config)),
        Section("Resulting architecture", _architecture(run)),
        Section("Results", _results(run, curve)),
        *inside,
        Section("Samples", _samples(run)),
        Section("Provenance", _provenance(run)),
        Section("What is missing", _missing([*run.missing, *missing])),
    ]
    return Page(title=run.name, kicker="SoME run report", summary=_summary(run), sections=sections)


# --- the top of the page ------------------------------------------------------------------------------------


def _summary(run: RunRecord) -> str:
    model, data = run.config.model, run.config.data
    status = {"finished": "Finished", "stopped early": "Stopped early"}.get(run.status, "Unfinished")
    if model.ffn == "some":
        kind = f"{model.num_layers} layers of {model.num_experts} {_adjective(model.trainability)} experts, "
        kind += f"{model.top_k} of them for each token, found by {describe_router(run.config)}"
    else:
        kind = f"{model.num_layers} layers with one dense network each ({model.ffn.replace('_', ' ')})"
    source = "generated stories" if data.source == "stories" else Path(data.source).name
    return f"{status} after {run.last_step:,} steps on {source}: {kind}."


def describe_router(config: RunConfig) -> str:
    """How a token finds its experts, in a few words."""
    if config.model.router == "gravity":
        return "keys that knowledge gravity moves" if config.gravity.moves_keys else "random keys that never move"
    return {
        "learned": "keys learned by gradient",
        "weights": "keys computed from the experts' own weights",
        "hash": "a hash of the token",
    }[config.model.router]


def _adjective(trainability: str) -> str:
    return {"frozen": "random and frozen", "lora": "frozen, low-rank adapted", "full": "trained"}[trainability]


def final_figures(run: RunRecord) -> dict[str, Any]:
    """The figures of result.json; of the last evaluation where the run has not finished."""
    count = count_parameters(run.config.model)
    always: dict[str, Any] = {"trainable_parameters": count.trainable, "total_parameters": count.total}
    always |= {"layers": [], "middle_layer": None, "epochs": []}
    if run.result is not None:
        return always | run.result
    last = run.evaluations[-1] if run.evaluations else {}
    layers = last.get("layers") or []
    return always | last | {"layers": layers, "middle_layer": len(layers) // 2 if layers else None}


def middle_layer(figures: Record) -> Record:
    """The figures of the layer that the published reports print; empty where there is none."""
    middle = figures.get("middle_layer")
    return figures["layers"][middle] if middle is not None and figures["layers"] else {}


def headline(run: RunRecord) -> list[Number]:
    """Loss over real tokens first; what the old protocol would have printed is labelled so."""
    found = final_figures(run)
    split = "test" if "test_bits_per_byte" in found else "validation"
    share = f"{found['text_share']:.0%} of the positions are text" if found.get("text_share") else ""
    figures = [
        ("Test loss", found.get("test_loss"), 4, "nats per real token, best checkpoint"),
        ("Validation loss", found.get("val_loss"), 4, "nats per real token, last step"),
        ("Perplexity", found.get("perplexity"), 2, "validation, per real token"),
        ("Bits per byte", found.get("test_bits_per_byte", found.get("bits_per_byte")), 4,
         f"{split}, over the bytes scored"),
        ("Padded loss", found.get("val_loss_padded"), 4, f"old protocol: padding counts as text; {share}"),
    ]  # fmt: skip
    items = [Number(label, number(value, digits), note) for label, value, digits, note in figures if value is not None]
    of_all = f"of {millions(found['total_parameters'])} parameters"
    items.append(Number("Trained", millions(found["trainable_parameters"]), of_all))
    layer = middle_layer(found)
    if layer:
        where = f"of the load in the middle layer ({found['middle_layer']})"
        items.append(Number("Gini", number(layer["gini"], 3), where))
        used = f"{layer['experts_used']} of {layer['num_experts']}"
        items.append(Number("Experts used", used, f"middle layer, {layer['entropy_bits']:.2f} bits of entropy"))
    return items


def _padding_notice(run: RunRecord) -> list[Block]:
    found = final_figures(run)
    if found.get("val_loss_padded") is None:
        return []
    return [
        Notice(
            "This run averages its training loss over padding, as the published reports up to v4 did. The padded loss "
            "looks small because padding after padding is easy to foresee. Compare runs by the loss over real tokens."
        )
    ]


# --- results ------------------------------------------------------------------------------------------------


def _results(run: RunRecord, curve: Figure | None) -> list[Block]:
    blocks: list[Block] = []
    epochs = final_figures(run)["epochs"]
    if epochs:
        blocks.append(_epoch_table(epochs))
    if curve is not None:
        blocks.append(curve)
    published = find_published(run.config)
    if published is not None:
        blocks += _beside_published(run, published)
    return blocks or [Notice("Nothing was recorded yet.")]


def _epoch_table(epochs: list[dict[str, Any]]) -> Table:
    """One row an epoch, as the published reports print it; columns that no epoch fills are left out."""
    columns = {
        "Epoch": word("epoch"), "Step": figure("step", 0), "Train loss": figure("train_loss", 4),
        "Val loss": figure("val_loss", 4), "Val loss, padded": figure("val_loss_padded", 4),
        "Perplexity": figure("perplexity", 2), "Bits per byte": figure("bits_per_byte", 4), "Gini": figure("gini", 3),
        "Entropy, bits": figure("entropy_bits", 3), "Gini in training": figure("train_gini", 3),
    }  # fmt: skip
    return make_table(epochs, columns, "Each epoch. Gini and entropy are of the middle layer.", drop_empty=True)


def find_published(config: RunConfig) -> Published | None:
    """What was published of the experiment that a run repeats, if anything."""
    if config.experiment is None:
        return None
    try:
        return find_experiment(config.experiment).published
    except ConfigError:  # a run of a newer or older registry
        return None


def _beside_published(run: RunRecord, published: Published) -> list[Block]:
    found = final_figures(run)
    padded, layer = found.get("val_loss_padded") is not None, middle_layer(found)
    loss = found.get("val_loss_padded") if padded else found.get("val_loss")
    pairs = [
        ("Validation loss" + (", padded" if padded else ""), number(loss, 4), published.val_loss),
        ("Gini, middle layer", number(layer.get("gini"), 3), published.gini),
        ("Entropy, bits", number(layer.get("entropy_bits"), 3), published.entropy_bits),
        ("Experts used", str(layer.get("experts_used", "–")), published.experts_used),
        ("Steps", number(run.last_step, 0), published.steps),
    ]
    rows = [[name, ours, str(theirs)] for name, ours, theirs in pairs if theirs is not None]
    if not rows:
        return []
    columns = [Column("Figure"), Column("This run", numeric=True), Column("Published", numeric=True)]
    blocks: list[Block] = [Table(columns, rows, f"Beside the published figures of {run.config.experiment}.")]
    if not padded and published.val_loss is not None:
        blocks.append(
            Notice(
                "This run scores real tokens only. Published losses up to v4 average over padding, so the two losses "
                "are not of one kind."
            )
        )
    return blocks


# --- configuration and architecture -------------------------------------------------------------------------


def _configuration(config: RunConfig) -> list[Block]:
    """What was chosen, room by room; the whole file for who asks."""
    fields, defaults = config.flatten(), RunConfig().flatten()
    blocks: list[Block] = []
    for room in ("model", "gravity", "data", "train"):
        pairs = [
            (name.partition(".")[2], format_value(value))
            for name, value in fields.items()
            if name.startswith(f"{room}.") and _is_telling(name, value, fields, defaults)
        ]
        if pairs:
            blocks.append(Facts(pairs, ROOMS[room]))
    blocks.append(Fold("The whole config.yaml", [Code(config.to_yaml())]))
    return blocks


ROOMS = {"model": "Model", "gravity": "Knowledge gravity", "data": "Data", "train": "Training"}


def _is_telling(name: str, value: Any, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether a field says something about this run: in force, and not merely off as it always is."""
    at_rest = value == defaults[name] and value in (False, None, 0, [], "")
    return name not in EXECUTION | HOUSEKEEPING and not at_rest and matters(name, dict(fields))


def _architecture(run: RunRecord) -> list[Block]:
    """Exact parameters, part by part; the parts add up to the totals."""
    model, found = run.config.model, final_figures(run)
    trainable, total = found["trainable_parameters"], found["total_parameters"]
    V, d, L = model.vocab_size, model.d_model, model.num_layers
    embedding, head = V * d, d * V + V
    attention, norms = L * (4 * d * d + 4 * d), L * 4 * d
    rest = trainable - embedding - head - attention - norms
    learned = "Query networks" if model.trainability == "frozen" and model.ffn == "some" else "Feed-forward layers"
    parts = [
        ("Token embedding", embedding, "trained", f"{V:,} × {d}"),
        ("Attention", attention, "trained", f"{L} × 4 projections of {d} × {d}, with biases"),
        ("LayerNorms", norms, "trained", f"{L} × 2"),
        (learned, rest, "trained", "all else that learns" if model.ffn == "some" else f"width {model.dense_width:,}"),
        ("Frozen experts", total - trainable, "frozen", f"{L} × {model.num_experts} × ({d} → {model.d_ffn} → {d})"),
        ("Output head", head, "trained", f"{d} × {V:,} and a bias, untied"),
    ]
    if model.ffn == "frozen_dense":
        parts[4] = ("Frozen networks", total - trainable, "frozen", f"{L} × ({d} → {model.dense_width} → {d})")
    rows = [[name, f"{count:,}", state, shape] for name, count, state, shape in parts if count]
    rows.append(["In all", f"{total:,}", f"{trainable / total:.2%} trained", ""])
    columns = [Column("Part"), Column("Parameters", numeric=True), Column("State"), Column("Shape")]
    blocks: list[Block] = [Table(columns, rows, f"{trainable:,} parameters are trained, {total:,} there are.")]
    if run.has_keys and model.router != "learned":
        keys = L * model.num_experts * d
        text = f"The key stores hold {keys:,} more numbers ({L} × {model.num_experts} × {d}). "
        blocks.append(Text(text + "They are moved, not trained, and count in neither sum."))
    return blocks


# --- the rest -----------------------------------------------------------------------------------------------


def _samples(run: RunRecord) -> list[Block]:
    if not run.samples:
        return [Notice("No texts were sampled in training.")]
    stories = [Story(str(sample["text"]), f"after step {sample['step']:,}") for sample in reversed(run.samples)]
    blocks: list[Block] = [
        Text("Written by the model while it was trained, newest first, without any choosing."),
        *stories[:SHOWN_SAMPLES],
    ]
    if stories[SHOWN_SAMPLES:]:
        blocks.append(Fold(f"{len(stories) - SHOWN_SAMPLES} earlier ones", stories[SHOWN_SAMPLES:]))
    return blocks


def _provenance(run: RunRecord) -> list[Block]:
    found, env = final_figures(run), run.env
    pairs = [
        ("Random seed", str(run.config.train.seed)),
        ("Expert seed", str(run.config.model.expert_seed)),
        ("Experiment", run.config.experiment or "not a registered one"),
        ("Device", str(found.get("device") or env.get("device") or "not known")),
        ("Commit", str(env.get("commit") or "not known")[:12] + _plus(env.get("commit"))),
        ("some-moe", str(env.get("some_moe", "not known"))),
        ("torch", str(env.get("torch", "not known"))),
        ("Python", str(env.get("python", "not known"))),
    ]
    if "tokens" in found:
        pairs.append(("Tokens trained on", f"{found['tokens']:,}"))
    if found.get("seconds"):
        pairs.append(("Training steps took", f"{found['seconds']:,.0f} s"))
        pairs.append(("Speed", f"{found['tokens_per_second']:,.0f} tokens/s"))
    blocks: list[Block] = [Facts(pairs)]
    if env.get("command"):
        blocks += [Text("The command that started it:"), Code(str(env["command"]))]
    return blocks


def _plus(commit: Any) -> str:
    """A commit that ends with + had changes on top; shortened, it keeps the sign."""
    return "+" if isinstance(commit, str) and len(commit) > 12 and commit.endswith("+") else ""


def _missing(sentences: list[str]) -> list[Block]:
    if not sentences:
        return [Text("Nothing: every part of this report has its data.")]
    return [Notice(text) for text in sentences]

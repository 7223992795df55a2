"""The report of one run, in the order of the published ones: configuration, results, utilisation, key stores, traces,
samples; and where it all comes from."""

from pathlib import Path
from typing import Any

from some_moe.config import RunConfig
from some_moe.config.parameters import count_parameters
from some_moe.config.run import EXECUTION, HOUSEKEEPING
from some_moe.glass.inspect.runs import RunRecord
from some_moe.glass.page import blocks
from some_moe.glass.page.blocks import Block, Notice, Number, Page, Record, Section, Table, Text
from some_moe.glass.page.inside import Analysis, make_inside
from some_moe.lab.card import format_value, matters
from some_moe.layout import Column, format_number, number_column, text_column

SHOWN_SAMPLES = 2
TRAINABILITY = {"frozen": "random and frozen", "lora": "frozen, low-rank adapted", "full": "trained"}
ROUTERS = {
    "gravity": "keys that knowledge gravity moves",
    "learned": "keys learned by gradient",
    "weights": "keys computed from the experts' own weights",
    "hash": "a hash of the token",
}
PHASES = (Column("Phase"), Column("Seconds", numeric=True), Column("Share", numeric=True))
PADDED = (
    "This run averages its training loss over padding, as the published reports up to v4 did. The padded loss looks "
    "small because padding after padding is easy to foresee. Compare runs by the loss over real tokens."
)


def make_page(run: RunRecord, analysis: Analysis, curves: list[blocks.Figure], missing: list[str]) -> Page:
    """The report. curves: of the loss, where it was drawn; missing: what there is not, in sentences."""
    padded = final_figures(run).get("val_loss_padded") is not None
    nothing = [Text("Nothing: every part of this report has its data.")]
    sections = [
        Section("At a glance", [blocks.Numbers(headline(run)), *([Notice(PADDED)] if padded else [])]),
        Section("Configuration", _show_configuration(run)),
        Section("Results", _show_results(run, curves) or [Notice("Nothing was recorded yet.")]),
        *([Section("Branches", _show_branches(run.grown, analysis))] if run.grown else []),
        *make_inside(run, analysis),
        Section("Samples", _show_samples(run) or [Notice("No texts were sampled in training.")]),
        Section("Provenance", _show_provenance(run)),
        Section("What is missing", list(map(Notice, missing)) or nothing),
    ]
    return Page(title=run.name, kicker="SoME run report", summary=_summarize(run), sections=sections)


# --- the top of the page ------------------------------------------------------------------------------------


def _summarize(run: RunRecord) -> str:
    model, data = run.config.model, run.config.data
    status = {"finished": "Finished", "stopped early": "Stopped early"}.get(run.status, "Unfinished")
    if run.grown:
        names = [branch["name"] for branch in run.grown["branches"]]
        what = f"Merged from the branches {', '.join(names)}" if run.grown.get("merged") else f"{status}: a branch"
        added = sum(branch["experts"] for branch in run.grown["branches"])
        return f"{what} of {Path(run.grown['base']).name}: {added} of its {model.num_experts} experts a layer are new."
    if model.ffn == "some":
        still = model.router == "gravity" and not run.config.gravity.moves_keys
        router = "random keys that never move" if still else ROUTERS[model.router]
        kind = f"{model.num_layers} layers of {model.num_experts} {TRAINABILITY[model.trainability]} experts, "
        kind += f"{model.top_k} of them for each token, found by {router}"
    else:
        kind = f"{model.num_layers} layers with one dense network each ({model.ffn.replace('_', ' ')})"
    source = "generated stories" if data.source == "stories" else Path(data.source).name
    return f"{status} after {run.last_step:,} steps on {source}: {kind}."


def final_figures(run: RunRecord) -> Record:
    """The figures of result.json; of the last evaluation where the run has not finished."""
    count = count_parameters(run.config.model)
    always: Record = {"trainable_parameters": count.trainable, "total_parameters": count.total}
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


def show_millions(count: int) -> str:
    return f"{count / 1e6:,.2f} M" if count >= 1e5 else f"{count:,}"


def headline(run: RunRecord) -> list[Number]:
    """Loss over real tokens first; what the old protocol would have printed is labelled so."""
    found = final_figures(run)
    split = "test" if "test_bits_per_byte" in found else "validation"
    share = f"{found['text_share']:.0%} of the positions are text" if found.get("text_share") else ""
    figures = [
        ("Test loss", found.get("test_loss"), ".4f", "nats per real token, best checkpoint"),
        ("Validation loss", found.get("val_loss"), ".4f", "nats per real token, last step"),
        ("Perplexity", found.get("perplexity"), ",.2f", "validation, per real token"),
        ("Bits per byte", found.get("test_bits_per_byte", found.get("bits_per_byte")), ".4f",
         f"{split}, over the bytes scored"),
        ("Padded loss", found.get("val_loss_padded"), ".4f", f"old protocol: padding counts as text; {share}"),
    ]  # fmt: skip
    items = [Number(label, format(value, form), note) for label, value, form, note in figures if value is not None]
    of_all = f"of {show_millions(found['total_parameters'])} parameters"
    items.append(Number("Trained", show_millions(found["trainable_parameters"]), of_all))
    layer = middle_layer(found)
    if layer:
        where = f"of the load in the middle layer ({found['middle_layer']})"
        items.append(Number("Gini", f"{layer['gini']:.3f}", where))
        used = f"{layer['experts_used']} of {layer['num_experts']}"
        items.append(Number("Experts used", used, f"middle layer, {layer['entropy_bits']:.2f} bits of entropy"))
    return items


# --- results ------------------------------------------------------------------------------------------------

EPOCH_COLUMNS = [
    number_column("Epoch", "epoch"),
    number_column("Step", "step", ","),
    number_column("Train loss", "train_loss", ".4f"),
    number_column("Val loss", "val_loss", ".4f"),
    number_column("Val loss, padded", "val_loss_padded", ".4f"),
    number_column("Perplexity", "perplexity", ",.2f"),
    number_column("Bits per byte", "bits_per_byte", ".4f"),
    number_column("Gini", "gini", ".3f"),
    number_column("Entropy, bits", "entropy_bits", ".3f"),
    number_column("Gini in training", "train_gini", ".3f"),
]


def _show_results(run: RunRecord, curves: list[blocks.Figure]) -> list[Block]:
    """One row an epoch, as the published reports print it; and the curves."""
    epochs = final_figures(run)["epochs"]
    tables = [Table.of(EPOCH_COLUMNS, epochs, "Each epoch. Gini and entropy are of the middle layer.")]
    return [*(tables if epochs else []), *curves]


BRANCH_COLUMNS = [
    text_column("Branch", "name"),
    number_column("Experts a layer", "experts"),
    text_column("Trained", "how"),
]
FAVOUR_COLUMNS = [
    number_column("Favour", "favour", "+.1f"),
    number_column("Loss, new text", "new_loss", ".4f"),
    number_column("Loss, kept text", "kept_loss", ".4f"),
    number_column("New text served", "new_share", ".1%"),
    number_column("Kept text served", "kept_share", ".1%"),
]


SERVED_COLUMNS = [
    text_column("Part", "name"),
    number_column("Serves", "share", ".1%"),
    Column("By layer", lambda part: ", ".join(f"{share:.0%}" for share in part["by_layer"])),
    Column(
        "Words it took over", lambda part: ", ".join(f"{w['text'].strip()} {w['share']:.0%}" for w in part["words"])
    ),
]


def _show_branches(grown: Record, analysis: Analysis) -> list[Block]:
    """What was added to the base, and how the favour moves what is won and what is lost."""
    kinds = {"full": "whole", "lora": "by a low-rank update of rank {lora_rank}"}
    rows = [branch | {"how": kinds[branch["trainability"]].format(**branch)} for branch in grown["branches"]]
    for row in rows:
        row["how"] += f", head of rank {row['head_rank']}" if row.get("head_rank") else ""
        row["how"] += f", looking back {row['looks_back']:g}" if row.get("looks_back") else ""
    base = f"The base is {grown['base']} at step {grown['base_step']:,}; nothing of it has changed."
    shown: list[Block] = [Text(base), Table.of(BRANCH_COLUMNS, rows, f"At favour {grown.get('favour', 0.0):+.1f}.")]
    if grown.get("curve"):
        caption = (
            "What another favour would give, on the first rows of the new text's validation split and of the kept "
        )
        caption += f"text ({grown['kept']}); served: by the branch, by gates."
        shown.append(Table.of(FAVOUR_COLUMNS, grown["curve"], caption))
    served, seen = analysis.record.get("branches") or [], analysis.record.get("collected") or {}
    if served:
        favour = grown["favour"] if seen.get("favour") is None else seen["favour"]
        caption = f"By gates, in the {seen.get('split')} split that was replayed, at favour {favour:+.1f}; words: "
        caption += (
            "those most often given to the branch, of those that occur five times or more, with its share of each."
        )
        shown.append(Table.of(SERVED_COLUMNS, served, caption))
    return [*shown, *analysis.gallery("keys_branches")]


# --- the rest -----------------------------------------------------------------------------------------------


def _show_configuration(run: RunRecord) -> list[Block]:
    """The size, and what was chosen, room by room; the whole file for who asks."""
    found, model, config = final_figures(run), run.config.model, run.config
    trained, total = found["trainable_parameters"], found["total_parameters"]
    text = f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})."
    if run.has_keys and model.router != "learned":
        keys = f"{model.num_layers * model.num_experts * model.d_model:,}"
        text += f" The key stores hold {keys} more numbers, which are moved, not trained, and count in neither sum."
    shown: list[Block] = [Text(text)]
    fields, defaults = config.flatten(), RunConfig().flatten()
    rooms = {"model": "Model", "gravity": "Knowledge gravity", "data": "Data", "train": "Training"}
    for room, title in rooms.items():
        pairs = [
            (name.partition(".")[2], format_value(value))
            for name, value in fields.items()
            if name.startswith(f"{room}.") and _is_telling(name, fields, defaults)
        ]
        if pairs:
            shown.append(blocks.Facts(pairs, title))
    return [*shown, blocks.Fold("The whole config.yaml", [blocks.Code(config.to_yaml())])]


def _is_telling(name: str, fields: dict[str, Any], defaults: dict[str, Any]) -> bool:
    """Whether a field says something about this run: in force, and not merely off as it always is."""
    at_rest = fields[name] == defaults[name] and fields[name] in (False, None, 0, [], "")
    return name not in EXECUTION | HOUSEKEEPING and not at_rest and matters(name, fields)


def _show_samples(run: RunRecord) -> list[Block]:
    stories = [blocks.Story(str(one["text"]), f"after step {one['step']:,}") for one in reversed(run.samples)]
    if not stories:
        return []
    text = "Written by the model while it was trained, newest first, without any choosing."
    older = stories[SHOWN_SAMPLES:]
    fold = [blocks.Fold(f"{len(older)} earlier ones", older)] if older else []
    return [Text(text), *stories[:SHOWN_SAMPLES], *fold]


def _show_provenance(run: RunRecord) -> list[Block]:
    found, env = final_figures(run), run.env
    commit = str(env.get("commit") or "")
    changed = "+" if len(commit) > 12 and commit.endswith("+") else ""  # it had changes on top
    facts = {
        "Random seed": run.config.train.seed,
        "Expert seed": run.config.model.expert_seed,
        "Experiment": run.config.experiment or "not a registered one",
        "Device": found.get("device") or env.get("device"),
        "Commit": commit[:12] + changed,
        "some-moe": env.get("some_moe"),
        "torch": env.get("torch"),
        "Python": env.get("python"),
        "Tokens trained on": format_number(found.get("tokens"), ",", absent=""),
        "Training steps took": format_number(found.get("seconds"), ",.0f", " s", absent=""),
        "Speed": format_number(found.get("tokens_per_second"), ",.0f", " tokens/s", absent=""),
    }
    shown: list[Block] = [
        blocks.Facts([(name, str(value)) for name, value in facts.items() if value not in ("", None)])
    ]
    if phases := found.get("phases"):
        total = sum(phases.values()) or 1.0
        rows = [(name, f"{spent:,.1f}", f"{spent / total:.0%}") for name, spent in phases.items()]
        shown += [
            Text(f"Where the {total:,.0f} s from the command to the result went:"),
            blocks.Table(PHASES, [*rows, ("in all", f"{total:,.1f}", "")]),
        ]
    if env.get("command"):
        shown += [Text("The command that started it:"), blocks.Code(str(env["command"]))]
    return shown

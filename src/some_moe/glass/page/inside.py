"""What analysis found, as parts of a page: utilisation, key stores, key movement, a trace, guilds."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from some_moe.config import ConfigError
from some_moe.glass import name_text
from some_moe.glass.inspect import forms
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.runs import RunRecord, hash_state
from some_moe.glass.inspect.traces import Trace, trace_collected
from some_moe.glass.page.blocks import Block, Figure, Frame, Gallery, Notice, Record, Section, Table, Text, TraceView
from some_moe.glass.page.guild_sections import make_guild_section
from some_moe.glass.page.render import render_movement
from some_moe.layout import ABSENT, Column, number_column
from some_moe.system.files import inside
from some_moe.system.reading import refuse_irregular
from some_moe.training.run_folder import RunFolder

LARGEST_FRAME = 2_000_000  # bytes; a larger animation stays a page of its own
MOST_NAMED = 4  # generalists named in a cell
USAGE_FIGURES = ("usage_ranked", "usage_by_depth", "usage_over_steps", "co_selection")
MAP_FIGURES = ("keys_umap", "keys_tsne", "keys_pca")
MOVEMENT_FIGURES = ("key_paths", "key_drift")
STALE = "These guilds are of an earlier analysis than the figures above; `some analyze RUN` renews them."


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What lies in RUN/analysis, as far as it fits `forms`. Everything may be absent."""

    folder: Path
    record: Record  # analysis.json; empty without it
    guilds: Record | None = None
    movement: Record | None = None
    trace: Trace | None = None  # the beginning of what was collected
    stale: str = ""  # where it is of another checkpoint than the run's: a sentence
    problems: list[str] = field(default_factory=list)  # what could not be used: a sentence each

    def figures(self, *names: str) -> list[Figure]:
        """Those of the figures that were drawn, with their words; all of them where none is named."""
        listed = {one["name"]: one for one in self.record.get("figures") or []}
        chosen = [listed[name] for name in names or listed if name in listed]
        figures = []
        for one in chosen:
            with suppress(ConfigError, OSError):  # a link that leads out, a pipe, or nothing
                file = inside(self.folder, f"figures/{one['name']}.png")
                refuse_irregular(file)
                figures.append(Figure(file, one["title"], one["caption"]))
        return figures

    def gallery(self, *names: str) -> list[Block]:
        """The figures as one part; nothing where none was drawn."""
        figures = self.figures(*names)
        return [Gallery(figures)] if figures else []


def read_analysis(run: RunRecord) -> Analysis:
    """Open what `some analyze` left in a run's folder."""
    problems: list[str] = []
    record = forms.read_part(run.path, "analysis.json", forms.ANALYSIS, problems) or {}
    guilds = forms.read_part(run.path, "guilds.json", forms.GUILDS, problems)
    movement = forms.read_movement(run.path, problems)
    collection, trace = _read_collection(run, problems)
    if guilds is not None and collection is not None and guilds.get("of") != collection.digest():
        guilds["stale"] = STALE  # `some analyze --no-guilds` leaves those of an earlier analysis
    folder, stale = run.path / "analysis", find_age(run, record)
    found = {"guilds": guilds, "movement": movement, "trace": trace, "stale": stale, "problems": problems}
    return Analysis(folder=folder, record=record, **found)


def _read_collection(run: RunRecord, problems: list[str]) -> tuple[Collection | None, Trace | None]:
    """What was collected, and the beginning of its first story."""
    name = "analysis/collected.safetensors"
    if not os.path.lexists(run.path / name):
        return None, None
    try:
        collection = Collection.load(inside(run.path, name))
        collection.refuse_other_model(run.config.model)
        if run.config.model.ffn != "some" or not (run.path / "tokenizer.json").is_file():
            return collection, None
        return collection, trace_collected(collection, RunFolder(run.path).read_tokenizer())
    except (ConfigError, OSError):
        problems.append(f"{name} or tokenizer.json cannot be used: no text is traced; `some analyze RUN` renews it.")
        return None, None


def find_age(run: RunRecord, record: Record) -> str:
    """Why an analysis is not of what the run is now, as its own record says; empty where it is."""
    of, newest = record.get("of") or {}, run.checkpoints[-1] if run.checkpoints else None
    if not record or newest is None:
        return ""
    cure = "`some analyze RUN` renews it."
    if record["format_version"] != forms.VERSION:
        return f"The analysis was made by another version of this program; {cure}"
    if of.get("newest") != newest:
        return f"The analysis was made at step {of.get('newest', 'unknown')}, and the run is at step {newest:,}; {cure}"
    was_replayed, can_be = of.get("state") is not None, (run.path / "tokenizer.json").is_file()
    if was_replayed and hash_state(run.path / "checkpoints" / f"step-{of.get('step')}") == of["state"]:
        return ""
    return f"The analysis is of another checkpoint than this run's; {cure}" if was_replayed or can_be else ""


def make_inside(run: RunRecord, analysis: Analysis) -> list[Section]:
    """The sections, for the kind of model that the run has; dense models have none of them."""
    if run.config.model.ffn != "some":
        return []
    maps = analysis.gallery(*MAP_FIGURES) or [Notice("The keys were not mapped; `some analyze RUN` does it.")]
    keys = [Section("Key stores", maps), Section("Key movement", _show_movement(run, analysis))]
    return [
        Section("Utilisation analysis", _show_utilisation(run, analysis)),
        *(keys if run.has_keys else ()),
        Section("A trace", _show_trace(analysis)),
        make_guild_section(analysis.guilds),
    ]


def list_missing(run: RunRecord, analysis: Analysis) -> list[str]:
    """What the run and its analysis lack: one sentence each."""
    told = [*analysis.problems, *filter(None, [analysis.stale])]
    if not analysis.record:
        cure = "No analysis: `some analyze RUN` replays the model, and `some report RUN` then shows what it found."
        return [*run.missing, *told, cure]
    sentences = dict.fromkeys([*run.missing, *analysis.record["missing"], *told])
    if run.config.model.ffn == "some" and analysis.guilds is None:
        return [*sentences, "No guilds: the analysis did not look for them."]
    return list(sentences)


# --- utilisation --------------------------------------------------------------------------------------------


def _name_generalists(layer: Record) -> str:
    if layer.get("generalists") is None:
        return ABSENT
    named = ", ".join(map(str, layer["generalists"][:MOST_NAMED]))
    more = len(layer["generalists"]) - MOST_NAMED
    return (f"{named} and {more} more" if more > 0 else named) or "none"


LAYER_COLUMNS = [
    number_column("layer", "layer"),
    number_column("gini", "gini", ".3f"),
    number_column("by hash", "hash_gini", ".3f"),
    Column("entropy, bits", lambda layer: f"{layer['entropy_bits']:.2f} of {layer['max_entropy_bits']:.2f}", True),
    Column("used", lambda layer: f"{layer['experts_used']} of {layer['num_experts']}", True),
    number_column("busiest", "max_load", ".1f", "×"),
    Column("generalists", _name_generalists),
    Column(
        "under-used", lambda layer: ABSENT if layer.get("under_used") is None else str(len(layer["under_used"])), True
    ),
    number_column("gate nats", "gate_entropy_nats", ".2f"),
    Column("respawns", lambda layer: str(layer.get("respawns") or ABSENT), numeric=True),
    number_column("collinear", "query_collinearity", ".2f"),
    number_column("rank", "query_effective_rank", ".1f"),
    number_column("drift", "drift", ".2f"),
]
LEGEND = (
    "Collinear: length of the mean unit query, 1 is all queries alike. Rank: directions that the queries really use. "
    "Drift: mean distance of the keys from where they began."
)


def make_layer_table(record: Record) -> Table:
    """A row a layer of what analysis.json holds, and what its words mean."""
    drift = {one["layer"]: sum(one["drift"]) / max(1, len(one["drift"])) for one in record["movement"]}
    layers = [layer | {"drift": drift.get(layer["layer"])} for layer in record["layers"]]
    rules = [f"{name}: {record['rules'][rule]}." for name, rule in (
        ("Generalists", "generalists"), ("Under-used", "under_used"), ("By hash", "hash_gini"),
    )]  # fmt: skip
    return Table.of(LAYER_COLUMNS, layers, " ".join([*rules, LEGEND]))


def describe_analysis(record: Record) -> tuple[str, list[Block]]:
    """What analysis found, in a few words and as parts for a terminal: layers, guilds, and what is missing."""
    title, seen = f"{record['run']}: {record['status']}", record["collected"]
    blocks: list[Block] = []
    if seen is not None:
        title += f"; step {seen['step']:,} replayed on {seen['num_tokens']:,} tokens of {seen['split']}"
        blocks.append(Text(f"loss {seen['loss']:.4f} nats per token"))
    if record["layers"]:
        blocks.append(make_layer_table(record))
    if "guilds" in record:
        supported, of = record["guilds"]["supported"], record["guilds"]["candidates"]
        judged = f"guilds: {len(supported)} of {of} candidates supported at level {record['guilds']['level']:g}"
        none = "guilds: no group of experts is tied to a kind of word beyond chance, so there was none to test"
        blocks.append(Text(": ".join(filter(None, [judged, "; ".join(supported)])) if of else none))
    return title, [*blocks, *map(Notice, record["missing"])]


def _show_utilisation(run: RunRecord, analysis: Analysis) -> list[Block]:
    """A row a layer, then the figures. Without analysis, the rows of the run's own last evaluation."""
    if analysis.record.get("layers"):
        table, collected = make_layer_table(analysis.record), analysis.record.get("collected") or {}
        where = f"{collected.get('num_tokens', 0):,} real tokens of {name_text(collected.get('split'))}"
    else:
        last = run.result or (run.evaluations[-1] if run.evaluations else {})
        table, where = Table.of(LAYER_COLUMNS, last.get("layers") or []), "the run's last evaluation"
    if not table.rows:
        return [Notice("No layer has been measured yet.")]
    text = f"How the experts share the work, over {where}. Gini 0 is even use. "
    text += f"The published reports print the middle layer, here {table.rows[len(table.rows) // 2][0]}."
    age = [Notice(analysis.stale)] if analysis.stale else []
    return [*age, Text(text), table, *analysis.gallery(*USAGE_FIGURES)]


# --- movement and a trace -----------------------------------------------------------------------------------


def _show_movement(run: RunRecord, analysis: Analysis) -> list[Block]:
    if run.config.model.router == "gravity" and not run.config.gravity.moves_keys:
        return [Text("The keys of this run never move: every rule of gravity that moves them is off.")]
    blocks: list[Block] = []
    page = None if analysis.movement is None else render_movement(run.name, analysis.movement)
    if page is not None and len(page) <= LARGEST_FRAME:
        blocks.append(Frame(page, analysis.folder / "movement.html", "The keys in movement"))
    elif page is not None:
        blocks.append(Text("The animation is too large for this page; it lies in `analysis/movement.html`."))
    elif analysis.record.get("movement"):
        blocks.append(Notice("The animation is not there; `some analyze RUN` makes it anew."))
    blocks += analysis.gallery(*MOVEMENT_FIGURES)
    return blocks or [Notice("Movement was not drawn; it needs two key snapshots and `some analyze RUN`.")]


def _show_trace(analysis: Analysis) -> list[Block]:
    if analysis.trace is None:
        cure = "`some analyze RUN` does it, and `some trace RUN TEXT` traces any text."
        return [Notice(f"No text has been replayed; {cure}")]
    text = f"The beginning of the first story that was replayed, as the model read it at step {analysis.trace.step:,}. "
    return [Text(text + "`some trace RUN TEXT` makes such a page of any text."), TraceView(analysis.trace)]

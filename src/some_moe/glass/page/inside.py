"""What analysis found, as parts of a page: utilisation, key stores, key movement, a trace, guilds."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from some_moe.config import ConfigError
from some_moe.data.tokenizer import Tokenizer
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.runs import RunRecord
from some_moe.glass.inspect.traces import trace_collected
from some_moe.glass.page.blocks import Block, Figure, Frame, Gallery, Notice, Record, Section, Table, Text, TraceView
from some_moe.glass.page.guild_sections import make_guild_section
from some_moe.layout import ABSENT, Column, number_column

LARGEST_FRAME = 2_000_000  # bytes; a larger animation stays a page of its own
MOST_NAMED = 4  # generalists named in a cell
USAGE_FIGURES = ("usage_ranked", "usage_by_depth", "usage_over_steps", "co_selection")
MAP_FIGURES = ("keys_umap", "keys_tsne", "keys_pca")
MOVEMENT_FIGURES = ("key_paths", "key_drift")
STALE = "These guilds are of an earlier analysis than the figures above; `some analyze RUN` renews them."


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What lies in RUN/analysis. Everything may be absent."""

    folder: Path
    record: Record  # analysis.json; empty without it
    guilds: Record | None = None
    collection: Collection | None = None

    def figures(self, *names: str) -> list[Figure]:
        """Those of the figures that were drawn, with their words; all of them where none is named."""
        listed = {one["name"]: one for one in self.record.get("figures") or []}
        chosen = [listed[name] for name in names or listed if name in listed]
        figures = [Figure(self.folder / one["png"], one["title"], one["caption"]) for one in chosen]
        return [figure for figure in figures if figure.file.is_file()]

    def gallery(self, *names: str) -> list[Block]:
        """The figures as one part; nothing where none was drawn."""
        figures = self.figures(*names)
        return [Gallery(figures)] if figures else []


def read_analysis(run: Path) -> Analysis:
    """Open what `some analyze` left in a run's folder."""
    folder, collected = run / "analysis", run / "analysis" / "collected.safetensors"
    record, guilds = _read_json(folder / "analysis.json"), _read_json(folder / "guilds.json")
    if guilds is not None and collected.is_file():  # `some analyze --no-guilds` leaves those of an earlier analysis
        stale = (folder / "guilds.json").stat().st_mtime < collected.stat().st_mtime
        guilds |= {"stale": STALE} if stale else {}
    try:
        collection = Collection.load(collected)
    except (ConfigError, SafetensorError, OSError, KeyError, TypeError):  # a damaged file counts as none
        collection = None
    return Analysis(folder=folder, record=record or {}, guilds=guilds, collection=collection)


def _read_json(path: Path) -> Record | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def make_inside(run: RunRecord, analysis: Analysis) -> list[Section]:
    """The sections, for the kind of model that the run has; dense models have none of them."""
    if run.config.model.ffn != "some":
        return []
    maps = analysis.gallery(*MAP_FIGURES) or [Notice("The keys were not mapped; `some analyze RUN` does it.")]
    keys = [Section("Key stores", maps), Section("Key movement", _show_movement(run, analysis))]
    return [
        Section("Utilisation analysis", _show_utilisation(run, analysis)),
        *(keys if run.has_keys else ()),
        Section("A trace", _show_trace(run, analysis)),
        make_guild_section(analysis.guilds),
    ]


def list_missing(run: RunRecord, analysis: Analysis) -> list[str]:
    """What the run and its analysis lack: one sentence each."""
    if not analysis.record:
        cure = "No analysis: `some analyze RUN` replays the model, and `some report RUN` then shows what it found."
        return [*run.missing, cure]
    sentences = dict.fromkeys([*run.missing, *map(str, analysis.record.get("missing") or [])])
    if run.config.model.ffn == "some" and analysis.guilds is None:
        return [*sentences, "No guilds: the analysis did not look for them."]
    return list(sentences)


# --- utilisation --------------------------------------------------------------------------------------------


def _name_generalists(layer: Record) -> str:
    if "generalists" not in layer:
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
    Column("under-used", lambda layer: str(len(layer["under_used"])) if "under_used" in layer else ABSENT, True),
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
    drift = {one["layer"]: sum(one["drift"]) / len(one["drift"]) for one in record["movement"]}
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
        judged = f"guilds: {len(supported)} of {of} candidates supported at level {record['guilds']['level']:g}: "
        blocks.append(Text(judged + ("; ".join(supported) or "none")))
    return title, [*blocks, *map(Notice, record["missing"])]


def _show_utilisation(run: RunRecord, analysis: Analysis) -> list[Block]:
    """A row a layer, then the figures. Without analysis, the rows of the run's own last evaluation."""
    if analysis.record.get("layers"):
        table, collected = make_layer_table(analysis.record), analysis.record.get("collected") or {}
        where = f"{collected.get('num_tokens', 0):,} real tokens of the {collected.get('split')} split"
    else:
        last = run.result or (run.evaluations[-1] if run.evaluations else {})
        table, where = Table.of(LAYER_COLUMNS, last.get("layers") or []), "the run's last evaluation"
    if not table.rows:
        return [Notice("No layer has been measured yet.")]
    text = f"How the experts share the work, over {where}. Gini 0 is even use. "
    text += f"The published reports print the middle layer, here {table.rows[len(table.rows) // 2][0]}."
    return [Text(text), table, *analysis.gallery(*USAGE_FIGURES)]


# --- movement and a trace -----------------------------------------------------------------------------------


def _show_movement(run: RunRecord, analysis: Analysis) -> list[Block]:
    if run.config.model.router == "gravity" and not run.config.gravity.moves_keys:
        return [Text("The keys of this run never move: every rule of gravity that moves them is off.")]
    blocks: list[Block] = []
    page = analysis.folder / "movement.html"
    if page.is_file() and page.stat().st_size <= LARGEST_FRAME:
        blocks.append(Frame(page, "The keys in movement"))
    elif page.is_file():
        blocks.append(Text("The animation is too large for this page; it lies in `analysis/movement.html`."))
    blocks += analysis.gallery(*MOVEMENT_FIGURES)
    return blocks or [Notice("Movement was not drawn; it needs two key snapshots and `some analyze RUN`.")]


def _show_trace(run: RunRecord, analysis: Analysis) -> list[Block]:
    tokenizer = run.path / "tokenizer.json"
    if analysis.collection is None or not tokenizer.is_file():
        cure = "`some analyze RUN` does it, and `some trace RUN TEXT` traces any text."
        return [Notice(f"No text has been replayed; {cure}")]
    found = trace_collected(analysis.collection, Tokenizer.load(tokenizer))
    split = analysis.collection.meta["split"]
    text = f"The beginning of the first story of the {split} split, as the model read it at step {found.step:,}. "
    return [Text(text + "`some trace RUN TEXT` makes such a page of any text."), TraceView(found)]

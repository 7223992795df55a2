"""The sections that analysis gives: utilisation, key stores, key movement, a trace, guilds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from some_moe.config import ConfigError
from some_moe.data.tokenizer import Tokenizer
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.runs import RunRecord
from some_moe.glass.inspect.traces import trace_collected
from some_moe.glass.page.blocks import Block, Figure, Frame, Gallery, Notice, Section, Text, TraceView
from some_moe.glass.page.guild_sections import make_guild_section
from some_moe.glass.page.tables import Show, figure, make_table

LARGEST_FRAME = 2_000_000  # bytes; a larger animation stays a page of its own
USAGE_FIGURES = ("usage_histogram", "usage_ranked", "usage_by_depth", "usage_over_steps", "co_selection",
                 "queries_by_depth")  # fmt: skip
MAP_FIGURES = ("keys_umap", "keys_tsne", "keys_pca")
MOVEMENT_FIGURES = ("key_paths", "key_drift")


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What lies in RUN/analysis. Everything may be absent."""

    folder: Path
    record: dict[str, Any]  # analysis.json; empty without it
    guilds: dict[str, Any] | None
    collection: Collection | None

    def figure(self, name: str) -> Figure | None:
        """A drawn figure with its words; None where it was not drawn."""
        for listed in self.record.get("figures") or []:
            file = self.folder / str(listed.get("png"))
            if listed.get("name") == name and file.is_file():
                return Figure(file, str(listed["title"]), str(listed["caption"]))
        return None

    def gallery(self, names: tuple[str, ...]) -> list[Block]:
        """Those of the figures that were drawn, as one part; nothing where none was."""
        figures = [figure for figure in map(self.figure, names) if figure is not None]
        return [Gallery(figures)] if figures else []


def read_analysis(run: Path) -> Analysis:
    """Open what `some analyze` left in a run's folder."""
    folder = run / "analysis"
    try:
        collection = Collection.load(folder / "collected.safetensors")
    except (ConfigError, SafetensorError, OSError, KeyError, TypeError):  # a damaged file counts as none
        collection = None
    return Analysis(
        folder=folder,
        record=_read_json(folder / "analysis.json") or {},
        guilds=_read_guilds(folder),
        collection=collection,
    )


def _read_guilds(folder: Path) -> dict[str, Any] | None:
    """The guilds, with a note where they belong to an earlier analysis (`some analyze --no-guilds` leaves them)."""
    found = _read_json(folder / "guilds.json")
    collected = folder / "collected.safetensors"
    if found is None or not collected.is_file():
        return found
    if (folder / "guilds.json").stat().st_mtime < collected.stat().st_mtime:
        return found | {
            "stale": "These guilds are of an earlier analysis than the figures above; `some analyze RUN` renews them."
        }
    return found


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def make_inside(run: RunRecord, analysis: Analysis) -> list[Section]:
    """The sections, for the kind of model that the run has; dense models have none of them."""
    if run.config.model.ffn != "some":
        return []
    sections = [Section("Utilisation analysis", _utilisation(run, analysis))]
    if run.has_keys:
        sections.append(Section("Key stores", _key_stores(analysis)))
        sections.append(Section("Key movement", _movement(run, analysis)))
    sections.append(Section("A trace", _trace(run, analysis)))
    sections.append(make_guild_section(analysis.guilds))
    return sections


def list_missing(run: RunRecord, analysis: Analysis) -> list[str]:
    """What the analysis lacks: one sentence each. What the run itself lacks is told by the run."""
    if not analysis.record:
        return ["No analysis: `some analyze RUN` replays the model, and `some report RUN` then shows what it found."]
    sentences = [str(text) for text in analysis.record.get("missing") or [] if text not in run.missing]
    if run.config.model.ffn == "some" and analysis.guilds is None:
        sentences.append("No guilds: the analysis did not look for them.")
    return sentences


def _or_notice(blocks: list[Block], text: str) -> list[Block]:
    return blocks or [Notice(text)]


# --- utilisation --------------------------------------------------------------------------------------------

LAYER_COLUMNS: dict[str, Show] = {
    "Gini": figure("gini", 3),
    "Gini by hash": figure("hash_gini", 3),
    "Entropy, bits": lambda layer: f"{layer['entropy_bits']:.3f} of {layer['max_entropy_bits']:.3f}",
    "Experts used": lambda layer: f"{layer['experts_used']} of {layer['num_experts']}",
    "Busiest, fair shares": figure("max_load", 1),
    "Gate entropy, nats": figure("gate_entropy_nats", 3),
    "Respawns": figure("respawns", 0),
    "Query rank": figure("query_effective_rank", 1),
    "Query collinearity": figure("query_collinearity", 2),
}


def _utilisation(run: RunRecord, analysis: Analysis) -> list[Block]:
    """A row a layer, then the histograms. Without analysis, the rows of the run's own last evaluation."""
    layers: list[dict[str, Any]] = analysis.record.get("layers") or []
    collected = analysis.record.get("collected") or {}
    where = f"{collected.get('num_tokens', 0):,} real tokens of the {collected.get('split')} split"
    if not layers:
        last = run.result or (run.evaluations[-1] if run.evaluations else {})
        layers, where = last.get("layers") or [], "the run's last evaluation"
    if not layers:
        return [Notice("No layer has been measured yet.")]
    middle = layers[len(layers) // 2]
    names: dict[str, Show] = {"Layer": lambda layer: f"{layer['layer']}{' (middle)' if layer is middle else ''}"}
    table = make_table(layers, names | LAYER_COLUMNS, words=("Layer",), drop_empty=True)
    text = f"How the experts share the work, over {where}. Gini 0 is even use. "
    text += "The published reports print the middle layer."
    if any("hash_gini" in layer for layer in layers):
        text += " Frequent words alone make use uneven: “Gini by hash” is what a hash of the token would give."
    return [Text(text), table, *analysis.gallery(USAGE_FIGURES)]


# --- keys ---------------------------------------------------------------------------------------------------


def _key_stores(analysis: Analysis) -> list[Block]:
    return _or_notice(analysis.gallery(MAP_FIGURES), "The keys were not mapped; `some analyze RUN` does it.")


def _movement(run: RunRecord, analysis: Analysis) -> list[Block]:
    if run.config.model.router == "gravity" and not run.config.gravity.moves_keys:
        return [Text("The keys of this run never move: every rule of gravity that moves them is off.")]
    blocks: list[Block] = []
    page = analysis.folder / "movement.html"
    if page.is_file() and page.stat().st_size <= LARGEST_FRAME:
        blocks.append(Frame(page, "The keys in movement"))
    elif page.is_file():
        blocks.append(Text("The animation is too large for this page; it lies in `analysis/movement.html`."))
    blocks += analysis.gallery(MOVEMENT_FIGURES)
    return _or_notice(blocks, "Movement was not drawn; it needs two key snapshots and `some analyze RUN`.")


# --- trace --------------------------------------------------------------------------------------------------


def _trace(run: RunRecord, analysis: Analysis) -> list[Block]:
    tokenizer = run.path / "tokenizer.json"
    if analysis.collection is None or not tokenizer.is_file():
        return [
            Notice("No text has been replayed; `some analyze RUN` does it, and `some trace RUN TEXT` traces any text.")
        ]
    found = trace_collected(analysis.collection, Tokenizer.load(tokenizer))
    split = analysis.collection.meta["split"]
    text = f"The beginning of the first story of the {split} split, as the model read it at step {found.step:,}. "
    return [Text(text + "`some trace RUN TEXT` makes such a page of any text."), TraceView(found)]

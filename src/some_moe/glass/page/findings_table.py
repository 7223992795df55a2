"""What `some analyze` prints: a table of the layers, where everything lies, and what is missing."""

from collections.abc import Sequence
from pathlib import Path

from some_moe.glass.page.blocks import Block, Figure, Fold, Gallery, Notice, Table, Text
from some_moe.glass.page.tables import Record, Show, figure, make_table, word
from some_moe.layout import Style, format_table, wrap

MOST_NAMED = 4  # generalists named in a cell


def format_findings(record: Record, paths: Sequence[Path], *, width: int | None, style: Style) -> str:
    """The short form of analysis.json. paths: what was written."""
    collected, lines = record["collected"], []
    lines.append(style.bold(describe_pass(record)))
    if collected is not None:
        lines.append(f"loss {collected['loss']:.4f} nats per token")
    if record["layers"]:
        table = make_layer_table(record)
        lines += ["", *format_table(table.columns, table.rows, width=width, style=style, indent="  "), ""]
        for word, meaning in (
            ("generalists", record["rules"]["generalists"]),
            ("under-used", record["rules"]["under_used"]),
            ("by hash", record["rules"]["hash_gini"]),
            ("collinear", "length of the mean unit query: 1 is all queries alike"),
            ("rank", "directions that the queries really use"),
            ("drift", "mean distance of the keys from where they began"),
        ):
            lines += wrap(f"{word}: {meaning}", width=width or 120, indent="  ")
    if "guilds" in record:
        lines += ["", *wrap(describe_guilds(record["guilds"]), width=width or 120)]
    for sentence in record["missing"]:
        lines += ["", *wrap(sentence, width=width or 120)]
    lines += ["", *(f"{path}" for path in paths)]
    return "\n".join(lines) + "\n"


def describe_pass(record: Record) -> str:
    """Which run it is, and what of it was replayed."""
    title, collected = f"{record['run']}: {record['status']}", record["collected"]
    if collected is not None:
        title += f"; step {collected['step']:,} replayed on {collected['num_tokens']:,} tokens of {collected['split']}"
    return title


def make_layer_table(record: Record) -> Table:
    """A row a layer."""
    drift = {one["layer"]: sum(one["drift"]) / len(one["drift"]) for one in record["movement"]}
    layers = [layer | {"drift": drift.get(layer["layer"])} for layer in record["layers"]]
    return make_table(layers, COLUMNS, words=("generalists",))


def _name_generalists(layer: Record) -> str:
    named = ", ".join(map(str, layer["generalists"][:MOST_NAMED]))
    more = len(layer["generalists"]) - MOST_NAMED
    return (f"{named} and {more} more" if more > 0 else named) or "none"


COLUMNS: dict[str, Show] = {
    "layer": word("layer"),
    "gini": figure("gini", 3),
    "by hash": figure("hash_gini", 3),
    "entropy bits": lambda layer: f"{layer['entropy_bits']:.2f} of {layer['max_entropy_bits']:.2f}",
    "used": lambda layer: f"{layer['experts_used']} of {layer['num_experts']}",
    "generalists": _name_generalists,
    "under-used": lambda layer: str(len(layer["under_used"])),
    "gate entropy": lambda layer: f"{layer['gate_entropy_nats']:.2f} of {layer['max_gate_entropy_nats']:.2f}",
    "collinear": figure("query_collinearity", 2),
    "rank": figure("query_effective_rank", 1),
    "drift": figure("drift", 2),
}


def make_blocks(record: Record, folder: Path) -> list[Block]:
    """The same for a notebook, with the figures that lie in `folder`."""
    blocks: list[Block] = [make_layer_table(record)] if record["layers"] else []
    if "guilds" in record:
        blocks.append(Text(describe_guilds(record["guilds"])))
    blocks += [Notice(sentence) for sentence in record["missing"]]
    figures = [Figure(folder / one["png"], one["title"], one["caption"]) for one in record["figures"]]
    return [*blocks, Fold(f"{len(figures)} figures", [Gallery(figures)])] if figures else blocks


def describe_guilds(guilds: Record) -> str:
    named = "; ".join(guilds["supported"]) or "none"
    of = f"{len(guilds['supported'])} of {guilds['candidates']}"
    return f"guilds: {of} candidates supported at level {guilds['level']:g}: {named}"

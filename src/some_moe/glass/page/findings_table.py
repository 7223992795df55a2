"""What `some analyze` prints: a table of the layers, where everything lies, and what is missing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from some_moe.glass.page.blocks import Table
from some_moe.layout import Column, Style, format_table, wrap

COLUMNS = (
    Column("layer", numeric=True),
    Column("gini", numeric=True),
    Column("by hash", numeric=True),
    Column("entropy bits", numeric=True),
    Column("used", numeric=True),
    Column("generalists"),
    Column("under-used", numeric=True),
    Column("gate entropy", numeric=True),
    Column("collinear", numeric=True),
    Column("rank", numeric=True),
    Column("drift", numeric=True),
)
MOST_NAMED = 4  # generalists named in a cell


def format_findings(record: dict[str, Any], paths: Sequence[Path], *, width: int | None, style: Style) -> str:
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


def describe_pass(record: dict[str, Any]) -> str:
    """Which run it is, and what of it was replayed."""
    title, collected = f"{record['run']}: {record['status']}", record["collected"]
    if collected is not None:
        title += f"; step {collected['step']:,} replayed on {collected['num_tokens']:,} tokens of {collected['split']}"
    return title


def make_layer_table(record: dict[str, Any]) -> Table:
    """A row a layer."""
    drift = {one["layer"]: sum(one["drift"]) / len(one["drift"]) for one in record["movement"]}
    return Table(COLUMNS, [_format_layer(layer, drift.get(layer["layer"])) for layer in record["layers"]])


def describe_guilds(guilds: dict[str, Any]) -> str:
    named = "; ".join(guilds["supported"]) or "none"
    of = f"{len(guilds['supported'])} of {guilds['candidates']}"
    return f"guilds: {of} candidates supported at level {guilds['level']:g}: {named}"


def _format_layer(layer: dict[str, Any], drift: float | None) -> list[str]:
    named = ", ".join(map(str, layer["generalists"][:MOST_NAMED]))
    more = len(layer["generalists"]) - MOST_NAMED
    return [
        str(layer["layer"]),
        _number(layer["gini"], 3),
        _number(layer["hash_gini"], 3),
        f"{layer['entropy_bits']:.2f} of {layer['max_entropy_bits']:.2f}",
        f"{layer['experts_used']} of {layer['num_experts']}",
        (f"{named} and {more} more" if more > 0 else named) or "none",
        str(len(layer["under_used"])),
        f"{layer['gate_entropy_nats']:.2f} of {layer['max_gate_entropy_nats']:.2f}",
        _number(layer["query_collinearity"], 2),
        _number(layer["query_effective_rank"], 1),
        _number(drift, 2),
    ]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"

"""Parts of a page in a terminal, a trace with its experts in their colours; and the colours themselves."""

import colorsys
from collections.abc import Sequence

from some_moe.glass.inspect.traces import Trace
from some_moe.glass.page.blocks import Block, Table, Text, TraceView
from some_moe.layout import GAP, Column, Style, format_number, format_table, split_table, wrap
from some_moe.system.reading import clean

GOLDEN_ANGLE = 137.508  # consecutive experts get hues that lie far apart, however many there are
LONGEST_TOKEN = 16
WIDTH = 120  # of sentences, where no terminal says how wide it is


def expert_hue(expert: int) -> int:
    """The hue of an expert's colour, in degrees: the same in every trace, on every page."""
    return round(expert * GOLDEN_ANGLE) % 360


def terminal_color(expert: int) -> int:
    """The nearest colour that a terminal of 256 colours has; readable on black and on white."""
    red, green, blue = colorsys.hls_to_rgb(expert_hue(expert) / 360, 0.5, 0.75)
    return 16 + 36 * round(5 * red) + 6 * round(5 * green) + round(5 * blue)


def show_token(text: str) -> str:
    """A token on one line: leading space as ·, line breaks as ⏎, control characters as ?."""
    text = text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= LONGEST_TOKEN else text[: LONGEST_TOKEN - 1] + "…"


def format_blocks(blocks: Sequence[Block], *, width: int | None, style: Style) -> list[str]:
    """The lines of sentences, tables and traces, no wider than `width`; what is no text is left out."""
    lines: list[str] = []
    for block in blocks:
        match block:
            case Text(text):
                lines += ["", *wrap(clean(text.replace("`", "")), width=width or WIDTH)]
            case Table(_, _, caption):
                printable = [[str(clean(cell)) for cell in row] for row in block.rows]
                for columns, rows in split_table(block.columns, printable, width and width - len(GAP)):
                    lines += ["", *format_table(columns, rows, width=width, style=style, indent=GAP)]
                lines += ["", *wrap(clean(caption), width=width or WIDTH)] if caption else []
            case TraceView(trace):
                lines += format_trace(trace, width=width, style=style)
    return lines


def make_trace_table(trace: Trace, most: int) -> Table:
    """The first tokens, at most so many: how well the next one was foreseen, and the experts of each layer."""
    columns = [Column("token"), Column("next foreseen", numeric=True)]
    columns += [Column(f"layer {layer}: expert and gate weight") for layer in trace.layers]
    rows = []
    for token in trace.tokens[:most]:
        cells = [
            ", ".join(f"{expert} ({gate:.2f})" for expert, gate in zip(experts, gates, strict=True))
            for experts, gates in zip(token.experts, token.gates, strict=True)
        ]
        rows.append([show_token(token.text), format_number(token.next_probability, ".0%"), *cells])
    return Table(columns, rows, f"The first {len(rows)} of {len(trace.tokens)} tokens.")


def format_trace(trace: Trace, *, width: int | None, style: Style) -> list[str]:
    """The whole trace, no wider than `width`: layers that do not fit side by side follow in further tables."""
    legend = "next: what the model gave to the token that follows; then the experts and gate weights"
    lines = list(map(style.dim, wrap(legend, width=width or WIDTH)))
    names = [show_token(token.text) for token in trace.tokens]
    name_width = max(map(len, [*names, "token"]))
    digits = len(str(trace.num_experts - 1))
    cell_width = trace.top_k * (digits + 5) + len(GAP) * (trace.top_k - 1)
    room = max(1, (width - name_width - 8) // (cell_width + 3)) if width else len(trace.layers)
    for start in range(0, len(trace.layers), room):
        headers = [f"layer {layer}".ljust(cell_width) for layer in trace.layers[start : start + room]]
        lines += ["", style.dim((GAP + " ").join(["token".ljust(name_width), " next", *headers]).rstrip())]
        for name, token in zip(names, trace.tokens, strict=True):
            choices = zip(token.experts[start : start + room], token.gates[start : start + room], strict=True)
            cells = [
                GAP.join(
                    style.paint(f"{expert:{digits}d}", terminal_color(expert)) + style.dim(f" {gate:.2f}")
                    for expert, gate in zip(experts, gates, strict=True)
                )
                for experts, gates in choices
            ]
            share = format_number(token.next_probability, ".0%").rjust(5)
            lines.append((GAP + " ").join([name.ljust(name_width), share, *cells]))
    return lines

"""A trace in the terminal: one line a token, its experts in their colours; and the colours themselves."""

import colorsys

from some_moe.glass.inspect.traces import Trace, TracedToken
from some_moe.glass.page.blocks import Table
from some_moe.layout import GAP, Column, Style

GOLDEN_ANGLE = 137.508  # consecutive experts get hues that lie far apart, however many there are
LONGEST_TOKEN = 16


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


def describe_trace(trace: Trace) -> str:
    return f"{trace.run}, step {trace.step:,}: {len(trace.tokens)} tokens"


def make_trace_table(trace: Trace, most: int) -> Table:
    """The first tokens, at most so many: how well the next one was foreseen, and the experts of each layer."""
    columns = [Column("token"), Column("next foreseen", numeric=True)]
    columns += [Column(f"layer {layer}: expert and gate weight") for layer in trace.layers]
    rows = []
    for token in trace.tokens[:most]:
        foreseen = "–" if token.next_probability is None else f"{token.next_probability:.0%}"
        cells = [
            ", ".join(f"{expert} ({gate:.2f})" for expert, gate in zip(experts, gates, strict=True))
            for experts, gates in zip(token.experts, token.gates, strict=True)
        ]
        rows.append([show_token(token.text), foreseen, *cells])
    return Table(columns, rows, f"The first {len(rows)} of {len(trace.tokens)} tokens.")


def format_trace(trace: Trace, *, width: int | None, style: Style) -> str:
    """The whole trace, no wider than `width`: layers that do not fit side by side follow in further tables."""
    loss = "" if trace.loss is None else f", loss {trace.loss:.4f} nats per token"
    lines = [style.bold(describe_trace(trace)) + loss]
    lines.append(style.dim("next: what the model gave to the token that follows; then the experts and gate weights"))
    names = [show_token(token.text) for token in trace.tokens]
    name_width = max(map(len, [*names, "token"]))
    number_width = len(str(trace.num_experts - 1))
    cell_width = trace.top_k * (number_width + 5) + len(GAP) * (trace.top_k - 1)
    room = max(1, (width - name_width - 8) // (cell_width + 3)) if width else len(trace.layers)
    for start in range(0, len(trace.layers), room):
        places = range(start, min(start + room, len(trace.layers)))
        headers = [f"layer {trace.layers[place]}".ljust(cell_width) for place in places]
        lines += ["", style.dim((GAP + " ").join(["token".ljust(name_width), " next", *headers]).rstrip())]
        for name, token in zip(names, trace.tokens, strict=True):
            cells = [_format_choice(token, place, number_width, style) for place in places]
            lines.append((GAP + " ").join([name.ljust(name_width), _format_share(token), *cells]))
    return "\n".join(lines) + "\n"


def _format_share(token: TracedToken) -> str:
    return "    –" if token.next_probability is None else f"{token.next_probability:5.0%}"


def _format_choice(token: TracedToken, place: int, number_width: int, style: Style) -> str:
    """The experts of one token in one layer, as "12 0.71   3 0.29"."""
    return GAP.join(
        style.paint(f"{expert:{number_width}d}", terminal_color(expert)) + style.dim(f" {gate:.2f}")
        for expert, gate in zip(token.experts[place], token.gates[place], strict=True)
    )

"""A run's traces, keys and usage as objects that show themselves: as text, and in a notebook without a script.

Shapes: L SoME layers, E experts, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from some_moe.config import ConfigError
from some_moe.glass.inspect.projections import map_layer, unit_rows
from some_moe.glass.inspect.traces import Trace, choose_layers
from some_moe.glass.page.terminal import expert_hue
from some_moe.layout import Column, Style, format_table, make_table, number_column, number_columns
from some_moe.system.reading import clean

if TYPE_CHECKING:  # torch is needed to run a model, and not to show what one did
    from some_moe.training.runs import Run

MAP_WIDTH, BAR_WIDTH, BAR_HEIGHT = 420, 480, 48
MOST_WORDS = 2_000  # of a trace, in a notebook


@dataclass(frozen=True)
class Framed:
    """A whole page, in a frame of its own that can reach nothing outside itself."""

    page: str
    height: int = 640

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{self.height}px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.page)}"></iframe>'


def draw_trace(trace: Trace, layer: int | None = None) -> str:
    """A text with every token in the colour of its strongest expert in one layer (default: the middle one)."""
    if layer is None:
        layer = trace.layers[len(trace.layers) // 2]
    if layer not in trace.layers:
        raise ConfigError(f"layer {layer} was not traced; those that were are {', '.join(map(str, trace.layers))}")
    place, words = trace.layers.index(layer), []
    for token in trace.tokens[:MOST_WORDS]:
        experts = zip(trace.layers, token.experts, strict=True)
        told = [f"layer {number}: {', '.join(map(str, chosen))}" for number, chosen in experts]
        told += [] if token.next_nats is None else [f"next: {token.next_nats:.2f} nats"]
        colour = f"hsl({expert_hue(token.experts[place][0])} 70% 82%)"
        style = f"background:{colour};color:#111;border-radius:3px;padding:0 1px;white-space:pre-wrap"
        shown = escape(str(clean(token.text))).replace("\n", "⏎\n")
        words.append(f'<span title="{escape("; ".join(told))}" style="{style}">{shown}</span>')
    loss = "" if trace.loss is None else f", {trace.loss:.3f} nats a token"
    more = "" if len(trace.tokens) <= MOST_WORDS else f" … and {len(trace.tokens) - MOST_WORDS:,} tokens"
    title = f"{escape(str(clean(trace.run)))}, step {trace.step:,}, colours of layer {layer}{loss}"
    return f'<div style="font:14px/1.9 monospace"><b>{title}</b><br>{"".join(words)}{more}</div>'


# --- keys -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerKeys:
    """The key store of one layer, as a checkpoint holds it."""

    run: str
    step: int
    layer: int
    keys: np.ndarray  # (E, D) float32
    usage: np.ndarray  # (E,) running share of the load times E: 1 is a fair share
    total: np.ndarray  # (E,) selections ever counted
    respawns: np.ndarray  # (E,)
    bias: np.ndarray  # (E,) selection bias

    def nearest(self, expert: int, count: int = 5) -> list[tuple[int, float]]:
        """The experts whose keys point most like this one's, with the cosine."""
        if not 0 <= expert < len(self.keys):
            raise ConfigError(f"expert {expert} is not in this layer; its experts are 0 to {len(self.keys) - 1}")
        unit = unit_rows(self.keys)
        cosine = unit @ unit[expert]
        order = [int(other) for other in np.argsort(-cosine, kind="stable") if other != expert]
        return [(other, float(cosine[other])) for other in order[:count]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}

    def __repr__(self) -> str:
        count, width = self.keys.shape
        busiest = np.argsort(-self.usage, kind="stable")[:5]
        busy = ", ".join(f"{expert} ({self.usage[expert]:.2f})" for expert in busiest)
        respawned = int(self.respawns.sum())
        return (
            f"{self.run}, step {self.step:,}, layer {self.layer}: {count} keys of width {width}, {respawned} respawns\n"
            f"busiest, in fair shares: {busy}"
        )

    def _repr_html_(self) -> str:
        """The keys on a plane by their principal axes; a point's size is its use, its colour the expert's."""
        points = map_layer(self.keys, "pca").points
        low, span = points.min(0), max(float(np.ptp(points, axis=0).max()), 1e-9)
        places = 16 + (points - low) / span * (MAP_WIDTH - 32)
        height = round(float(places[:, 1].max())) + 16
        circles = []
        for expert, (x, y) in enumerate(places.tolist()):
            use, total = float(self.usage[expert]), int(self.total[expert])
            title = f"<title>expert {expert}: {use:.2f} fair shares, {total:,} selections</title>"
            place = f'cx="{x:.1f}" cy="{y:.1f}" r="{3 + 3 * min(use, 9) ** 0.5:.1f}"'
            colour = f'fill="hsl({expert_hue(expert)} 70% 50%)" fill-opacity="0.7"'
            circles.append(f"<circle {place} {colour}>{title}</circle>")
        svg = f'<svg width="{MAP_WIDTH}" height="{height}" role="img">{"".join(circles)}</svg>'
        return f"<pre>{escape(str(clean(repr(self))))}</pre>{svg}"


def read_keys(run: "Run", layer: int) -> LayerKeys:
    """The key store of a run's SoME layer; a layer without one is refused."""
    choose_layers(run, [layer])
    state = run.model.layers[layer].state
    if state is None:
        raise ConfigError(f"{str(run.path)!r} chooses experts by a hash, without keys; see run.usage()")
    names = ("keys", "usage", "total", "respawns", "bias")
    stores = {name: getattr(state, name).detach().cpu().numpy().copy() for name in names}
    return LayerKeys(run=run.config.name, step=run.step, layer=layer, **stores)


# --- usage ----------------------------------------------------------------------------------------------------

COLUMNS = (
    Column("layer", lambda one: str(one["layer"]), numeric=True),
    number_column("gini", "gini", ".3f"),
    *number_columns(entropy_bits=".2f", experts_used=",d", num_experts=",d"),
    number_column("busiest, in fair shares", "max_load", ".2f"),
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Usage:
    """How the experts of each layer shared the work on some text."""

    run: str
    step: int
    text: str  # what was read, in a few words
    num_tokens: int
    counts: np.ndarray  # (L, E) int64 selections
    layers: Sequence[dict[str, Any]]  # gini, entropy_bits, experts_used, … of each

    @property
    def title(self) -> str:
        return f"{self.run}, step {self.step:,}: usage on {self.num_tokens:,} tokens of {self.text}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return vars(self) | {"counts": self.counts.tolist(), "layers": list(self.layers)}

    def __repr__(self) -> str:
        table = make_table(COLUMNS, self.layers)
        return "\n".join([self.title, *format_table(table.columns, table.rows, width=None, style=Style())])

    def _repr_html_(self) -> str:
        """The figures of each layer beside its load: a bar an expert, the busiest first; the line is a fair share."""
        table = make_table(COLUMNS, self.layers)
        heads = "".join(f"<th>{escape(column.header)}</th>" for column in table.columns)
        rows = [
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + f"<td>{draw_bars(counts)}</td></tr>"
            for cells, counts in zip(table.rows, self.counts, strict=True)
        ]
        return f"<p>{escape(str(clean(self.title)))}</p><table><tr>{heads}<th>load</th></tr>{''.join(rows)}</table>"


def draw_bars(counts: np.ndarray) -> str:
    """Selections (E,) as bars in the experts' colours, the busiest first, and a line at the fair share."""
    order = np.argsort(-counts, kind="stable").tolist()
    width, top = BAR_WIDTH / len(counts), max(1, int(counts.max()))
    bars = []
    for place, expert in enumerate(order):
        tall = BAR_HEIGHT * int(counts[expert]) / top
        box = f'x="{place * width:.2f}" y="{BAR_HEIGHT - tall:.1f}" width="{0.85 * width:.2f}" height="{tall:.1f}"'
        title = f"<title>expert {expert}: {int(counts[expert]):,}</title>"
        bars.append(f'<rect {box} fill="hsl({expert_hue(expert)} 70% 50%)">{title}</rect>')
    fair = BAR_HEIGHT * (1 - float(counts.mean()) / top)
    line = f'<line x1="0" x2="{BAR_WIDTH}" y1="{fair:.1f}" y2="{fair:.1f}" stroke="#777" stroke-dasharray="3"/>'
    return f'<svg width="{BAR_WIDTH}" height="{BAR_HEIGHT}" role="img">{"".join(bars)}{line}</svg>'


def measure_usage(run: "Run", text: str | None, *, split: str, max_tokens: int) -> Usage:
    """Let a run read a text, or the beginning of one of its splits, and count who is chosen. Keys stay still."""
    import torch

    from some_moe.data.batches import encode_rows
    from some_moe.data.sources import SPLITS
    from some_moe.glass.inspect.collect import collect
    from some_moe.metrics.usage import summarize_usage

    choose_layers(run, None)
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} is not known; use one of {', '.join(SPLITS)}")
    if text is not None and not text.strip():
        raise ConfigError(f"the text {text!r} is empty; give at least one word")
    if text is None:
        rows = getattr(run.read_data(), split)
    else:
        rows = encode_rows([text], run.tokenizer, run.config.data.seq_len, split=True)
    seen = collect(run, rows, split=split, max_tokens=max_tokens, device=run.model.head.weight.device)
    num_experts = run.model.model.num_experts
    counts = np.stack([np.bincount(layer.reshape(-1), minlength=num_experts) for layer in seen.experts])
    layers = [{"layer": number} | summarize_usage(torch.from_numpy(one)) for number, one in enumerate(counts)]
    return Usage(
        run=run.config.name,
        step=run.step,
        text=f"the {split} split" if text is None else "a text",
        num_tokens=int(seen.meta["num_tokens"]),
        counts=counts,
        layers=layers,
    )

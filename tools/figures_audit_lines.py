"""Figures of the audit with names at the ends of their lines: a model in rows of several lengths, and A6's collapse."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from some_moe.glass.figures.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, SOFT, make_panels, spectrum, styled
from some_moe.lab.published import Spread
from some_moe.lab.registry import EXPERIMENTS, find_experiment
from tools.audit_evidence import Evidence
from tools.audit_tables import find_constant
from tools.end_labels import label_ends
from tools.published_figures import PublishedFigure, settle

DASHES, SHORT_DASHES, DOTS = (0, (4, 2.5)), (0, (3.5, 1.2)), (0, (1, 2))
THICK: Mapping[str, Any] = {"linewidth": 2.6, "zorder": 4}


# --- lines with their names -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Means over seeds, with a band from the lowest seed to the highest; `name` stands at its end, unless it is ""."""

    name: str
    points: Sequence[tuple[float, Spread]]
    colour: str
    look: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.points[-1][1].mean


def trace(name: str, points: Sequence[tuple[float, Spread | None]], colour: str, **look: Any) -> list[Line]:
    """A line through what was measured; none where nothing was."""
    known = [(float(x), spread) for x, spread in points if spread is not None]
    return [Line(name, known, colour, look)] if known else []


def _measure(lines: Sequence[Line]) -> tuple[list[float], float]:
    """Return every x there is, rising, and how far they reach (1 where there is but one)."""
    xs = sorted({x for line in lines for x, _ in line.points})
    return xs, xs[-1] - xs[0] or 1.0


def _draw_lines(axes: Axes, lines: Sequence[Line], *, room: float) -> None:
    """Draw the lines, and leave room for names on their right: this many times their extent."""
    for line in lines:
        xs, spreads = zip(*line.points, strict=True)
        axes.plot(xs, [spread.mean for spread in spreads], color=line.colour, **line.look)
        if any(len(spread.values) > 1 for spread in spreads):
            lows, highs = ([find(spread.values) for spread in spreads] for find in (min, max))
            axes.fill_between(xs, lows, highs, color=line.colour, alpha=0.2, linewidth=0)
    ticks, extent = _measure(lines)
    axes.set_xticks(ticks)
    axes.set_xlim(ticks[0] - 0.05 * extent, ticks[-1] + room * extent)
    axes.spines["bottom"].set_bounds(ticks[0] - 0.05 * extent, ticks[-1])  # the axis ends where the names begin


def _finish(title: str, caption: str, figure: Figure, panels: Mapping[Axes, Sequence[Line]]) -> PublishedFigure:
    """Fix the layout, then write the names into it."""
    settle(figure)
    content = []
    for axes, lines in panels.items():
        xs, extent = _measure(lines)
        ends = [(line.name, line.points[-1][0], line.end, line.colour) for line in lines if line.name]
        label_ends(axes, ends, xs[-1] + 0.09 * extent)
        shown = [[line.name, [[x, spread.values] for x, spread in line.points]] for line in lines]
        content.append([axes.get_title(loc="left"), shown])
    return PublishedFigure(title=title, caption=caption, figure=figure, content=content)


# --- one model in rows of several lengths ---------------------------------------------------------------------

LENGTH_LINES: Sequence[tuple[str, str, str, Mapping[str, Any]]] = (
    ("honest loss", "loss", GREEN, {"marker": "s", "markersize": 4.5}),
    ("padded loss", "loss_padded", PURPLE, {"marker": "o", "markersize": 5}),
    ("constant predictor, padded", "constant_loss_padded", SOFT, {"linestyle": DOTS}),
)


@styled
def draw_lengths(evidence: Evidence) -> PublishedFigure | None:
    """Losses of trained models against the length of the rows, one panel a model and split."""
    groups = [list(group) for _, group in groupby(evidence.lengths, key=lambda length: (length.run, length.split))]
    models = [sorted(group, key=lambda length: length.seq_len) for group in groups if len(group) > 1]
    if not models:
        return None
    title = "One model, rows of several lengths"
    figure, panels = make_panels(len(models), title, height=2.5)
    drawn: dict[Axes, list[Line]] = {}
    for axes, lengths in zip(panels, models, strict=True):
        drawn[axes] = []
        for label, name, colour, look in LENGTH_LINES:
            drawn[axes] += trace(label, [(length.seq_len, length.find(name)) for length in lengths], colour, **look)
        _draw_lines(axes, drawn[axes], room=0.8)
        run, split = lengths[0].run, lengths[0].split
        trained = "".join(f", trained in rows of {e.config.data.seq_len}" for e in EXPERIMENTS if e.name == run)
        axes.set(title=f"{run}{trained} ({split})", ylabel="loss (nats)")
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("row length (positions)", loc="left")
    caption = (
        "Trained models scored again with every row cut or padded to another length: the padded loss falls as rows "
        "grow, like that of a predictor that ignores its input, and the loss per real token does not."
    )
    return _finish(title, caption, figure, drawn)


# --- the collapse ---------------------------------------------------------------------------------------------

COLLAPSED = 1.5  # nats, padding counted: a run that ends above this has collapsed
BASE = "A6"


@styled
def draw_collapse(evidence: Evidence) -> PublishedFigure | None:
    """A6 as published, as measured, and with few settings changed; below, those that did not collapse, closer."""
    runs, _ = evidence.part(e.name for e in EXPERIMENTS if e.name == BASE or e.name.startswith(f"{BASE}-"))
    trails: list[Line] = []
    for run in runs:  # epochs as the published run counts them
        trails += trace(run.name, [(p.epoch or 0, p.measured.get("val_loss_padded")) for p in run.epochs], SOFT)
    if not trails:
        return None
    trails.sort(key=lambda line: line.end)
    alive = [line for line in trails if line.end <= COLLAPSED]
    collapsed = [replace(t, colour=ORANGE, look={"marker": "o", "markersize": 4}) for t in trails if t not in alive]
    own = [replace(t, name="A6, measured", colour=BLUE, look=THICK) for t in alive if t.name == BASE]
    others = [line for line in alive if line.name != BASE]
    # Short of the scale's bright end, on which a name could not be read; neighbours differ in their strokes too.
    colours, strokes = spectrum(np.linspace(0, 0.75, len(others))), cycle(("-", SHORT_DASHES))
    closer = [replace(t, colour=c, look={"linestyle": s}) for t, c, s in zip(others, colours, strokes, strict=False)]
    # Among all they are grey under one name.
    names = [*[""] * (len(others) - 1), "others: see below"]
    grey = [replace(t, name=n, look={"linewidth": 0.7}) for t, n in zip(others, names, strict=False)]
    figure, panels = make_panels(2 if others else 1, "A6 and what was changed in it", height=3.3)
    drawn = dict(zip(panels, ([*_trace_published(evidence), *grey, *own, *collapsed], [*own, *closer]), strict=False))
    for axes, lines in drawn.items():
        _draw_lines(axes, lines, room=0.74)
        axes.set_xlabel("epoch", loc="left")
        axes.set_ylabel("padded loss (nats)")
    if others:
        panels[0].set_title("All runs")
        panels[1].set_title(f"Those that end below {COLLAPSED} nats, closer")
        # The first epoch, which is the steepest, may leave the panel.
        values = [value for line in alive for _, spread in line.points[1:] or line.points for value in spread.values]
        room = 0.1 * (max(values) - min(values)) or 0.05
        panels[1].set_ylim(min(values) - room, max(values) + room)
    caption = (
        "Padded validation loss of A6 as published and as measured (mean and range over seeds), and of runs that "
        f"differ from it in few settings; those that end above {COLLAPSED} nats are orange."
    )
    return _finish("The collapse of A6", caption, figure, drawn)


def _trace_published(evidence: Evidence) -> list[Line]:
    """A6 as printed, and a predictor that ignores its input, where one was measured on such rows."""
    base = find_experiment(BASE)
    assert base.published is not None
    printed = [(row.epoch, Spread((float(row.val_loss),))) for row in base.published.epochs if row.val_loss is not None]
    constant = find_constant(evidence, base.config.data.seq_len, base.config.model.vocab_size)
    level = constant.find("constant_loss_padded") if constant else None
    return [
        *trace("A6, published", printed, INK, **THICK, linestyle=DASHES),
        *trace("constant predictor", [(epoch, level) for epoch, _ in printed], SOFT, linestyle=DOTS),
    ]

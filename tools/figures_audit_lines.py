"""Figures of the audit with names at the ends of their lines: a model in rows of several lengths, and A6's collapse."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from some_moe.glass.figures.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, SOFT, make_panels, spectrum, styled
from some_moe.lab.published import Comparison, Spread
from some_moe.lab.published_figures import PublishedFigure, digest_content
from some_moe.lab.registry import EXPERIMENTS, find_experiment
from tools.audit_evidence import Evidence, Length
from tools.audit_studies import find_constant
from tools.end_labels import End, label_ends

DASHES, SHORT_DASHES, DOTS = (0, (4, 2.5)), (0, (3.5, 1.2)), (0, (1, 2))


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

    def draw(self, axes: Axes) -> None:
        xs, spreads = [x for x, _ in self.points], [spread for _, spread in self.points]
        axes.plot(xs, [spread.mean for spread in spreads], color=self.colour, **self.look)
        if any(len(spread.values) > 1 for spread in spreads):
            lows, highs = [min(spread.values) for spread in spreads], [max(spread.values) for spread in spreads]
            axes.fill_between(xs, lows, highs, color=self.colour, alpha=0.2, linewidth=0)


def _draw_lines(axes: Axes, lines: Sequence[Line], *, room: float) -> None:
    """Draw the lines, and leave room for names on their right: this many times their extent."""
    for line in lines:
        line.draw(axes)
    xs, extent = _measure(lines)
    axes.set_xticks(xs)
    axes.set_xlim(xs[0] - 0.05 * extent, xs[-1] + room * extent)
    axes.spines["bottom"].set_bounds(xs[0] - 0.05 * extent, xs[-1])  # the axis ends where the names begin


def _measure(lines: Sequence[Line]) -> tuple[list[float], float]:
    """Return every x there is, rising, and how far they reach (1 where there is but one)."""
    xs = sorted({x for line in lines for x, _ in line.points})
    return xs, xs[-1] - xs[0] or 1.0


def _finish_lines(title: str, caption: str, figure: Figure, panels: Mapping[Axes, Sequence[Line]]) -> PublishedFigure:
    """Fix the layout, then write the names into it."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes, lines in panels.items():
        xs, extent = _measure(lines)
        ends = [End(line.name, line.points[-1][0], line.end, line.colour) for line in lines if line.name]
        label_ends(axes, ends, xs[-1] + 0.09 * extent)
    content = [
        [axes.get_title(loc="left"), [[line.name, [[x, spread.values] for x, spread in line.points]] for line in lines]]
        for axes, lines in panels.items()
    ]
    return PublishedFigure(title=title, caption=caption, figure=figure, digest=digest_content(content))


# --- one model in rows of several lengths ---------------------------------------------------------------------

LENGTH_LINES: Sequence[tuple[str, str, str, Mapping[str, Any]]] = (
    ("honest loss", "loss", GREEN, {"marker": "s", "markersize": 4.5}),
    ("padded loss", "loss_padded", PURPLE, {"marker": "o", "markersize": 5}),
    ("constant predictor, padded", "constant_loss_padded", SOFT, {"linestyle": DOTS}),
)


@styled
def draw_lengths(evidence: Evidence) -> PublishedFigure | None:
    """Losses of trained models against the length of the rows, one panel a model and split."""
    groups = groupby(evidence.lengths, key=lambda length: (length.run, length.split))
    models = [(run, split, list(members)) for (run, split), members in groups]
    models = [model for model in models if len(model[2]) > 1]
    if not models:
        return None
    title = "One model, rows of several lengths"
    figure, panels = make_panels(len(models), title, height=2.5)
    drawn = {}
    for axes, (run, split, lengths) in zip(panels, models, strict=True):
        drawn[axes] = _trace_lengths(lengths)
        _draw_lines(axes, drawn[axes], room=0.8)
        trained = "".join(f", trained in rows of {e.config.data.seq_len}" for e in EXPERIMENTS if e.name == run)
        axes.set(title=f"{run}{trained} ({split})", ylabel="loss (nats)")
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("row length (positions)", loc="left")
    caption = (
        "Trained models scored again with every row cut or padded to another length: the padded loss falls as rows "
        "grow, like that of a predictor that ignores its input, and the loss per real token does not."
    )
    return _finish_lines(title, caption, figure, drawn)


def _trace_lengths(lengths: Sequence[Length]) -> list[Line]:
    lines = []
    for name, figure, colour, look in LENGTH_LINES:
        found = [(length.seq_len, length.find(figure)) for length in sorted(lengths, key=lambda one: one.seq_len)]
        points = [(float(seq_len), spread) for seq_len, spread in found if spread is not None]
        if points:
            lines.append(Line(name, points, colour, look))
    return lines


# --- the collapse ---------------------------------------------------------------------------------------------

COLLAPSED = 1.5  # nats, padding counted: a run that ends above this has collapsed
BASE, MEASURED = "A6", "A6, measured"
THICK: Mapping[str, Any] = {"linewidth": 2.6, "zorder": 4}


@styled
def draw_collapse(evidence: Evidence) -> PublishedFigure | None:
    """A6 as published, as measured, and with few settings changed; below, those that did not collapse, closer."""
    runs, _ = evidence.part(e.name for e in EXPERIMENTS if e.name == BASE or e.name.startswith(f"{BASE}-"))
    trails = [Line(run.name, points, SOFT) for run in runs if (points := _trace_epochs(run))]
    if not trails:
        return None
    collapsed, alive = _dress(trails)
    upper = [*_trace_published(evidence), *_dim(alive), *collapsed]
    closer = any(line.name != MEASURED for line in alive)
    figure, panels = make_panels(1 + closer, "A6 and what was changed in it", height=3.3)
    drawn = dict(zip(panels, (upper, alive), strict=False))
    for axes, lines in drawn.items():
        _draw_lines(axes, lines, room=0.74)
        axes.set_xlabel("epoch", loc="left")
        axes.set_ylabel("padded loss (nats)")
    if closer:
        panels[0].set_title("All runs")
        panels[1].set_title(f"Those that end below {COLLAPSED} nats, closer")
        _zoom_to_ends(panels[1], alive)
    caption = (
        "Padded validation loss of A6 as published and as measured (mean and range over seeds), and of runs that "
        f"differ from it in few settings; those that end above {COLLAPSED} nats are orange."
    )
    return _finish_lines("The collapse of A6", caption, figure, drawn)


def _dress(trails: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Return the runs that collapsed, and those that did not with A6 as the first of them, each as it is drawn."""
    ordered = sorted(trails, key=lambda trail: trail.end)
    fallen, rest = ([t for t in ordered if (t.end > COLLAPSED) is high] for high in (True, False))
    own, others = ([t for t in rest if (t.name == BASE) is base] for base in (True, False))
    collapsed = [replace(trail, colour=ORANGE, look={"marker": "o", "markersize": 4}) for trail in fallen]
    alive = [replace(trail, name=MEASURED, colour=BLUE, look=THICK) for trail in own]
    # Short of the scale's bright end, on which a name could not be read; neighbours differ in their strokes too.
    colours, strokes = spectrum(np.linspace(0, 0.75, len(others))), cycle(("-", SHORT_DASHES))
    alive += [replace(t, colour=c, look={"linestyle": s}) for t, c, s in zip(others, colours, strokes, strict=False)]
    return collapsed, alive


def _dim(alive: Sequence[Line]) -> list[Line]:
    """The runs that did not collapse, as they stand among all: A6, and the others grey under one name."""
    others = [line for line in alive if line.name != MEASURED]
    names = ["others: see below" if line is others[-1] else "" for line in others]
    grey = [replace(o, name=name, colour=SOFT, look={"linewidth": 0.7}) for o, name in zip(others, names, strict=True)]
    return [*grey, *(line for line in alive if line.name == MEASURED)]


def _trace_published(evidence: Evidence) -> list[Line]:
    """A6 as printed, and a predictor that ignores its input, where one was measured on such rows."""
    base = find_experiment(BASE)
    assert base.published is not None
    epochs = [(row.epoch, row.val_loss) for row in base.published.epochs if row.val_loss is not None]
    points = [(float(epoch), Spread((float(loss),))) for epoch, loss in epochs]
    lines = [Line("A6, published", points, INK, {**THICK, "linestyle": DASHES})]
    constant = find_constant(evidence, base.config.data.seq_len, base.config.model.vocab_size)
    level = constant.find("constant_loss_padded") if constant else None
    if level is not None:
        lines.append(Line("constant predictor", [(x, level) for x, _ in points], SOFT, {"linestyle": DOTS}))
    return lines


def _trace_epochs(run: Comparison) -> list[tuple[float, Spread]]:
    """(epoch, padded validation loss), as the published run counts epochs."""
    found = [(point.epoch, point.measured.get("val_loss_padded")) for point in run.epochs]
    return [(float(epoch), spread) for epoch, spread in found if epoch is not None and spread is not None]


def _zoom_to_ends(axes: Axes, lines: Sequence[Line]) -> None:
    """Let the first epoch, which is the steepest, leave the panel where it must."""
    values = [value for line in lines for _, spread in line.points[1:] or line.points for value in spread.values]
    low, high = min(values), max(values)
    room = 0.1 * (high - low) or 0.05
    axes.set_ylim(low - room, high + room)

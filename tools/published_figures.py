"""Figures of published against measured: a point on the line is a figure that was met.

Each figure carries a digest of the numbers in it, so that one drawn by another matplotlib can still be recognised.
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from some_moe.glass.figures.canvas import BLUE, GREY, ORANGE, PURPLE, SOFT, STYLE, make_panels, styled
from some_moe.lab.published import NO_TOLERANCE, OUTSIDE, WITHIN, Comparison, Point, Spread
from some_moe.lab.registry.tolerances import Tolerance
from tools.label_places import place_labels

PANEL_HEIGHT = 3.5  # inches
CROWD = 0.3  # points that fill less of an axis than this get a panel of their own
FEWEST_IN_A_CROWD = 3
LOOKS = {WITHIN: (BLUE, "o"), OUTSIDE: (ORANGE, "D"), NO_TOLERANCE: (PURPLE, "s")}
MEANINGS = {WITHIN: "within the tolerance", OUTSIDE: "outside it", NO_TOLERANCE: "no tolerance set"}
LOSS_UNITS = {"val_loss_padded": "nats per position, padding too", "val_loss": "nats per real token"}
USAGE = {"gini": "gini, 0 to 1", "entropy_bits": "entropy (bits)"}  # of the middle layer
EQUAL: Any = {"color": SOFT, "linewidth": 1, "linestyle": (0, (4, 3))}


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One point: a published figure, and what the seeds measured."""

    name: str  # "": an earlier epoch, drawn small
    published: float
    measured: Spread
    verdict: str
    real: Spread | None = None  # usage alone: the same over real tokens, where padding counts in `measured`

    @property
    def heights(self) -> tuple[float, ...]:
        """Every y that is drawn."""
        return self.measured.values + (self.real.values if self.real else ())


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes with its marks."""

    title: str
    quantity: str  # with its unit; it stands at both axes
    marks: Sequence[Mark]
    tolerance: Tolerance | None = None

    @property
    def content(self) -> list[Any]:
        """Every word and number in it."""
        marks = [[mark.name, mark.published, mark.measured.values, mark.verdict] for mark in self.marks]
        real = {mark.name: mark.real.values for mark in self.marks if mark.real}
        return [self.title, self.quantity, str(self.tolerance), marks, real]


@dataclass(frozen=True, kw_only=True)
class PublishedFigure:
    """A drawn figure with its words. content: what JSON can hold of all that it shows."""

    title: str
    caption: str
    figure: Figure
    content: Any

    @property
    def digest(self) -> str:
        """A short hash of what it shows."""
        return hashlib.sha256(json.dumps(self.content).encode()).hexdigest()[:16]

    def to_svg(self) -> bytes:
        """The figure as a file: the same bytes for the same numbers."""
        description = f"Numbers: {self.digest}. Drawn by matplotlib {mpl.__version__}."
        metadata = {"Title": self.title, "Description": description, "Creator": "some-moe", "Date": None}
        file = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.figure.savefig(file, format="svg", metadata=metadata)
        return file.getvalue()


def shows_the_same(there: bytes, made: bytes) -> bool:
    """Whether a figure on disk is the one just made: byte for byte, or, of another matplotlib, by its numbers."""
    if there == made:
        return True
    described = re.compile(rb"Numbers: ([0-9a-f]+)\. Drawn by matplotlib ([^ <]+)\.")
    old, new = described.search(there), described.search(made)
    return old is not None and new is not None and old[1] == new[1] and old[2] != new[2]


def settle(figure: Figure) -> None:
    """Fix the layout, so that names can find their places in it."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


# --- what is drawn --------------------------------------------------------------------------------------------


def draw_losses(groups: Mapping[str, Sequence[Comparison]]) -> PublishedFigure | None:
    """Loss, one panel a series; None where nothing was both published and measured."""
    panels = [panel for series, members in groups.items() for panel in _loss_panels(series, members)]
    caption = (
        "Published against measured validation loss, at the end of each run (named) and of its earlier epochs (small). "
        "On the dashed line both are equal."
    )
    if any(panel.tolerance is not None for panel in panels):
        caption += " The band is the tolerance."
    if any(len(mark.measured.values) > 1 for panel in panels for mark in panel.marks):
        caption += " A bar spans the seeds, and its mark is their mean."
    return _draw(panels, "Loss: published and measured", caption, MEANINGS) if panels else None


def draw_usage(groups: Mapping[str, Sequence[Comparison]]) -> PublishedFigure | None:
    """Gini and entropy of the middle layer; None where neither was both published and measured."""
    panels = [_usage_panel(series, name, members) for series, members in groups.items() for name in USAGE]
    panels = [panel for panel in panels if panel.marks]
    caption = (
        "How unevenly the middle layer's experts are used, published against measured at the end of each run. Filled: "
        "counted as the report counts. Hollow: over real tokens alone, where the report counts padding too. On the "
        "dashed line both are equal."
    )
    meanings = {NO_TOLERANCE: "counted as published"}
    return _draw(panels, "Use of experts: published and measured", caption, meanings) if panels else None


def _loss_panels(series: str, members: Sequence[Comparison]) -> list[Panel]:
    """The panel of a series, and a closer one where most of its runs crowd in a corner."""
    moments: list[tuple[str, Point]] = []  # the end of a run under its name, and its earlier epochs under none
    for run in members:
        moments += [("", point) for point in run.epochs if point.epoch != run.experiment.config.train.epochs]
        moments.append((run.name, run))
    marks = [
        Mark(name=name, published=float(point.published["val_loss"]), measured=point.loss, verdict=point.verdict)
        for name, point in moments
        if "val_loss" in point.published and point.loss is not None
    ]
    named = [mark for mark in marks if mark.name]
    if not named:
        return []
    units = {LOSS_UNITS[run.loss_name] for run in members}
    quantity = f"loss ({units.pop()})" if len(units) == 1 else "loss (nats, as its report counts)"
    whole = Panel(title=series, quantity=quantity, marks=marks, tolerance=members[0].tolerance)
    crowd = find_crowd(named)
    if not crowd:
        return [whole]
    crowded = {mark.name for mark in crowd}
    outer = [replace(mark, name="") if mark.name in crowded else mark for mark in marks]
    return [replace(whole, marks=outer), replace(whole, title=f"{series}, the crowded part", marks=crowd)]


def find_crowd(marks: Sequence[Mark]) -> list[Mark]:
    """The marks without the one farthest out, where those fill little of the axis; else none."""
    if len(marks) <= FEWEST_IN_A_CROWD:
        return []
    middle = median(mark.published for mark in marks)
    crowd = sorted(marks, key=lambda mark: abs(mark.published - middle))[:-1]
    (inner_low, inner_high), (low, high) = _find_extent(crowd), _find_extent(marks)
    return sorted(crowd, key=lambda mark: mark.published) if inner_high - inner_low < CROWD * (high - low) else []


def _find_extent(marks: Sequence[Mark]) -> tuple[float, float]:
    """The lowest and the highest number on either axis."""
    values = [value for mark in marks for value in (mark.published, *mark.heights)]
    return min(values), max(values)


def _usage_panel(series: str, name: str, members: Sequence[Comparison]) -> Panel:
    marks = []
    for run in members:
        real, counts_padding = run.measured.get(f"{name}_real"), run.experiment.config.data.count_padding
        measured = run.measured.get(f"{name}_all") if counts_padding else real
        if name in run.published and measured is not None:
            marks.append(
                Mark(name=run.name, published=float(run.published[name]), measured=measured, verdict=NO_TOLERANCE,
                     real=real if counts_padding else None)
            )  # fmt: skip
    title = f"{series}: {USAGE[name].split()[0].rstrip(',')} of the middle layer"
    return Panel(title=title, quantity=USAGE[name], marks=marks)


# --- drawing --------------------------------------------------------------------------------------------------


@styled
def _draw(panels: Sequence[Panel], title: str, caption: str, meanings: Mapping[str, str]) -> PublishedFigure:
    """meanings: what the legend calls each verdict."""
    figure, axes = make_panels(len(panels), title, height=PANEL_HEIGHT)
    for one, panel in zip(axes, panels, strict=True):
        _draw_panel(one, panel)
    _add_legend(figure, panels, meanings)
    settle(figure)
    for one, panel in zip(axes, panels, strict=True):
        names = [(mark.published, mark.measured.mean, mark.name) for mark in panel.marks if mark.name]
        place_labels(one, names, [(mark.published, min(mark.heights), max(mark.heights)) for mark in panel.marks])
    content = [panel.content for panel in panels]
    return PublishedFigure(title=title, caption=caption, figure=figure, content=content)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    low, high = _find_extent(panel.marks)
    room = 0.12 * (high - low) or 0.1
    ends = np.array([low - room, high + room])
    axes.plot(ends, ends, zorder=1, **EQUAL)
    if panel.tolerance is not None:
        width = float(panel.tolerance.nats) + float(panel.tolerance.share) * ends
        axes.fill_between(ends, ends - width, ends + width, color=BLUE, alpha=0.1, linewidth=0, zorder=0)
    for mark in panel.marks:
        colour, shape = LOOKS[mark.verdict]
        x, y, seeds = mark.published, mark.measured.mean, mark.measured.values
        if len(seeds) > 1:
            axes.plot([x, x], [min(seeds), max(seeds)], color=colour, linewidth=1.2, zorder=2)
        size, alpha = (6.0, None) if mark.name else (3.0, 0.5)
        axes.plot([x], [y], shape, color=colour, zorder=3, markersize=size, alpha=alpha)
        if mark.real:
            axes.plot([x, x], [mark.real.mean, y], color=GREY, linewidth=0.7, zorder=1)
            axes.plot([x], [mark.real.mean], "o", color=colour, markerfacecolor="white", markersize=5.5, zorder=3)
    axes.set(title=panel.title, xlim=ends, ylim=ends)
    axes.set_xlabel(f"published {panel.quantity}", fontsize=9)
    axes.set_ylabel(f"measured {panel.quantity}", fontsize=9)


def _add_legend(figure: Figure, panels: Sequence[Panel], meanings: Mapping[str, str]) -> None:
    def show(colour: str, shape: str, label: str, **look: Any) -> Line2D:
        return Line2D([], [], color=colour, marker=shape, linestyle="", markersize=6, label=label, **look)

    marks = [mark for panel in panels for mark in panel.marks]
    verdicts = [verdict for verdict in LOOKS if any(mark.verdict == verdict for mark in marks)]
    handles: list[Line2D | Patch] = [Line2D([], [], label="equal", **EQUAL)]
    handles += [show(*LOOKS[verdict], meanings[verdict]) for verdict in verdicts]
    if any(mark.real for mark in marks):
        handles.append(show(PURPLE, "o", "real tokens alone", markerfacecolor="white"))
    if any(panel.tolerance is not None for panel in panels):
        handles.append(Patch(facecolor=BLUE, alpha=0.15, label="tolerance"))
    figure.legend(handles=handles, loc="outside lower left", ncols=2, handlelength=1.6, columnspacing=1.2)

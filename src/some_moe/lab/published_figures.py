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

from some_moe.glass.figures.canvas import BLUE, GREY, ORANGE, PIXELS_AN_INCH, PURPLE, SOFT, STYLE, make_panels, styled
from some_moe.lab.label_places import Label, place_labels
from some_moe.lab.published import NO_TOLERANCE, OUTSIDE, WITHIN, Comparison, Point, Spread, loss_name
from some_moe.lab.registry.tolerances import Tolerance

PANEL_HEIGHT = 3.5  # inches
CROWD = 0.3  # points that fill less of an axis than this get a panel of their own
FEWEST_IN_A_CROWD = 3
LOOKS = {WITHIN: (BLUE, "o"), OUTSIDE: (ORANGE, "D"), NO_TOLERANCE: (PURPLE, "s")}
MEANINGS = {WITHIN: "within the tolerance", OUTSIDE: "outside it", NO_TOLERANCE: "no tolerance set"}
LOSS_UNITS = {"val_loss_padded": "nats per position, padding too", "val_loss": "nats per real token"}
USAGE = {"gini": "gini, 0 to 1", "entropy_bits": "entropy (bits)"}  # of the middle layer


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One point: a published figure, and what the seeds measured."""

    name: str  # "": an earlier epoch, drawn small
    published: float
    measured: Spread
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes with its marks."""

    title: str
    quantity: str  # with its unit; it stands at both axes
    marks: Sequence[Mark]
    tolerance: Tolerance | None = None
    second: Mapping[str, Spread] | None = None  # usage alone: the same runs over real tokens, by name


@dataclass(frozen=True, kw_only=True)
class PublishedFigure:
    """A drawn figure with its words."""

    title: str
    caption: str
    figure: Figure
    digest: str

    def to_bytes(self, kind: str) -> bytes:
        """The figure as a file, "svg" or "png": the same bytes for the same numbers."""
        description = f"Numbers: {self.digest}. Drawn by matplotlib {mpl.__version__}."
        metadata: dict[str, str | None] = {"Title": self.title, "Description": description}
        metadata |= {"Creator": "some-moe", "Date": None} if kind == "svg" else {"Software": "some-moe"}
        file = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.figure.savefig(file, format=kind, dpi=PIXELS_AN_INCH, metadata=metadata)
        return file.getvalue()


def shows_the_same(there: bytes, made: bytes) -> bool:
    """Whether a figure on disk is the one just made: byte for byte, or, of another matplotlib, by its numbers."""
    if there == made:
        return True
    described = re.compile(rb"Numbers: ([0-9a-f]+)\. Drawn by matplotlib ([^ <]+)\.")
    old, new = described.search(there), described.search(made)
    return old is not None and new is not None and old[1] == new[1] and old[2] != new[2]


# --- what is drawn --------------------------------------------------------------------------------------------


def draw_losses(groups: Mapping[str, Sequence[Comparison]]) -> PublishedFigure | None:
    """Loss, one panel a series; None where nothing was both published and measured."""
    panels = [panel for series, members in groups.items() for panel in _loss_panels(series, members)]
    if not panels:
        return None
    caption = (
        "Published against measured validation loss, at the end of each run (named) and of its earlier epochs (small). "
        "On the dashed line both are equal."
    )
    if any(panel.tolerance is not None for panel in panels):
        caption += " The band is the tolerance."
    if any(len(mark.measured.values) > 1 for panel in panels for mark in panel.marks):
        caption += " A bar spans the seeds, and its mark is their mean."
    return _draw(panels, "Loss: published and measured", caption)


def draw_usage(groups: Mapping[str, Sequence[Comparison]]) -> PublishedFigure | None:
    """Gini and entropy of the middle layer; None where neither was both published and measured."""
    panels = [
        panel for series, members in groups.items() for name in USAGE for panel in _usage_panel(series, name, members)
    ]
    if not panels:
        return None
    caption = (
        "How unevenly the middle layer's experts are used, published against measured at the end of each run. Filled: "
        "counted as the report counts. Hollow: over real tokens alone, where the report counts padding too. On the "
        "dashed line both are equal."
    )
    return _draw(panels, "Use of experts: published and measured", caption)


def _loss_panels(series: str, members: Sequence[Comparison]) -> list[Panel]:
    """The panel of a series, and a closer one where most of its runs crowd in a corner."""
    marks = [
        Mark(name=name, published=float(point.published["val_loss"]), measured=point.loss, verdict=point.verdict)
        for comparison in members
        for name, point in _moments(comparison)
        if "val_loss" in point.published and point.loss is not None
    ]
    if not any(mark.name for mark in marks):
        return []
    units = {LOSS_UNITS[loss_name(comparison.experiment)] for comparison in members}
    quantity = f"loss ({units.pop()})" if len(units) == 1 else "loss (nats, as its report counts)"
    whole = Panel(title=series, quantity=quantity, marks=marks, tolerance=members[0].final.tolerance)
    crowd = find_crowd([mark for mark in marks if mark.name])
    if not crowd:
        return [whole]
    crowded = {mark.name for mark in crowd}
    outer = [replace(mark, name="") if mark.name in crowded else mark for mark in marks]
    return [replace(whole, marks=outer), replace(whole, title=f"{series}, the crowded part", marks=crowd)]


def _moments(comparison: Comparison) -> list[tuple[str, Point]]:
    """The end of a run under its name, and its earlier epochs under none."""
    last = comparison.experiment.config.train.epochs
    earlier = [("", point) for point in comparison.epochs if point.epoch != last]
    return [*earlier, (comparison.name, comparison.final)]


def find_crowd(marks: Sequence[Mark]) -> list[Mark]:
    """The marks without the one farthest out, where those fill little of the axis; else none."""
    if len(marks) <= FEWEST_IN_A_CROWD:
        return []
    middle = median(mark.published for mark in marks)
    crowd = sorted(marks, key=lambda mark: abs(mark.published - middle))[:-1]
    extents = [max(values) - min(values) for values in (_values(crowd), _values(marks))]
    return sorted(crowd, key=lambda mark: mark.published) if extents[0] < CROWD * extents[1] else []


def _values(marks: Sequence[Mark]) -> list[float]:
    return [value for mark in marks for value in (mark.published, *mark.measured.values)]


def _usage_panel(series: str, name: str, members: Sequence[Comparison]) -> list[Panel]:
    marks, second = [], {}
    for comparison in members:
        point, counts_padding = comparison.final, comparison.experiment.config.data.count_padding
        measured = point.measured.get(f"{name}_all" if counts_padding else f"{name}_real")
        if name not in point.published or measured is None:
            continue
        marks.append(
            Mark(name=point.run.name, published=float(point.published[name]), measured=measured, verdict=NO_TOLERANCE)
        )
        if counts_padding and f"{name}_real" in point.measured:
            second[point.run.name] = point.measured[f"{name}_real"]
    title = f"{series}: {USAGE[name].split()[0].rstrip(',')} of the middle layer"
    return [Panel(title=title, quantity=USAGE[name], marks=marks, second=second)] if marks else []


# --- drawing --------------------------------------------------------------------------------------------------


@styled
def _draw(panels: Sequence[Panel], title: str, caption: str) -> PublishedFigure:
    figure, axes = make_panels(len(panels), title, height=PANEL_HEIGHT)
    for one, panel in zip(axes, panels, strict=True):
        _draw_panel(one, panel)
    _add_legend(figure, panels)
    figure.draw_without_rendering()  # fixes the layout, in which the labels then find their places
    figure.set_layout_engine("none")
    for one, panel in zip(axes, panels, strict=True):
        named = [Label(mark.name, mark.published, mark.measured.mean) for mark in panel.marks if mark.name]
        place_labels(one, named, [_extent(mark, panel) for mark in panel.marks])
    return PublishedFigure(title=title, caption=caption, figure=figure, digest=digest_panels(panels))


def _second(panel: Panel) -> Mapping[str, Spread]:
    return panel.second or {}


def _extent(mark: Mark, panel: Panel) -> tuple[float, float, float]:
    """All that is drawn of a mark: its x, its lowest and its highest y."""
    values = [*mark.measured.values, *(_second(panel)[mark.name].values if mark.name in _second(panel) else ())]
    return mark.published, min(values), max(values)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    second = _second(panel)
    values = [*_values(panel.marks), *(value for spread in second.values() for value in spread.values)]
    low, high = min(values), max(values)
    room = 0.12 * (high - low) or 0.1
    ends = np.array([low - room, high + room])
    axes.plot(ends, ends, color=SOFT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    if panel.tolerance is not None:
        nats, share = float(panel.tolerance.nats), float(panel.tolerance.share)
        width = nats + share * ends
        axes.fill_between(ends, ends - width, ends + width, color=BLUE, alpha=0.1, linewidth=0, zorder=0)
    for mark in panel.marks:
        colour, shape = LOOKS[mark.verdict]
        x, spread = mark.published, mark.measured
        if len(spread.values) > 1:
            axes.plot([x, x], [min(spread.values), max(spread.values)], color=colour, linewidth=1.2, zorder=2)
        look = {"markersize": 6.0} if mark.name else {"markersize": 3.0, "alpha": 0.5}
        axes.plot([x], [spread.mean], shape, color=colour, zorder=3, **look)  # type: ignore[arg-type]
        if mark.name in second:
            y = second[mark.name].mean
            axes.plot([x, x], [y, spread.mean], color=GREY, linewidth=0.7, zorder=1)
            axes.plot([x], [y], "o", color=colour, markerfacecolor="white", markersize=5.5, zorder=3)
    axes.set(title=panel.title, xlim=ends, ylim=ends)
    axes.set_xlabel(f"published {panel.quantity}", fontsize=9)
    axes.set_ylabel(f"measured {panel.quantity}", fontsize=9)


def _add_legend(figure: Figure, panels: Sequence[Panel]) -> None:
    handles: list[Line2D | Patch] = [Line2D([], [], color=SOFT, linewidth=1, linestyle=(0, (4, 3)), label="equal")]
    if panels[0].second is None:
        found = {mark.verdict for panel in panels for mark in panel.marks}
        handles += [_handle(*LOOKS[verdict], MEANINGS[verdict]) for verdict in LOOKS if verdict in found]
    else:
        handles.append(_handle(*LOOKS[NO_TOLERANCE], "counted as published"))
    if any(_second(panel) for panel in panels):
        handles.append(_handle(PURPLE, "o", "real tokens alone", markerfacecolor="white"))
    if any(panel.tolerance is not None for panel in panels):
        handles.append(Patch(facecolor=BLUE, alpha=0.15, label="tolerance"))
    figure.legend(handles=handles, loc="outside lower left", ncols=2, handlelength=1.6, columnspacing=1.2)


def _handle(colour: str, shape: str, label: str, **look: str) -> Line2D:
    return Line2D([], [], color=colour, marker=shape, linestyle="", markersize=6, label=label, **look)  # type: ignore[arg-type]


def digest_panels(panels: Sequence[Panel]) -> str:
    """A short hash of every word and number in the panels."""
    content = [
        [
            panel.title,
            panel.quantity,
            str(panel.tolerance),
            [[mark.name, mark.published, mark.measured.values, mark.verdict] for mark in panel.marks],
            {name: spread.values for name, spread in _second(panel).items()},
        ]
        for panel in panels
    ]
    return digest_content(content)


def digest_content(content: Any) -> str:
    """A short hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

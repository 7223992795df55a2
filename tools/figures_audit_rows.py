"""Figures of the audit with one row a run: gini with and without padding, and every seed beside the printed loss."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from some_moe.glass.figures.canvas import GREEN, GREY, INK, PURPLE, add_legend_below, make_panels, styled
from some_moe.lab.published import Comparison
from some_moe.lab.published_figures import PublishedFigure, digest_content
from tools.audit_cells import padded_loss, published_loss
from tools.audit_evidence import Evidence
from tools.audit_tables import A_NAMES, B_NAMES, V_NAMES
from tools.end_labels import FONT_SIZE

HOLLOW: Any = {
    "marker": "D", "markersize": 6, "color": INK, "linestyle": "", "markerfacecolor": "none", "markeredgewidth": 1.2,
}  # fmt: skip
ROW_HEIGHT = 0.21  # inches
SERIES_GAP = 0.7  # rows


def _lay_rows(axes: Axes, runs: Sequence[Comparison]) -> list[float]:
    """One row a run, downwards, with a gap between series; return the rows' heights."""
    places: list[float] = []
    for before, run in zip((None, *runs), runs, strict=False):
        new_series = before is not None and before.experiment.series != run.experiment.series
        places.append(places[-1] + 1 + SERIES_GAP * new_series if places else 0.0)
    axes.set_yticks(places, [run.name for run in runs])
    axes.set_ylim(places[-1] + 0.7, -0.7)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    return places


@styled
def draw_gini(evidence: Evidence) -> PublishedFigure | None:
    """Gini of every published run with padding counted and over real tokens, and as printed."""
    runs, _ = evidence.part((*V_NAMES, *A_NAMES, *B_NAMES))
    runs = [run for run in runs if "gini_all" in run.final.measured and "gini_real" in run.final.measured]
    if not runs:
        return None
    title = "How much of the concentration is padding"
    figure, (axes,) = make_panels(1, title, height=ROW_HEIGHT * (len(runs) + 6))
    rows = _lay_rows(axes, runs)
    real, padded = ([run.final.measured[name].mean for run in runs] for name in ("gini_real", "gini_all"))
    printed = [float(run.final.published.get("gini", math.nan)) for run in runs]  # what is not a number is not drawn
    axes.hlines(rows, real, padded, color=GREY, linewidth=1.4)
    axes.plot(real, rows, "s", color=GREEN, markersize=5.5, label="real tokens")
    axes.plot(padded, rows, "o", color=PURPLE, markersize=6.5, label="padding counted")
    axes.plot(printed, rows, label="published", **HOLLOW)
    axes.set(xlim=(0, 1), xlabel="gini of the middle layer (0: all experts equally used)")
    add_legend_below(figure, axes, 3)
    caption = (
        "Gini of the middle layer's experts in validation, once with padding counted, as the reports do, and once over "
        "real tokens alone (means over seeds): the line between them is what padding adds."
    )
    return _finish_rows(title, caption, figure, [[run.name for run in runs], real, padded, printed])


SEED_PANELS = ((*A_NAMES, *B_NAMES), V_NAMES[7:])  # rows of 768, and rows of 512: losses of two kinds
FAR = 0.2  # a published loss that is off by more than this share is an arrow, lest it flatten the rest


@styled
def draw_seeds(evidence: Evidence) -> PublishedFigure | None:
    """The padded loss of each seed beside the printed one."""
    groups = [[run for run in evidence.part(names)[0] if padded_loss(run) is not None] for names in SEED_PANELS]
    groups = [runs for runs in groups if runs]
    if not groups:
        return None
    title = "Each seed beside the published loss"
    heights = [ROW_HEIGHT * (len(runs) + 4) for runs in groups]
    figure, panels = make_panels(len(groups), title, height=sum(heights) / len(groups))
    panels[0].get_gridspec().set_height_ratios([len(runs) + 1 for runs in groups])  # type: ignore[union-attr]
    content = []
    for axes, runs in zip(panels, groups, strict=True):
        content.append(_draw_seeds(axes, runs))
        lengths = sorted({run.experiment.config.data.seq_len for run in runs})
        axes.set_xlabel(f"padded loss (nats), rows of {' and '.join(map(str, lengths))}")
    widest = max(right - left for left, right in (axes.get_xlim() for axes in panels))
    for axes in panels:  # one scale for all, so that distances can be compared
        axes.set_xlim(right=axes.get_xlim()[0] + widest)
    add_legend_below(figure, panels[0], 2)
    caption = (
        "Padded validation loss at the end of each run: a dot a seed, beside the published value; where that lies far "
        "off, an arrow points to it."
    )
    return _finish_rows(title, caption, figure, content)


def _draw_seeds(axes: Axes, runs: Sequence[Comparison]) -> list[Any]:
    """Draw one panel; return what it shows."""
    rows = _lay_rows(axes, runs)
    seeds = [spread.values if (spread := padded_loss(run)) else () for run in runs]
    printed = [float(value) if (value := published_loss(run)) is not None else math.nan for run in runs]
    measured = [value for values in seeds for value in values]
    low, high = min(measured) * (1 - FAR), max(measured) * (1 + FAR)
    near = [value if low <= value <= high else math.nan for value in printed]
    axes.plot(near, rows, label="published", **HOLLOW)
    dots = [(value, y) for values, y in zip(seeds, rows, strict=True) for value in values]
    axes.plot(*zip(*dots, strict=True), "o", color=PURPLE, alpha=0.75, markersize=5.5, markeredgewidth=0,
              label="a seed, measured")  # fmt: skip
    shown = [value for value in (*measured, *near) if not math.isnan(value)]
    room = 0.06 * (max(shown) - min(shown)) or 0.01
    axes.set_xlim(min(shown) - room, max(shown) + room)
    for loss, y in zip(printed, rows, strict=True):
        if loss < low or loss > high:
            _point_out(axes, loss, y, to_the_right=loss > high)
    return [[run.name for run in runs], seeds, printed]


def _point_out(axes: Axes, value: float, y: float, *, to_the_right: bool) -> None:
    """An arrow at the edge of the panel, with the number that lies beyond."""
    edge, tail = (1.0, 0.91) if to_the_right else (0.0, 0.09)
    axes.annotate(
        f"published {value:.4f}",
        (edge, y),
        xytext=(tail, y),
        xycoords=axes.get_yaxis_transform(),
        textcoords=axes.get_yaxis_transform(),
        fontsize=FONT_SIZE,
        ha="right" if to_the_right else "left",
        va="center",
        arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 2, "shrinkB": 0},
    )


def _finish_rows(title: str, caption: str, figure: Figure, content: Sequence[Any]) -> PublishedFigure:
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return PublishedFigure(title=title, caption=caption, figure=figure, digest=digest_content(content))

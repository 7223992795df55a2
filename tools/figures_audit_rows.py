"""Figures of the audit with one row a run: gini with and without padding, and every seed beside the printed loss."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from some_moe.glass.figures.canvas import GREEN, GREY, INK, PURPLE, add_legend_below, make_panels, styled
from some_moe.lab.published import Comparison
from tools.audit_cells import A_NAMES, B_NAMES, V_NAMES, find_printed_loss
from tools.audit_evidence import Evidence
from tools.label_places import FONT_SIZE
from tools.published_figures import PublishedFigure, settle

HOLLOW: Any = {
    "marker": "D", "markersize": 6, "color": INK, "linestyle": "", "markerfacecolor": "none", "markeredgewidth": 1.2,
}  # fmt: skip
ARROW: Any = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 2, "shrinkB": 0}
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
    runs = [run for run in runs if {"gini_all", "gini_real"} <= run.measured.keys()]
    if not runs:
        return None
    title = "How much of the concentration is padding"
    figure, (axes,) = make_panels(1, title, height=ROW_HEIGHT * (len(runs) + 6))
    rows = _lay_rows(axes, runs)
    real, padded = ([run.measured[name].mean for run in runs] for name in ("gini_real", "gini_all"))
    printed = [float(run.published.get("gini", math.nan)) for run in runs]  # what is not a number is not drawn
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
    settle(figure)
    content = [[run.name for run in runs], real, padded, printed]
    return PublishedFigure(title=title, caption=caption, figure=figure, content=content)


SEED_PANELS = ((*A_NAMES, *B_NAMES), V_NAMES[7:])  # rows of 768, and rows of 512: losses of two kinds
FAR = 0.2  # a published loss that is off by more than this share is an arrow, lest it flatten the rest


@styled
def draw_seeds(evidence: Evidence) -> PublishedFigure | None:
    """The padded loss of each seed beside the printed one."""
    groups = [[run for run in evidence.part(names)[0] if "val_loss_padded" in run.measured] for names in SEED_PANELS]
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
    settle(figure)
    return PublishedFigure(title=title, caption=caption, figure=figure, content=content)


def _draw_seeds(axes: Axes, runs: Sequence[Comparison]) -> list[Any]:
    """Draw one panel; return what it shows."""
    rows = _lay_rows(axes, runs)
    seeds = [run.measured["val_loss_padded"].values for run in runs]
    printed = [math.nan if (loss := find_printed_loss(run)) is None else loss for run in runs]
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
    for value, y in zip(printed, rows, strict=True):
        if value < low or value > high:  # an arrow at the edge of the panel, with the number that lies beyond
            edge, tail, side = (1.0, 0.91, "right") if value > high else (0.0, 0.09, "left")
            place = axes.get_yaxis_transform()
            axes.annotate(
                f"published {value:.4f}", (edge, y), xytext=(tail, y), xycoords=place, textcoords=place,
                fontsize=FONT_SIZE, ha=side, va="center", arrowprops=ARROW,
            )  # fmt: skip
    return [[run.name for run in runs], seeds, printed]

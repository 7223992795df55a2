"""Figures of several runs: loss against tokens, perplexity against parameters."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from some_moe.glass.figures.canvas import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    Drawing,
    make_panels,
    shorten,
    show_short_numbers,
    styled,
)
from some_moe.glass.figures.curves import Line, read_curve
from some_moe.glass.page.comparison import Compared

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, "#b58900", "#3aa6d0", "#8c4a2f", "#5b5f97")
MARKERS = "osD^vPX*"
LONGEST_LABEL = 30
MOST_POINTS = 300  # of a training curve: more are averaged
LEGEND_ROW = 0.2  # inches


@styled
def draw_losses(runs: Sequence[Compared]) -> Drawing:
    """Loss against tokens: thin lines for training, marked lines for validation."""
    looks = choose_looks(runs)
    figure, (axes,) = make_panels(1, "Loss against tokens", height=3.2 + _legend_height(len(looks) + 1))
    train = [read_curve(one.run.steps, "tokens", "train_loss") for one in runs]
    valid = [read_curve(one.run.evaluations, "tokens", "val_loss") for one in runs]
    for one, thin, marked in zip(runs, train, valid, strict=True):
        colour, marker = looks[one.group]
        axes.plot(*average_neighbours(*thin), color=colour, linewidth=0.8, alpha=0.45)
        axes.plot(*marked, color=colour, marker=marker, markersize=4.5)
    axes.set(xlabel="trained tokens", ylabel="loss (nats per token)")
    show_short_numbers(axes)
    axes.set_xlim(left=0)
    _leave_out_the_start(axes, train, valid)
    handles = [Line2D([], [], color=c, marker=m, markersize=4.5, label=show_name(g)) for g, (c, m) in looks.items()]
    handles.append(Line2D([], [], color=INK, linewidth=0.8, alpha=0.6, label="thin: training"))
    _add_legend(figure, handles)
    return Drawing(
        "losses",
        figure,
        "Thin lines: loss of single training steps. Marked lines: loss over the validation split, real tokens "
        "alone. Runs of one experiment with several seeds look alike. The first steps may lie above the frame.",
    )


@styled
def draw_sizes(runs: Sequence[Compared]) -> Drawing | None:
    """Perplexity against parameters, trained and in all; None where no run has been scored."""
    scored = [one for one in runs if one.figures.get("perplexity") is not None]
    if not scored:
        return None
    looks = choose_looks(scored)
    figure, panels = make_panels(2, "Perplexity against parameters", height=2.3 + _legend_height(len(looks)) / 2)
    kinds = (("trainable", "trained parameters"), ("total", "all parameters, frozen experts included"))
    for axes, (kind, name) in zip(panels, kinds, strict=True):
        sizes = [one.figures[f"{kind}_parameters"] for one in scored]
        for one, size in zip(scored, sizes, strict=True):
            colour, marker = looks[one.group]
            axes.plot([size], [one.figures["perplexity"]], marker, color=colour, markersize=7, alpha=0.85)
        axes.set(xscale="log", xlabel=f"{name} (logarithmic)", ylabel="perplexity (valid)")
        axes.set_xlim(min(sizes) / 1.6, max(sizes) * 1.6)
        _name_sizes(axes, sizes)
    handles = [Line2D([], [], color=c, marker=m, linestyle="", label=show_name(g)) for g, (c, m) in looks.items()]
    _add_legend(figure, handles)
    return Drawing(
        "sizes",
        figure,
        "Validation perplexity per real token at the last step, against the parameters that are trained and "
        "against all that there are.",
    )


def choose_looks(runs: Sequence[Compared]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each group, in order of appearance."""
    groups = dict.fromkeys(one.group for one in runs)
    return {group: (COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)]) for n, group in enumerate(groups)}


def show_name(name: str) -> str:
    """A run's name as a label: shortened, never read as mathematics, never hidden for a leading underscore."""
    short = name if len(name) <= LONGEST_LABEL else name[: LONGEST_LABEL - 1] + "…"
    return "\u200b" + short.replace("$", r"\$") if short.startswith("_") else short.replace("$", r"\$")


def average_neighbours(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """At most MOST_POINTS points of a curve."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    if len(xs) <= MOST_POINTS:
        return xs, ys
    parts = np.array_split(np.arange(len(xs)), MOST_POINTS)
    return np.array([xs[part].mean() for part in parts]), np.array([ys[part].mean() for part in parts])


def _leave_out_the_start(axes: Any, train: Sequence[Line], valid: Sequence[Line]) -> None:
    """End the loss axis a little above the first evaluations: the ends are to be compared, not the beginnings."""
    losses = [loss for _, curve in valid for loss in curve]
    lowest = min([*losses, *(loss for _, curve in train for loss in curve)], default=0.0)
    if losses and max(losses) > lowest:
        room = max(losses) - lowest
        axes.set_ylim(lowest - 0.08 * room, max(losses) + 0.6 * room)


def _legend_height(entries: int) -> float:
    return -(-entries // 2) * LEGEND_ROW


def _add_legend(figure: Figure, handles: list[Any]) -> None:
    """Under the panels, in two columns, where it can hide nothing."""
    figure.legend(handles=handles, loc="outside lower left", ncols=2, handlelength=1.6, columnspacing=1.2)


def _name_sizes(axes: Any, sizes: Sequence[int]) -> None:
    """Ticks at the sizes themselves where they are few and apart; round ones otherwise."""
    distinct = sorted(set(sizes))
    if len(distinct) <= 6 and all(b / a > 1.3 for a, b in pairwise(distinct)):
        axes.xaxis.set_major_locator(FixedLocator(distinct))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shorten(float(f"{value:.3g}"))))

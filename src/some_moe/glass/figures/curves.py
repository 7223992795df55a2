"""Curves of a training, over steps and over tokens: loss, evenness of the load; and several runs beside each other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from some_moe.glass.figures import canvas
from some_moe.glass.figures.canvas import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, Drawing, styled
from some_moe.glass.inspect.movement import LayerMovement
from some_moe.glass.inspect.runs import RunRecord
from some_moe.glass.page.comparison import Compared
from some_moe.metrics.usage import entropy_bits, gini

Line = tuple[list[float], list[float]]
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, "#b58900", "#3aa6d0", "#8c4a2f", "#5b5f97")
MARKERS = "osD^vPX*"
LONGEST_LABEL = 30
MOST_POINTS = 300  # of a training curve: more are averaged
LEGEND_ROW = 0.1  # inches an entry, for two stand in a row


def read_curve(records: Sequence[dict[str, Any]], x: str, y: str) -> Line:
    """The pairs (x, y) of the records that have both."""
    pairs = [(record[x], record[y]) for record in records if record.get(x) is not None and record.get(y) is not None]
    return [float(a) for a, _ in pairs], [float(b) for _, b in pairs]


@styled
def draw_loss(run: RunRecord) -> Drawing:
    """Training and validation loss, over steps and over trained tokens."""
    figure, panels = canvas.make_panels(2, "Loss during training", height=2.3, share_y=True)
    padded = run.config.data.loss_on == "all_positions"
    kinds = (("step", "training step", "Over steps"), ("tokens", "trained tokens", "Over trained tokens"))
    for axes, (x, label, title) in zip(panels, kinds, strict=True):
        _plot(axes, read_curve(run.steps, x, "train_loss"), "train, over padding too" if padded else "train", GREY, "-")
        _plot(axes, read_curve(run.evaluations, x, "val_loss"), "valid", BLUE, "o-")
        if padded:
            curve = read_curve(run.evaluations, x, "val_loss_padded")
            _plot(axes, curve, "valid, over padding too", ORANGE, "s--")
        axes.set(ylabel="loss (nats per token)", xlabel=label, title=title)
        canvas.show_short_numbers(axes)
        axes.set_xlim(left=0)
    canvas.add_legend_below(figure, panels[0], 2 if padded else 3)
    best = min(read_curve(run.evaluations, "step", "val_loss")[1], default=None)
    found = "" if best is None else f" The best validation loss is {best:.4f} nats per real token."
    caption = "Training loss of single steps, and the loss over the whole validation split."
    return Drawing("loss", figure, caption + found)


def _plot(axes: Axes, curve: Line, label: str, colour: str, style: str) -> None:
    if curve[0]:
        axes.plot(*curve, style, color=colour, label=label, markersize=5)


@styled
def draw_usage_over_steps(run: RunRecord, movements: Sequence[LayerMovement]) -> Drawing:
    """Gini and entropy of each layer's load: running in training (lines), in evaluations (dots)."""
    figure, (top, bottom) = canvas.make_panels(2, "Evenness of the load during training", height=2.1, share_x=True)
    evaluated = [record for record in run.evaluations if record.get("layers")]
    colours = canvas.layer_colours(max([len(movements), *(len(record["layers"]) for record in evaluated)]))
    steps, style = [record["step"] for record in evaluated], "o" if movements else "o-"
    for axes, name, measure in ((top, "gini", gini), (bottom, "entropy_bits", entropy_bits)):
        for movement, colour in zip(movements, colours, strict=False):
            loads = [measure(torch.from_numpy(usage)) for usage in movement.usage]
            axes.plot(movement.steps, loads, color=colour)
        for place, colour in enumerate(colours):
            axes.plot(steps, [record["layers"][place][name] for record in evaluated], style, color=colour)
            axes.plot([], [], color=colour, label=f"layer {place}")  # for the legend alone
    if not movements:
        _plot(top, read_curve(run.steps, "step", "gini_middle"), "", GREY, "-")
    limit = float(np.log2(run.config.model.num_experts))
    bottom.axhline(limit, color=INK, linewidth=0.9, linestyle="--")
    top.set(ylim=(0, 1), ylabel="gini", title="Gini: 0 is even")
    bottom.set(ylim=(0, limit * 1.08 or 1.0), ylabel="entropy (bits)", xlabel="training step")
    bottom.set(title="Entropy: the dashed line is even")
    bottom.set_xlim(left=0)
    canvas.show_short_numbers(bottom)
    canvas.add_legend_below(figure, top, 4)
    lines = "Lines: running load in training" if movements else "Grey line: the middle layer in single training steps"
    return Drawing("usage_over_steps", figure, f"{lines}. Dots: evaluations on the validation split.")


# --- several runs --------------------------------------------------------------------------------------------


@styled
def draw_losses(runs: Sequence[Compared]) -> Drawing:
    """Loss against tokens: thin lines for training, marked lines for validation."""
    looks = choose_looks(runs)
    figure, (axes,) = canvas.make_panels(1, "Loss against tokens", height=3.3 + LEGEND_ROW * len(looks))
    train = [read_curve(one.run.steps, "tokens", "train_loss") for one in runs]
    valid = [read_curve(one.run.evaluations, "tokens", "val_loss") for one in runs]
    for one, thin, marked in zip(runs, train, valid, strict=True):
        colour, marker = looks[one.group]
        axes.plot(*average_neighbours(*thin), color=colour, linewidth=0.8, alpha=0.45)
        axes.plot(*marked, color=colour, marker=marker, markersize=4.5)
    axes.set(xlabel="trained tokens", ylabel="loss (nats per token)")
    canvas.show_short_numbers(axes)
    axes.set_xlim(left=0)
    losses = [loss for _, curve in valid for loss in curve]
    lowest = min([*losses, *(loss for _, curve in train for loss in curve)], default=0.0)
    room = max(losses, default=0.0) - lowest
    if losses and room > 0:  # the ends are to be compared, not the beginnings
        axes.set_ylim(lowest - 0.08 * room, max(losses) + 0.6 * room)
    for group, (colour, marker) in looks.items():  # for the legend alone
        axes.plot([], [], color=colour, marker=marker, markersize=4.5, label=show_name(group))
    axes.plot([], [], color=INK, linewidth=0.8, alpha=0.6, label="thin: training")
    canvas.add_legend_below(figure, axes, 2)
    caption = (
        "Thin lines: loss of single training steps. Marked lines: loss over the validation split, real tokens "
        "alone. Runs of one experiment with several seeds look alike. The first steps may lie above the frame."
    )
    return Drawing("losses", figure, caption)


@styled
def draw_sizes(runs: Sequence[Compared]) -> Drawing | None:
    """Perplexity against parameters, trained and in all; None where no run has been scored."""
    scored = [one for one in runs if one.figures.get("perplexity") is not None]
    if not scored:
        return None
    looks = choose_looks(scored)
    height = 2.3 + LEGEND_ROW * len(looks) / 2
    figure, panels = canvas.make_panels(2, "Perplexity against parameters", height=height)
    kinds = (("trainable", "trained parameters"), ("total", "all parameters, frozen experts included"))
    for axes, (kind, name) in zip(panels, kinds, strict=True):
        sizes = [one.figures[f"{kind}_parameters"] for one in scored]
        for one, size in zip(scored, sizes, strict=True):
            colour, marker = looks[one.group]
            axes.plot([size], [one.figures["perplexity"]], marker, color=colour, markersize=7, alpha=0.85)
        axes.set(xscale="log", xlabel=f"{name} (logarithmic)", ylabel="perplexity (valid)")
        axes.set_xlim(min(sizes) / 1.6, max(sizes) * 1.6)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: canvas.shorten(value)))
    for group, (colour, marker) in looks.items():  # for the legend alone
        panels[0].plot([], [], marker, color=colour, label=show_name(group))
    canvas.add_legend_below(figure, panels[0], 2)
    caption = "Validation perplexity per real token at the last step, against the parameters that are trained and "
    return Drawing("sizes", figure, caption + "against all that there are.")


def choose_looks(runs: Sequence[Compared]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each group, in order of appearance."""
    groups = dict.fromkeys(one.group for one in runs)
    return {group: (COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)]) for n, group in enumerate(groups)}


def show_name(name: str) -> str:
    """A run's name as a label: shortened, never read as mathematics, never hidden for a leading underscore."""
    short = name if len(name) <= LONGEST_LABEL else name[: LONGEST_LABEL - 1] + "…"
    return ("\u200b" if short.startswith("_") else "") + short.replace("$", r"\$")


def average_neighbours(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """At most MOST_POINTS points of a curve."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    if len(xs) <= MOST_POINTS:
        return xs, ys
    parts = np.array_split(np.arange(len(xs)), MOST_POINTS)
    return np.array([xs[part].mean() for part in parts]), np.array([ys[part].mean() for part in parts])

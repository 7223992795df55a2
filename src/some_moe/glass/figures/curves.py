"""Figures of training itself: loss and evenness of the load, over steps and over tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from some_moe.glass.figures.canvas import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    Drawing,
    add_legend_below,
    layer_colours,
    make_panels,
    show_short_numbers,
    styled,
)
from some_moe.glass.inspect.movement import LayerMovement
from some_moe.glass.inspect.runs import RunRecord
from some_moe.metrics.usage import entropy_bits, gini

Line = tuple[list[float], list[float]]


def read_curve(records: Sequence[dict[str, Any]], x: str, y: str) -> Line:
    """The pairs (x, y) of the records that have both."""
    pairs = [(record[x], record[y]) for record in records if record.get(x) is not None and record.get(y) is not None]
    return [float(a) for a, _ in pairs], [float(b) for _, b in pairs]


@styled
def draw_loss(run: RunRecord) -> Drawing:
    """Training and validation loss, over steps and over trained tokens."""
    figure, panels = make_panels(2, "Loss during training", height=2.3, share_y=True)
    padded = run.config.data.loss_on == "all_positions"
    for axes, x, label in zip(panels, ("step", "tokens"), ("training step", "trained tokens"), strict=True):
        _plot(axes, read_curve(run.steps, x, "train_loss"), "train, over padding too" if padded else "train", GREY, "-")
        _plot(axes, read_curve(run.evaluations, x, "val_loss"), "valid", BLUE, "o-")
        if padded:
            curve = read_curve(run.evaluations, x, "val_loss_padded")
            _plot(axes, curve, "valid, over padding too", ORANGE, "s--")
        axes.set(
            ylabel="loss (nats per token)", xlabel=label, title="Over steps" if x == "step" else "Over trained tokens"
        )
        show_short_numbers(axes)
        axes.set_xlim(left=0)
    add_legend_below(figure, panels[0], 2 if padded else 3)
    best = min(read_curve(run.evaluations, "step", "val_loss")[1], default=None)
    found = "" if best is None else f" The best validation loss is {best:.4f} nats per real token."
    return Drawing(
        "loss", figure, "Training loss of single steps, and the loss over the whole validation split." + found
    )


def _plot(axes: Axes, curve: Line, label: str, colour: str, style: str) -> None:
    if curve[0]:
        axes.plot(*curve, style, color=colour, label=label, markersize=5)


@styled
def draw_usage_over_steps(run: RunRecord, movements: Sequence[LayerMovement]) -> Drawing:
    """Gini and entropy of each layer's load: running in training (lines), in evaluations (dots)."""
    figure, (top, bottom) = make_panels(2, "Evenness of the load during training", height=2.1, share_x=True)
    evaluated = [record for record in run.evaluations if record.get("layers")]
    num_layers = max([len(movements), *(len(record["layers"]) for record in evaluated)])
    colours = layer_colours(num_layers)
    steps, style = [record["step"] for record in evaluated], "o" if movements else "o-"
    for axes, name, measure in ((top, "gini", gini), (bottom, "entropy_bits", entropy_bits)):
        for movement, colour in zip(movements, colours, strict=False):
            loads = [measure(torch.from_numpy(usage)) for usage in movement.usage]
            axes.plot(movement.steps, loads, color=colour)
        for place, colour in enumerate(colours):
            axes.plot(steps, [record["layers"][place][name] for record in evaluated], style, color=colour)
    if not movements:
        _plot(top, read_curve(run.steps, "step", "gini_middle"), "", GREY, "-")
    limit = float(np.log2(run.config.model.num_experts))
    bottom.axhline(limit, color=INK, linewidth=0.9, linestyle="--")
    top.set(ylim=(0, 1), ylabel="gini", title="Gini: 0 is even")
    bottom.set(ylim=(0, limit * 1.08 or 1.0), ylabel="entropy (bits)", xlabel="training step")
    bottom.set(title="Entropy: the dashed line is even")
    bottom.set_xlim(left=0)
    show_short_numbers(bottom)
    for place, colour in enumerate(colours):  # for the legend alone
        top.add_line(Line2D([], [], color=colour, label=f"layer {place}"))
    add_legend_below(figure, top, 4)
    lines = "Lines: running load in training" if movements else "Grey line: the middle layer in single training steps"
    return Drawing("usage_over_steps", figure, f"{lines}. Dots: evaluations on the validation split.")

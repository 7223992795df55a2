"""Figures of the key stores: maps of the keys, the paths they took, and how fast they went."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from some_moe.glass.figures.canvas import (
    INK,
    SOFT,
    Drawing,
    add_legend_below,
    choose_columns,
    layer_colours,
    make_panels,
    rank_colours,
    show_short_numbers,
    styled,
)
from some_moe.glass.inspect.layers import LayerNumbers
from some_moe.glass.inspect.movement import LayerMovement
from some_moe.glass.inspect.projections import KeyMap

METHOD_NAMES = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}
MOST_LABELLED_EXPERTS = 32
LARGEST_POINT = 380  # its area, in square points
PANEL_INCHES = np.array([4.2, 3.0])  # of a panel that stands alone in its row, within its axes
LABEL_INCHES = np.array([0.2, 0.13])  # what a number needs to be read
COLOUR_RULE = "A colour is an expert's rank along the first principal axis of its layer, the same in every figure."


def expert_colours(depths: Sequence[int], pca_maps: Sequence[KeyMap]) -> dict[int, list[str]]:
    """A colour for each expert of each layer, the same on all maps: its rank along the first principal axis."""
    return {layer: rank_colours(key_map.points[:, 0]) for layer, key_map in zip(depths, pca_maps, strict=True)}


@styled
def draw_key_map(
    maps: Sequence[KeyMap], layers: Sequence[LayerNumbers], colours: Mapping[int, Sequence[str]]
) -> Drawing:
    """The keys of every layer on a plane, all by the same method. colours: of the experts, by layer."""
    name = METHOD_NAMES[maps[0].method]
    columns = choose_columns(len(maps))
    figure, panels = make_panels(
        len(maps), f"Map of the keys by {name}", height=3.6 if columns == 1 else 2.4, columns=columns
    )
    for axes, key_map, layer in zip(panels, maps, layers, strict=True):
        shown = "PCA" if key_map.note else name
        load = np.array(layer.loads)
        _scatter(axes, key_map.points, 18 + 60 * load, colours[layer.layer], hollow=load == 0, labels=columns == 1)
        axes.set(
            title=f"layer {layer.layer}" + (" (by PCA, see below)" if key_map.note else ""),
            xlabel=f"{shown} 1",
            ylabel=f"{shown} 2",
        )
        if shown == "PCA":
            axes.set_aspect("equal", adjustable="datalim")
        else:  # their scales mean nothing
            axes.tick_params(labelbottom=False, labelleft=False, length=0)
    notes = list(dict.fromkeys(key_map.note for key_map in maps if key_map.note))
    caption = (
        "Each point is an expert's key at unit length; its size is the expert's load, and hollow ones were never "
        f"chosen. {COLOUR_RULE}"
    )
    return Drawing(f"keys_{maps[0].method}", figure, " ".join([caption, *notes]))


def _scatter(
    axes: Axes, points: np.ndarray, sizes: np.ndarray, colours: Sequence[str], *, hollow: np.ndarray, labels: bool
) -> None:
    """Experts as points (E, 2) with these areas; hollow (E,) ones are grey rings."""
    sizes = np.minimum(sizes, LARGEST_POINT) * min(1.0, 40 / len(points))  # many experts get small points
    faces = ["none" if empty else colour for empty, colour in zip(hollow, colours, strict=True)]
    edges = [SOFT if empty else "white" for empty in hollow]
    axes.scatter(points[:, 0], points[:, 1], s=sizes, c=faces, edgecolors=edges, linewidths=0.8, zorder=3)
    axes.margins(0.1)
    if labels and len(points) <= MOST_LABELLED_EXPERTS:
        for together in group_neighbours(points):
            place = points[together][points[together, 0].argmax()]
            offset = 0.35 * float(np.sqrt(sizes[together].max())) + 1.5
            text = ", ".join(map(str, together))
            axes.annotate(
                text,
                place,
                (offset, offset),
                textcoords="offset points",
                fontsize=8.5,
                color=INK,
                zorder=2.9,  # its white ground hides lines, but no point
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.6},
            )


def group_neighbours(points: np.ndarray) -> list[list[int]]:
    """Points (E, 2) whose numbers would overlap, so that they must share a label."""
    units_an_inch = max(1e-12, *(1.2 * np.ptp(points, axis=0) / PANEL_INCHES))
    groups: list[list[int]] = []
    for number, point in enumerate(points):
        for group in groups:
            if np.all(np.abs(points[group].mean(0) - point) < LABEL_INCHES * units_an_inch):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


@styled
def draw_key_paths(movements: Sequence[LayerMovement], colours: Mapping[int, Sequence[str]]) -> Drawing:
    """The way of every key, from its hollow beginning to its end. colours: of the experts, by layer."""
    columns = choose_columns(len(movements))
    figure, panels = make_panels(
        len(movements), "Paths of the keys during training", height=3.6 if columns == 1 else 2.4, columns=columns
    )
    for axes, movement in zip(panels, movements, strict=True):
        paths, hues = movement.paths, list(colours[movement.layer])
        axes.add_collection(LineCollection(list(paths.transpose(1, 0, 2)), colors=hues, linewidths=1.3))
        x, y = paths[0].T
        axes.scatter(x, y, s=12, facecolors="white", edgecolors=hues, linewidths=1.0, zorder=2.5)
        nobody = np.zeros(len(hues), bool)
        _scatter(axes, paths[-1], 14 + 34 * movement.usage[-1], hues, hollow=nobody, labels=columns == 1)
        axes.set_aspect("equal", adjustable="datalim")
        first, second = 100 * movement.variance
        axes.set(
            title=f"layer {movement.layer}: mean drift {movement.drift.mean():.2f}",
            xlabel=f"axis 1 ({first:.0f} % of variance)",
            ylabel=f"axis 2 ({second:.0f} %)",
        )
    steps = movements[0].steps
    still = all(not movement.drift.any() for movement in movements)
    caption = (
        f"The keys of each layer from step {steps[0]:,} (hollow) to step {steps[-1]:,} (filled, sized by the "
        f"running load), on the two principal axes of all snapshots together. {COLOUR_RULE}"
    )
    return Drawing("key_paths", figure, caption + (" No key moved." if still else ""))


@styled
def draw_key_drift(movements: Sequence[LayerMovement]) -> Drawing:
    """How far the keys are from their beginning, and how fast they go, over training."""
    figure, (top, bottom) = make_panels(2, "How far and how fast the keys move", height=2.1, share_x=True)
    for movement, colour in zip(movements, layer_colours(len(movements)), strict=True):
        steps, distance = movement.steps, movement.distance
        top.plot(steps, distance.mean(1), color=colour, label=f"layer {movement.layer}")
        if len(movements) <= 3:
            low, high = np.quantile(distance, (0.1, 0.9), axis=1)
            top.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
        middle_of_interval = (steps[1:] + steps[:-1]) / 2
        bottom.plot(middle_of_interval, 1000 * movement.speed.mean(1), color=colour)
    top.set(ylabel="distance", title="Mean distance of the keys from their beginning")
    bottom.set(ylabel="distance", title="Mean distance travelled in 1,000 steps", xlabel="training step")
    still = all(not movement.distance.any() for movement in movements)
    for axes in (top, bottom):
        axes.set_ylim(0, 1 if still else None)
    show_short_numbers(bottom)
    add_legend_below(figure, top, 4)
    band = " The band holds 80 % of the keys." if len(movements) <= 3 else ""
    moved = " No key moved." if still else ""
    return Drawing(
        "key_drift",
        figure,
        f"A key has length 1 at the start, so a distance of 1 is far.{band} Speeds are taken from snapshot to "
        f"snapshot.{moved}",
    )

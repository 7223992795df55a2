"""Figures of the key stores: maps of the keys, the paths they took, and how fast they went."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from some_moe.glass.figures import canvas
from some_moe.glass.figures.canvas import INK, SOFT, Drawing, styled
from some_moe.glass.figures.curves import show_name
from some_moe.glass.inspect.layers import LayerNumbers
from some_moe.glass.inspect.movement import LayerMovement
from some_moe.glass.inspect.projections import KeyMap

METHOD_NAMES = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}
MOST_LABELLED_EXPERTS = 32
LARGEST_POINT = 380  # its area, in square points
PANEL_INCHES = np.array([4.2, 3.0])  # of a panel that stands alone in its row, within its axes
LABEL_INCHES = np.array([0.2, 0.13])  # what a number needs to be read
LABEL_GROUND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.6}
Colours = Mapping[int, Sequence[str]]  # of the experts, by layer
COLOUR_RULE = "A colour is an expert's rank along the first principal axis of its layer, the same in every figure."


@styled
def draw_key_map(maps: Sequence[KeyMap], layers: Sequence[LayerNumbers], colours: Colours) -> Drawing:
    """The keys of every layer on a plane, all by the same method. colours: of the experts, by layer."""
    name = METHOD_NAMES[maps[0].method]
    figure, panels, alone = canvas.make_layer_panels(len(maps), f"Map of the keys by {name}", height=3.6, small=2.4)
    for axes, key_map, layer in zip(panels, maps, layers, strict=True):
        shown = "PCA" if key_map.note else name
        load = np.array(layer.loads)
        _scatter(axes, key_map.points, 18 + 60 * load, colours[layer.layer], hollow=load == 0, labels=alone)
        axes.set(xlabel=f"{shown} 1", ylabel=f"{shown} 2")
        axes.set_title(f"layer {layer.layer}" + (" (by PCA, see below)" if key_map.note else ""))
        if shown == "PCA":
            axes.set_aspect("equal", adjustable="datalim")
        else:  # their scales mean nothing
            axes.tick_params(labelbottom=False, labelleft=False, length=0)
    notes = list(dict.fromkeys(key_map.note for key_map in maps if key_map.note))
    caption = "Each point is an expert's key at unit length; its size is the expert's load, and hollow ones were never "
    return Drawing(f"keys_{maps[0].method}", figure, " ".join([f"{caption}chosen. {COLOUR_RULE}", *notes]))


@styled
def draw_branches(
    maps: Sequence[KeyMap], layers: Sequence[LayerNumbers], names: Sequence[str], owners: np.ndarray
) -> Drawing:
    """The keys of a base and of its branches on one map a layer. owners (E,): the number of each expert's name."""
    figure, panels, _ = canvas.make_layer_panels(len(maps), "Keys of the base and its branches", height=3.6, small=2.4)
    colours = [canvas.GREY, *canvas.spectrum(np.linspace(0, 1, len(names) - 1))]
    for axes, key_map, layer in zip(panels, maps, layers, strict=True):
        sizes = np.minimum(26 + 40 * np.array(layer.loads), LARGEST_POINT) * min(1.0, 60 / len(owners))
        for number, name in enumerate(names):
            x, y = key_map.points[owners == number].T
            marker = "o" if number == 0 else "Ds^vPX"[(number - 1) % 6]
            look = {"c": colours[number], "marker": marker, "edgecolors": "white", "linewidths": 0.5}
            axes.scatter(x, y, s=sizes[owners == number], label=show_name(name), zorder=3 if number else 2.5, **look)  # type: ignore[arg-type]
        axes.set(title=f"layer {layer.layer}", xlabel="PCA 1", ylabel="PCA 2")
        axes.set_aspect("equal", adjustable="datalim")
    canvas.add_legend_below(figure, panels[0], min(4, len(names)))
    caption = (
        "Each point is an expert's key at unit length; its size is the expert's load in the text that was replayed."
    )
    return Drawing("keys_branches", figure, caption)


def _scatter(
    axes: Axes, points: np.ndarray, sizes: np.ndarray, colours: Sequence[str], *, hollow: np.ndarray, labels: bool
) -> None:
    """Experts as points (E, 2) with these areas; hollow (E,) ones are grey rings."""
    sizes = np.minimum(sizes, LARGEST_POINT) * min(1.0, 40 / len(points))  # many experts get small points
    faces = ["none" if empty else colour for empty, colour in zip(hollow, colours, strict=True)]
    edges = [SOFT if empty else "white" for empty in hollow]
    axes.scatter(points[:, 0], points[:, 1], s=sizes, c=faces, edgecolors=edges, linewidths=0.8, zorder=3)
    axes.margins(0.1)
    if not labels or len(points) > MOST_LABELLED_EXPERTS:
        return
    for together in group_neighbours(points):
        place = points[together][points[together, 0].argmax()]
        offset = 0.35 * float(np.sqrt(sizes[together].max())) + 1.5
        text = axes.annotate(", ".join(map(str, together)), place, (offset, offset), textcoords="offset points")
        text.set(fontsize=8.5, color=INK, bbox=LABEL_GROUND, zorder=2.9)  # the white ground hides lines, but no point


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
    title = "Paths of the keys during training"
    figure, panels, alone = canvas.make_layer_panels(len(movements), title, height=3.6, small=2.4)
    for axes, movement in zip(panels, movements, strict=True):
        paths, hues = movement.paths, list(colours[movement.layer])
        axes.add_collection(LineCollection(list(paths.transpose(1, 0, 2)), colors=hues, linewidths=1.3))
        x, y = paths[0].T
        axes.scatter(x, y, s=12, facecolors="white", edgecolors=hues, linewidths=1.0, zorder=2.5)
        nobody = np.zeros(len(hues), bool)
        _scatter(axes, paths[-1], 14 + 34 * movement.usage[-1], hues, hollow=nobody, labels=alone)
        axes.set_aspect("equal", adjustable="datalim")
        first, second = 100 * movement.variance
        axes.set(xlabel=f"axis 1 ({first:.0f} % of variance)", ylabel=f"axis 2 ({second:.0f} %)")
        axes.set_title(f"layer {movement.layer}: mean drift {movement.drift.mean():.2f}")
    steps = movements[0].steps
    caption = (
        f"The keys of each layer from step {steps[0]:,} (hollow) to step {steps[-1]:,} (filled, sized by the "
        f"running load), on the two principal axes of all snapshots together. {COLOUR_RULE}"
    )
    return Drawing("key_paths", figure, caption + _say_if_still(movements))


def _say_if_still(movements: Sequence[LayerMovement]) -> str:
    return "" if any(movement.distance.any() for movement in movements) else " No key moved."


@styled
def draw_key_drift(movements: Sequence[LayerMovement]) -> Drawing:
    """How far the keys are from their beginning, and how fast they go, over training."""
    figure, (top, bottom) = canvas.make_panels(2, "How far and how fast the keys move", height=2.1, share_x=True)
    few, still = len(movements) <= 3, _say_if_still(movements)
    for movement, colour in zip(movements, canvas.layer_colours(len(movements)), strict=True):
        steps, distance = movement.steps, movement.distance
        top.plot(steps, distance.mean(1), color=colour, label=f"layer {movement.layer}")
        if few:
            low, high = np.quantile(distance, (0.1, 0.9), axis=1)
            top.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
        middle_of_interval = (steps[1:] + steps[:-1]) / 2
        bottom.plot(middle_of_interval, 1000 * movement.speed.mean(1), color=colour)
    top.set(ylabel="distance", title="Mean distance of the keys from their beginning")
    bottom.set(ylabel="distance", title="Mean distance travelled in 1,000 steps", xlabel="training step")
    for axes in (top, bottom):
        axes.set_ylim(0, 1 if still else None)
    canvas.show_short_numbers(bottom)
    canvas.add_legend_below(figure, top, 4)
    band = " The band holds 80 % of the keys." if few else ""
    caption = f"A key has length 1 at the start, so a distance of 1 is far.{band} Speeds are taken from snapshot to "
    return Drawing("key_drift", figure, f"{caption}snapshot.{still}")

"""Names beside points, placed so that none hides another, or a point."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from some_moe.glass.figures.canvas import INK, SOFT

FONT_SIZE = 8.5
MARK_RADIUS = 3.5  # points
DISTANCES = (7, 14, 22, 31, 41, 52)  # points, from the mark to the middle of the nearest side of the name
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
FREE_STANDING = 10  # a name farther away than this gets a line to its mark
LINE = {"arrowstyle": "-", "color": SOFT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
BACKGROUND = {"facecolor": "white", "alpha": 0.65, "linewidth": 0, "pad": 0.5}


def find_renderer(axes: Axes) -> RendererBase:
    """What knows how large a text becomes."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    assert isinstance(figure.canvas, FigureCanvasAgg)
    return figure.canvas.get_renderer()  # type: ignore[no-untyped-call, no-any-return]


def place_labels(
    axes: Axes, names: Sequence[tuple[float, float, str]], bars: Sequence[tuple[float, float, float]]
) -> None:
    """Write each name near its point, in the first place that is free; the layout must be settled.

    names: (x, y, name). bars: what no name should cover, (x, lowest y, highest y); a point is a bar without height.
    """
    renderer, pixels = find_renderer(axes), axes.figure.dpi / 72  # pixels a point
    radius, frame = MARK_RADIUS * pixels, axes.get_window_extent(renderer)
    look: Any = {"fontsize": FONT_SIZE, "color": INK, "in_layout": False}
    taken = []
    for x, low, high in bars:
        (left, bottom), (right, top) = axes.transData.transform([(x, low), (x, high)])
        taken.append(Bbox.from_extents(left - radius, bottom - radius, right + radius, top + radius))
    for x, y, name in sorted(names):
        text = axes.annotate(name, (x, y), **look)
        size = text.get_window_extent(renderer)
        text.remove()
        places = _list_places(axes.transData.transform((x, y)), size, pixels)
        # Whole pixels that would be hidden or lie outside the frame, then the distance.
        best = min(places, key=lambda place: (round(_count_hidden(place.box, frame, taken)), place.distance))
        taken.append(best.box)
        axes.annotate(
            name,
            (x, y),
            xytext=best.offset,
            textcoords="offset points",
            arrowprops=LINE if best.distance > FREE_STANDING else None,
            bbox=BACKGROUND,
            zorder=5,
            **look,
        )


@dataclass(frozen=True)
class Place:
    """Where a name could stand: its distance from the point and the offset of its corner, in points; its box."""

    distance: float
    offset: tuple[float, float]
    box: Bbox


def _list_places(point: np.ndarray, size: Bbox, pixels: float) -> Iterator[Place]:
    """Candidates, nearest first."""
    for distance, (right, up) in product(DISTANCES, DIRECTIONS):
        reach = distance * pixels * (0.75 if right and up else 1.0)
        dx, dy = right * reach + (right - 1) * size.width / 2, up * reach + (up - 1) * size.height / 2
        box = Bbox.from_bounds(point[0] + dx, point[1] + dy, size.width, size.height)
        yield Place(distance, (dx / pixels, dy / pixels), box)


def _count_hidden(box: Bbox, frame: Bbox, taken: Sequence[Bbox]) -> float:
    """Pixels of a name that hide something, or lie outside the frame."""
    return sum(_overlap(box, other) for other in taken) + box.width * box.height - _overlap(box, frame)


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width * height if width > 0 and height > 0 else 0.0

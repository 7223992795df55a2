"""Names beside points, placed so that none hides another, or a point."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from some_moe.glass.figures.canvas import INK, SOFT

FONT_SIZE = 8.5
MARK_RADIUS = 3.5  # points
DISTANCES = (7, 14, 22, 31, 41, 52)  # points, from the mark to the middle of the nearest side of the name
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
FREE_STANDING = 10  # a name farther away than this gets a line to its mark


@dataclass(frozen=True)
class Label:
    """A name and the point it belongs to, in the axes' units."""

    text: str
    x: float
    y: float


def place_labels(axes: Axes, labels: Sequence[Label], bars: Sequence[tuple[float, float, float]]) -> None:
    """Write each name near its point, in the first place that is free; the layout must be settled.

    bars: what no name should cover, each (x, lowest y, highest y); a point is a bar without height.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    renderer, pixels_a_point = canvas.get_renderer(), figure.dpi / 72  # type: ignore[no-untyped-call]
    frame = axes.get_window_extent(renderer)
    taken = [_box_around(axes, bar, MARK_RADIUS * pixels_a_point) for bar in bars]
    for label in sorted(labels, key=lambda label: (label.x, label.y, label.text)):
        x, y = axes.transData.transform((label.x, label.y))
        text = axes.annotate(label.text, (label.x, label.y), fontsize=FONT_SIZE, color=INK, in_layout=False)
        size = text.get_window_extent(renderer)
        text.remove()
        best = min(_places(size.width, size.height, pixels_a_point), key=lambda p: _cost(p, x, y, size, frame, taken))
        distance, dx, dy = best
        taken.append(Bbox.from_bounds(x + dx, y + dy, size.width, size.height))
        line = {"arrowstyle": "-", "color": SOFT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(dx / pixels_a_point, dy / pixels_a_point),
            textcoords="offset points",
            fontsize=FONT_SIZE,
            color=INK,
            in_layout=False,
            arrowprops=line if distance > FREE_STANDING else None,
            bbox={"facecolor": "white", "alpha": 0.65, "linewidth": 0, "pad": 0.5},
            zorder=5,
        )


def _box_around(axes: Axes, bar: tuple[float, float, float], radius: float) -> Bbox:
    x, low, high = bar
    (left, bottom), (right, top) = axes.transData.transform([(x, low), (x, high)])
    return Bbox.from_extents(left - radius, bottom - radius, right + radius, top + radius)


def _places(width: float, height: float, pixels_a_point: float) -> Iterator[tuple[float, float, float]]:
    """Candidates, nearest first: (distance in points, x and y of the name's corner from the point, in pixels)."""
    for distance, (right, up) in product(DISTANCES, DIRECTIONS):
        reach = distance * pixels_a_point * (0.75 if right and up else 1.0)
        yield distance, right * reach + (right - 1) * width / 2, up * reach + (up - 1) * height / 2


def _cost(
    place: tuple[float, float, float], x: float, y: float, size: Bbox, frame: Bbox, taken: Sequence[Bbox]
) -> tuple[float, float]:
    """Whole pixels that would be hidden or lie outside the frame, then the distance."""
    distance, dx, dy = place
    box = Bbox.from_bounds(x + dx, y + dy, size.width, size.height)
    inside = _overlap(box, frame)
    hidden = sum(_overlap(box, other) for other in taken)
    return round(hidden + size.width * size.height - inside), distance


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width * height if width > 0 and height > 0 else 0.0

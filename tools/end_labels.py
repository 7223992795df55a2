"""Names at the right ends of lines, one above the other, so that none hides another."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from tools.label_places import FONT_SIZE, find_renderer

LEADING = 1.05  # from one name to the next, in heights of a line of text
JOIN: Any = {"arrowstyle": "-", "linewidth": 0.6, "alpha": 0.7, "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 3}


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]], x: float) -> None:
    """Write each name from x on, as near to the height of its line's end as the others let it; a thin line joins them.

    ends: (name, x and y of the line's last point, colour). The layout must be settled, and the y axis linear.
    """
    sample = axes.text(x, 0, "Ag", fontsize=FONT_SIZE, in_layout=False)
    height = sample.get_window_extent(find_renderer(axes)).height
    sample.remove()
    low, high = axes.get_ylim()
    line = LEADING * height / axes.bbox.height * (high - low)
    ordered = sorted(ends, key=lambda end: end[2])  # stable: of equal ends the first named stays lowest
    places = spread_apart([y for _, _, y, _ in ordered], gap=line, low=low + line / 2, high=high - line / 2)
    for (name, end, y, colour), place in zip(ordered, places, strict=True):
        look: Any = {"color": colour, "fontsize": FONT_SIZE, "va": "center_baseline", "in_layout": False, "zorder": 5}
        axes.annotate(name, (end, y), xytext=(x, place), arrowprops={**JOIN, "color": colour}, **look)


def spread_apart(wanted: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Return places at least `gap` apart within [low, high], with the least sum of squared distances to the wanted.

    wanted: in rising order. Where the room is too small for all, the last ones lie above `high`.
    """
    # Without their gaps the places need only rise: neighbours that would fall share the mean of what they want.
    blocks: list[tuple[float, int]] = []  # (mean, how many)
    for index, value in enumerate(wanted):
        mean, size = value - index * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, others = blocks.pop()
            mean, size = (before * others + mean * size) / (others + size), others + size
        blocks.append((mean, size))
    highest = high - (len(wanted) - 1) * gap
    rising = [max(low, min(highest, mean)) for mean, size in blocks for _ in range(size)]
    return [place + index * gap for index, place in enumerate(rising)]

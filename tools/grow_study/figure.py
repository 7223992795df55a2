"""Lost against gained: every method's curve, and the frontier of those that have neither old text nor labels."""

from typing import Any

from some_moe.glass.figures.canvas import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SOFT, make_panels, styled
from tools.grow_study.page import CEILINGS, WHOLE_ROW, Results
from tools.grow_study.plan import METHODS, OLD
from tools.published_figures import PublishedFigure, settle

FARTHEST = 0.6  # nats lost that are still shown
LOOKS: dict[str, dict[str, Any]] = {
    "grow": {"color": BLUE, "marker": "o", "linewidth": 2.0, "zorder": 4},
    "grow-lora": {"color": BLUE, "marker": "o", "markerfacecolor": "white", "linewidth": 1.2},
    "grow-wide": {"color": BLUE, "marker": "s", "linestyle": "--"},
    "grow-context": {"color": INK, "marker": "o", "linewidth": 2.4, "zorder": 5},
    "grow-context-lora": {"color": INK, "marker": "o", "markerfacecolor": "white", "linewidth": 1.2},
    "grow-told": {"color": INK, "marker": "*", "markersize": 11},
    "gradient": {"color": ORANGE, "marker": "s"},
    "centroid": {"color": ORANGE, "marker": "^", "linestyle": "--"},
    "gate": {"color": ORANGE, "marker": "v", "linestyle": ":"},
    "turn": {"color": GREEN, "marker": "s"},
    "arithmetic": {"color": GREEN, "marker": "^", "linestyle": "--"},
    "adapters": {"color": PURPLE, "marker": "D"},
    "adapters-words": {"color": PURPLE, "marker": "d", "linestyle": "--"},
    "adapters-told": {"color": PURPLE, "marker": "*", "markersize": 11},
    "alone-words": {"color": GREEN, "marker": "d", "linestyle": ":"},
    "alone-told": {"color": GREEN, "marker": "*", "markersize": 11},
    "replay-written": {"color": INK, "marker": "x", "linestyle": ":"},
    "replay-1": {"color": GREY, "marker": ".", "linestyle": ":"},
    "replay-5": {"color": GREY, "marker": ".", "linestyle": "--"},
    "replay-20": {"color": GREY, "marker": "."},
    "joint": {"color": BLUE, "marker": "P", "markersize": 8},
    "joint-dense": {"color": GREEN, "marker": "P", "markersize": 8},
}


@styled
def draw_frontier(results: Results) -> PublishedFigure:
    title = "What is lost, and what is gained"
    figure, (axes,) = make_panels(1, title, height=5.6)
    curves = {name: results.curve(name) for name in METHODS}
    for name, points in curves.items():
        shown = [point for point in sorted(points) if point[0] <= FARTHEST]
        if shown:
            look: dict[str, Any] = {"markersize": 4, "linewidth": 1.2} | LOOKS[name]
            if name in CEILINGS:
                look["linestyle"] = "none"
            mark = " †" if METHODS[name].needs == OLD else " §" if name in WHOLE_ROW else ""
            axes.plot(*zip(*shown, strict=True), label=METHODS[name].words + mark, **look)
    free = [point for name, points in curves.items() if not METHODS[name].needs for point in points]
    front = find_frontier([point for point in free if point[0] <= FARTHEST])
    if front:
        xs, ys = zip(*front, strict=True)
        axes.step(xs, ys, where="post", color=SOFT, linewidth=5, alpha=0.25, label="frontier", zorder=0)
    axes.axvline(0.05, color=SOFT, linewidth=0.8, linestyle=(0, (2, 3)))
    axes.set_xlabel("lost on the base's text (nats a token)")
    axes.set_ylabel("gained: mean loss on the domains (nats a token)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.42, -0.14), ncols=2, fontsize=8, handlelength=2.6)
    settle(figure)
    caption = (
        "Left and down is better. Each curve is one method at its chosen rate, a point for each favour, share or "
        f"factor, means over seeds on test; what loses more than {FARTHEST} is not shown. The band is the "
        "frontier of methods that have neither old text nor labels; the dotted line is 0.05. † has old text, § "
        "reads a row to its end before it chooses."
    )
    return PublishedFigure(title=title, caption=caption, figure=figure, content=[curves, front])


def find_frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both, from the left."""
    front: list[tuple[float, float]] = []
    for lost, gained in sorted(points):
        if not front or gained < front[-1][1]:
            front.append((lost, gained))
    return front

"""How far each reader is ahead of still keys while it reads: keys alone, and beside what learns or counts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from some_moe.glass.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SOFT,
    make_panels,
    show_short_numbers,
    styled,
)
from tools.published_figures import PublishedFigure, settle

COLOURS = {"gravity": BLUE, "random": ORANGE, "bias": GREEN, "dynamic": PURPLE, "trigram": GREY}
POINTS = 120


@styled
def draw_gains(base: str, seeds: Mapping[int, Mapping[str, Any]]) -> PublishedFigure:
    """Means over seeds of chunks that are averaged to at most POINTS points."""
    title = f"Ahead of still keys while it reads, {base} experts"
    figure, panels = make_panels(2, title, height=2.6, share_x=True)
    first = next(iter(seeds.values()))
    sizes = np.array([size for text in first["texts"] for size in text["sizes"]], float)
    group = -(-len(sizes) // POINTS)
    read = [float(sizes[: start + group].sum()) for start in range(0, len(sizes), group)]
    shown: dict[str, list[float]] = {}
    for who, colour in COLOURS.items():
        gains = []
        for record in seeds.values():
            losses = {one["who"]: one["losses"] for one in record["readers"]}
            if who in losses and None not in losses[who]:
                gains.append(np.array(losses["still"]) - np.array(losses[who]))
        if gains:
            curve = np.mean(gains, axis=0)
            shown[who] = [float(np.mean(curve[start : start + group])) for start in range(0, len(curve), group)]
            for axes in panels[0 if who in ("gravity", "random") else 1 :]:
                axes.plot(read, shown[who], color=colour, label=who, linewidth=1.4)
    for axes in panels:
        axes.axhline(0, color=SOFT, linewidth=0.8)
        for end in np.cumsum([sum(text["sizes"]) for text in first["texts"]])[:-1]:
            axes.axvline(float(end), color=SOFT, linewidth=0.8, linestyle=(0, (2, 3)))
        axes.set_ylabel("nats a token ahead")
        show_short_numbers(axes)
        axes.legend(loc="upper left", fontsize=8, ncols=5)
    panels[0].set_title("Keys alone")
    panels[1].set_title("Beside what learns or counts")
    panels[1].set_xlabel("tokens read: stories, Shakespeare, other stories")
    settle(figure)
    caption = "Above 0 is better than still keys. Means over seeds; dotted lines are where a text ends."
    return PublishedFigure(title=title, caption=caption, figure=figure, content=[shown, read])

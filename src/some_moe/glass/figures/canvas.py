"""The look that all figures share, and how a figure becomes a file: the same bytes for the same numbers.

Figures are five inches wide with ten-point text, so that they can still be read at the width of a phone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from some_moe.system.files import write_whole

WIDTH = 5.0  # inches
PIXELS_AN_INCH = 200
INK, SOFT, RULE = "#1c1f26", "#565d6b", "#e4e1da"
# Okabe and Ito's palette, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#aa4499", "#9aa0ab"
LONG_SIDE_COLUMNS = 4  # up to so many panels stand in one column, where there is room for numbers

STYLE: Any = {  # matplotlib types its names one by one; text stays text in SVG: it can be searched and read aloud
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 10, "text.color": INK,
    "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.labelsize": 10, "axes.labelcolor": INK,
    "axes.edgecolor": SOFT, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": RULE, "grid.linewidth": 0.7,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "legend.fontsize": 9, "legend.frameon": False, "lines.linewidth": 1.6,
    "figure.titlesize": 12, "figure.titleweight": "bold", "figure.facecolor": "white",
    "savefig.facecolor": "white", "svg.fonttype": "none", "svg.hashsalt": "some-moe",
}  # fmt: skip
# A file `matplotlibrc` of the reader's, or of the folder that he stands in, changes nothing: no look, no LaTeX.
LOOK: Any = {name: value for name, value in mpl.rcParamsDefault.items() if name != "backend"} | STYLE
styled = mpl.rc_context(LOOK)  # draw in the common look, without touching matplotlib's settings for anybody else


@dataclass(frozen=True)
class Drawing:
    """One figure with the words that belong to it."""

    name: str  # of its files
    figure: Figure
    caption: str  # how to read it

    @property
    def title(self) -> str:
        return str(self.figure.get_suptitle())

    def save(self, folder: Path) -> list[Path]:
        """Write NAME.png and NAME.svg; return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        png, svg = folder / f"{self.name}.png", folder / f"{self.name}.svg"
        with mpl.rc_context(LOOK):
            # Drawn once as a picture and once as SVG, from the same layout; nothing in them tells the time.
            picture, drawing = BytesIO(), BytesIO()
            self.figure.savefig(picture, format="png", dpi=PIXELS_AN_INCH, metadata={"Software": "some-moe"})
            self.figure.set_layout_engine("none")
            metadata = {"Date": None, "Creator": "some-moe", "Title": self.title}
            self.figure.savefig(drawing, format="svg", metadata=metadata)
        write_whole(png, picture.getvalue())
        write_whole(svg, drawing.getvalue())
        return [png, svg]

    def file(self, folder: Path) -> dict[str, str]:
        """Write it, and return what analysis.json says of it."""
        files = {path.suffix[1:]: f"{folder.name}/{path.name}" for path in self.save(folder)}
        return {"name": self.name, "title": self.title, "caption": self.caption, **files}


def make_panels(
    num: int, title: str, *, height: float, columns: int = 1, share_x: bool = False, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of `num` panels, each `height` inches high, read row by row; spare places stay empty."""
    rows = -(-num // columns)
    figure = Figure(figsize=(WIDTH, rows * height + 0.45), layout="constrained")
    FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.06, h_pad=0.06, hspace=0.04, wspace=0.05)  # type: ignore[call-arg]
    figure.suptitle(title, x=0.02, ha="left")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=share_x, sharey=share_y)
    axes: list[Axes] = list(grid.reshape(-1))
    for spare in axes[num:]:
        spare.remove()
    return figure, axes[:num]


def make_layer_panels(
    num: int, title: str, *, height: float, small: float, share_y: bool = False
) -> tuple[Figure, list[Axes], bool]:
    """A panel a layer, `height` inches high; of many layers two stand in a row, `small` inches high.

    The last value says whether each has its row alone, and with it room for numbers.
    """
    alone = num <= LONG_SIDE_COLUMNS
    columns = 1 if alone else 2
    figure, panels = make_panels(num, title, height=height if alone else small, columns=columns, share_y=share_y)
    return figure, panels, alone


def layer_colours(num: int) -> list[str]:
    """A colour a layer, from dark (first) to light (last): depth is an order."""
    return spectrum(np.linspace(0, 1, num) if num > 1 else np.zeros(1))


def spectrum(places: Iterable[float]) -> list[str]:
    """Colours for places between 0 and 1, on a scale that the colour-blind can read."""
    scale = mpl.colormaps["viridis"]
    return [mpl.colors.to_hex(scale(0.9 * float(place))) for place in places]


def rank_colours(values: np.ndarray) -> list[str]:
    """A colour an expert, by its rank among the values (E,)."""
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return spectrum(ranks / max(1, len(ranks) - 1))


def show_short_numbers(axes: Axes) -> None:
    """Thousands as k, millions as M, along the x axis."""
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shorten(value)))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))


def shorten(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def add_legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """One legend for the whole figure, under it, where it can hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=1.4, columnspacing=1.2)

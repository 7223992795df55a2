"""Figures of the experts' work: who is chosen, how evenly, and who is chosen together. Drawn from LayerNumbers."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from some_moe.glass.figures import canvas
from some_moe.glass.figures.canvas import BLUE, GREY, INK, ORANGE, PURPLE, RULE, SOFT, Drawing, styled
from some_moe.glass.inspect import layers as measures
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.communities import count_pairs
from some_moe.glass.inspect.layers import GENERALIST_LOAD, UNDER_USED_LOAD, LayerNumbers

MOST_NUMBERED_EXPERTS = 16  # a matrix of more has no room for their numbers
MOST_SEPARATE_BARS = 64  # in a row of panels; more stand without gaps
KINDS = {f"generalist (≥ {GENERALIST_LOAD:g}×)": ORANGE, "between": BLUE, f"under-used (< {UNDER_USED_LOAD:g}×)": GREY}


@styled
def draw_ranked_usage(layers: Sequence[LayerNumbers]) -> Drawing:
    """The load of every expert, busiest first, one panel a layer."""
    title = "Load of the experts, busiest first"
    figure, panels, alone = canvas.make_layer_panels(len(layers), title, height=1.95, small=1.95, share_y=True)
    floor = max(1e-4, min((load for layer in layers for load in layer.loads if load > 0), default=1.0) / 2)
    highest = max(layer.max_load for layer in layers)
    for place, (axes, layer) in enumerate(zip(panels, layers, strict=True)):
        loads = np.sort(layer.loads)[::-1]
        width = 0.86 if len(loads) * (1 if alone else 2) <= MOST_SEPARATE_BARS else 1.0
        colours = np.select([loads >= GENERALIST_LOAD, loads >= UNDER_USED_LOAD], [ORANGE, BLUE], GREY).tolist()
        axes.bar(np.arange(1, len(loads) + 1), np.maximum(0, loads - floor), width, floor, color=colours)
        axes.axhline(1, color=INK, linewidth=0.9, linestyle="--")
        used = f", {layer.experts_used} of {layer.num_experts} used" if alone else ""
        axes.set(yscale="log", ylim=(floor, max(2.0, 2 * highest)), xlim=(0.4, len(loads) + 0.6))
        axes.set_title(f"layer {layer.layer}: gini {layer.gini:.2f}{used}")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
        axes.grid(axis="x", visible=False)
        if alone or place % 2 == 0:  # labels at the left and at the bottom only: they are the same for all panels
            axes.set_ylabel("load (fair shares)")
        if place >= len(panels) - (1 if alone else 2):
            axes.set_xlabel("rank of the expert")
    for label, colour in KINDS.items():
        panels[0].bar(0, 0, color=colour, label=label)  # for the legend alone
    canvas.add_legend_below(figure, panels[0], 3)
    return Drawing(
        "usage_ranked",
        figure,
        "How many fair shares of a layer's selections each expert has, on a logarithmic scale. The dashed line "
        "is one fair share. Experts that were never chosen have no bar.",
    )


Lines = Mapping[str, tuple[str, str, str]]  # by label: a field of LayerNumbers, a style and a colour


@styled
def draw_usage_by_depth(layers: Sequence[LayerNumbers]) -> Drawing:
    """Gini, entropy and gate entropy of every layer."""
    title = "Evenness of the load, by depth"
    figure, (top, middle, bottom) = canvas.make_panels(3, title, height=1.7, share_x=True)
    ginis = {"this run": ("gini", "o-", BLUE), "hash of the token": ("hash_gini", "s--", GREY)}
    _plot_by_depth(top, layers, ginis, highest=1.0)
    top.set(ylabel="gini", title="Gini of the load: 0 is even")
    _plot_by_depth(middle, layers, {"": ("entropy_bits", "o-", PURPLE)}, limit=layers[0].max_entropy_bits)
    middle.set(ylabel="entropy (bits)", title="Entropy of the load: the dashed line is even")
    _plot_by_depth(bottom, layers, {"": ("gate_entropy_nats", "o-", ORANGE)}, limit=layers[0].max_gate_entropy_nats)
    bottom.set(ylabel="entropy (nats)", title="Gate entropy of a token: the dashed line is all alike", xlabel="layer")
    return Drawing(
        "usage_by_depth",
        figure,
        "Gini and entropy of the selections, and the mean entropy of a token's gate weights. The grey line is "
        "the gini if a hash of the token chose: frequent words alone make use uneven.",
    )


@styled
def draw_queries_by_depth(layers: Sequence[LayerNumbers]) -> Drawing:
    """How much the queries of every layer point one way."""
    title = "Directions of the queries, by depth"
    figure, (top, bottom) = canvas.make_panels(2, title, height=2.0, share_x=True)
    cosines = {
        "length of the mean query": ("query_collinearity", "o-", BLUE),
        "mean cosine of two queries": ("query_mean_cosine", "s--", ORANGE),
    }
    _plot_by_depth(top, layers, cosines, highest=1.0)
    top.set(ylabel="collinearity", title="Collinearity: 1 is all queries alike")
    ranks = {"queries": ("query_effective_rank", "o-", BLUE), "keys": ("key_effective_rank", "^--", PURPLE)}
    _plot_by_depth(bottom, layers, ranks)
    bottom.set(ylabel="effective rank", xlabel="layer", title="How many directions are really used")
    return Drawing(
        "queries_by_depth",
        figure,
        "Collinear queries can only reach the experts on one side of the key store. The effective rank is the "
        "exponential of the entropy of the spectrum.",
    )


def _plot_by_depth(
    axes: Axes, layers: Sequence[LayerNumbers], lines: Lines, *, limit: float = 0.0, highest: float = 0.0
) -> None:
    """Figures of the layers over depth. limit: where a dashed line stands; highest: the axis's end, if it is known."""
    depths = [layer.layer for layer in layers]
    seen = [limit]
    for label, (name, style, colour) in lines.items():
        values = [float(getattr(layer, name)) for layer in layers]
        axes.plot(depths, values, style, color=colour, label=label)
        seen += values
    axes.set_ylim(min(0.0, *seen), highest or 1.1 * max(seen) or 1.0)
    if limit:
        axes.axhline(limit, color=SOFT, linewidth=0.9, linestyle="--")
    if len(lines) > 1:
        axes.legend(loc="best")
    canvas.show_whole_numbers(axes, depths)


@styled
def draw_co_selection(collection: Collection) -> Drawing:
    """Who is chosen together with whom, one matrix a layer."""
    num_experts, depths = collection.meta["num_experts"], collection.meta["depths"]
    figure, panels, alone = canvas.make_layer_panels(len(depths), "Who works with whom", height=3.9, small=2.3)
    pairs = [count_pairs(experts, num_experts) for experts in collection.experts]
    shares = [measures.share_company(one) for one in pairs]
    highest = max(float(one.max()) for one in shares) or 1.0
    for axes, layer, counted, share in zip(panels, depths, pairs, shares, strict=True):
        order = measures.order_by_company(counted)
        order = order[np.diag(counted)[order] > 0]
        never = num_experts - len(order)
        image = axes.imshow(share[np.ix_(order, order)], cmap="Blues", vmin=0, vmax=highest, interpolation="nearest")
        axes.grid(visible=False)
        axes.spines[:].set_visible(True)
        axes.spines[:].set_color(RULE)
        numbered = order.tolist() if len(order) <= MOST_NUMBERED_EXPERTS and alone else []
        axes.set_xticks(range(len(numbered)), map(str, numbered))
        axes.set_yticks(range(len(numbered)), map(str, numbered))
        axes.tick_params(length=0)
        axes.set(ylabel="expert", xlabel="other expert")
        axes.set_title(f"layer {layer}" + (f" ({never} never chosen)" if never else ""))
    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.8, aspect=30, pad=0.02)
    bar.set_label("share of the expert's tokens")
    bar.outline.set_visible(False)
    return Drawing(
        "co_selection",
        figure,
        "Of the tokens that chose the expert of a row, the share that chose the expert of the column too. "
        "Experts that often work together stand side by side; those never chosen are left out.",
    )

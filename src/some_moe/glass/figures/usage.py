"""Figures of the experts' work: who is chosen, how evenly, and who is chosen together. Drawn from LayerNumbers."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from some_moe.glass.figures.canvas import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RULE,
    SOFT,
    Drawing,
    add_legend_below,
    choose_columns,
    make_panels,
    show_whole_numbers,
    styled,
)
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.communities import count_pairs
from some_moe.glass.inspect.layers import (
    GENERALIST_LOAD,
    UNDER_USED_LOAD,
    LayerNumbers,
    order_by_company,
    share_company,
)

MOST_NUMBERED_EXPERTS = 16  # a matrix of more has no room for their numbers
MOST_SEPARATE_BARS = 64  # in a row of panels; more stand without gaps


@styled
def draw_ranked_usage(layers: Sequence[LayerNumbers]) -> Drawing:
    """The load of every expert, busiest first, one panel a layer."""
    columns = choose_columns(len(layers))
    figure, panels = make_panels(
        len(layers), "Load of the experts, busiest first", height=1.95, columns=columns, share_y=True
    )
    smallest = min((load for layer in layers for load in layer.loads if load > 0), default=1.0)
    floor = max(1e-4, smallest / 2)
    for axes, layer in zip(panels, layers, strict=True):
        loads = np.sort(layer.loads)[::-1]
        ranks = np.arange(1, len(loads) + 1)
        width = 0.86 if len(loads) * columns <= MOST_SEPARATE_BARS else 1.0
        colours = np.select([loads >= GENERALIST_LOAD, loads >= UNDER_USED_LOAD], [ORANGE, BLUE], GREY).tolist()
        axes.bar(ranks, np.maximum(0, loads - floor), width, floor, color=colours)
        axes.axhline(1, color=INK, linewidth=0.9, linestyle="--")
        axes.set(yscale="log", ylim=(floor, max(2.0, 2 * max(max(one.loads) for one in layers))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
        axes.set_xlim(0.4, len(loads) + 0.6)
        used = f", {layer.experts_used} of {layer.num_experts} used" if columns == 1 else ""
        axes.set(
            title=f"layer {layer.layer}: gini {layer.gini:.2f}{used}",
            ylabel="load (fair shares)",
            xlabel="rank of the expert",
        )
        axes.grid(axis="x", visible=False)
    kinds = {
        f"generalist (≥ {GENERALIST_LOAD:g}×)": ORANGE,
        "between": BLUE,
        f"under-used (< {UNDER_USED_LOAD:g}×)": GREY,
    }
    for label, colour in kinds.items():
        panels[0].bar(0, 0, color=colour, label=label)  # for the legend alone
    add_legend_below(figure, panels[0], 3)
    _keep_outer_labels(panels, columns)
    return Drawing(
        "usage_ranked",
        figure,
        "How many fair shares of a layer's selections each expert has, on a logarithmic scale. The dashed line "
        "is one fair share. Experts that were never chosen have no bar.",
    )


@styled
def draw_usage_histogram(layers: Sequence[LayerNumbers]) -> Drawing:
    """How many experts have how many selections, one panel a layer; never chosen ones stand apart."""
    columns = choose_columns(len(layers))
    figure, panels = make_panels(
        len(layers), "How often the experts were chosen", height=1.95, columns=columns, share_y=True, share_x=True
    )
    most = max(max(layer.counts) for layer in layers)
    decades = max(1, int(np.ceil(np.log10(max(2, most)))))
    bins = np.logspace(0, decades, 4 * decades + 1)
    powers = bins[::4]
    for axes, layer in zip(panels, layers, strict=True):
        counts = np.array(layer.counts)
        found, _ = np.histogram(counts[counts > 0], bins)
        axes.stairs(found, bins, fill=True, color=BLUE, label="experts")
        never = int((counts == 0).sum())
        axes.bar(0.35, never, width=0.3, color=GREY, label="never chosen")
        fair = counts.sum() / len(counts)
        axes.axvline(fair, color=INK, linewidth=0.9, linestyle="--", label="fair share")
        axes.set(
            xscale="log",
            xlim=(0.17, bins[-1]),
            title=f"layer {layer.layer}: {never} never chosen" if never else f"layer {layer.layer}",
            ylabel="experts",
            xlabel="selections (log scale)",
        )
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.set_xticks([0.35, *powers], ["0", *(f"{power:,.0f}" for power in powers)])
        axes.minorticks_off()
        axes.grid(axis="x", visible=False)
    add_legend_below(figure, panels[0], 3)
    _keep_outer_labels(panels, columns)
    return Drawing(
        "usage_histogram",
        figure,
        "The number of experts by how often they were chosen, on a logarithmic scale. With even use all "
        "would stand at the dashed line.",
    )


@styled
def draw_usage_by_depth(layers: Sequence[LayerNumbers]) -> Drawing:
    """Gini, entropy and gate entropy of every layer."""
    figure, (top, middle, bottom) = make_panels(3, "Evenness of the load, by depth", height=1.7, share_x=True)
    depths = [layer.layer for layer in layers]
    top.plot(depths, [layer.gini for layer in layers], "o-", color=BLUE, label="this run")
    top.plot(depths, [layer.hash_gini for layer in layers], "s--", color=GREY, label="hash of the token")
    top.set(ylabel="gini", ylim=(0, 1), title="Gini of the load: 0 is even")
    top.legend(ncols=2, loc="upper left")
    _plot_with_limit(
        middle, depths, [layer.entropy_bits for layer in layers], layers[0].max_entropy_bits, "entropy (bits)", PURPLE
    )
    middle.set_title("Entropy of the load: the dashed line is even")
    _plot_with_limit(
        bottom,
        depths,
        [layer.gate_entropy_nats for layer in layers],
        layers[0].max_gate_entropy_nats,
        "entropy (nats)",
        ORANGE,
    )
    bottom.set(title="Gate entropy of a token: the dashed line is all alike", xlabel="layer")
    show_whole_numbers(bottom, depths)
    return Drawing(
        "usage_by_depth",
        figure,
        "Gini and entropy of the selections, and the mean entropy of a token's gate weights. The grey line is "
        "the gini if a hash of the token chose: frequent words alone make use uneven.",
    )


def _plot_with_limit(axes: Axes, depths: list[int], values: list[float], limit: float, label: str, colour: str) -> None:
    axes.plot(depths, values, "o-", color=colour)
    axes.axhline(limit, color=SOFT, linewidth=0.9, linestyle="--")
    axes.set(ylim=(0, max(limit, *values) * 1.1 or 1.0), ylabel=label)


@styled
def draw_queries_by_depth(layers: Sequence[LayerNumbers]) -> Drawing:
    """How much the queries of every layer point one way."""
    figure, (top, bottom) = make_panels(2, "Directions of the queries, by depth", height=2.0, share_x=True)
    depths = [layer.layer for layer in layers]

    def values(name: str) -> list[float]:
        return [float(getattr(layer, name)) for layer in layers]

    top.plot(depths, values("query_collinearity"), "o-", color=BLUE, label="length of the mean query")
    top.plot(depths, values("query_mean_cosine"), "s--", color=ORANGE, label="mean cosine of two queries")
    top.set(
        ylim=(min(0.0, *values("query_mean_cosine")), 1.0),
        ylabel="collinearity",
        title="Collinearity: 1 is all queries alike",
    )
    top.legend(loc="best")
    bottom.plot(depths, values("query_effective_rank"), "o-", color=BLUE, label="queries")
    bottom.plot(depths, values("key_effective_rank"), "^--", color=PURPLE, label="keys")
    bottom.set_ylim(bottom=0)
    bottom.set(ylabel="effective rank", xlabel="layer", title="How many directions are really used")
    bottom.legend(loc="best")
    show_whole_numbers(bottom, depths)
    return Drawing(
        "queries_by_depth",
        figure,
        "Collinear queries can only reach the experts on one side of the key store. The effective rank is the "
        "exponential of the entropy of the spectrum.",
    )


@styled
def draw_co_selection(collection: Collection) -> Drawing:
    """Who is chosen together with whom, one matrix a layer."""
    num_experts, depths = collection.meta["num_experts"], collection.meta["depths"]
    columns = choose_columns(len(depths))
    height = 3.9 if columns == 1 else 2.3
    figure, panels = make_panels(len(depths), "Who works with whom", height=height, columns=columns)
    pairs = [count_pairs(experts, num_experts) for experts in collection.experts]
    shares = [share_company(one) for one in pairs]
    highest = max(float(one.max()) for one in shares) or 1.0
    for axes, layer, counted, share in zip(panels, depths, pairs, shares, strict=True):
        order = order_by_company(counted)
        order = order[np.diag(counted)[order] > 0]
        never = num_experts - len(order)
        image = axes.imshow(share[np.ix_(order, order)], cmap="Blues", vmin=0, vmax=highest, interpolation="nearest")
        axes.set_title(f"layer {layer}" + (f" ({never} never chosen)" if never else ""))
        axes.grid(visible=False)
        axes.spines[:].set_visible(True)
        axes.spines[:].set_color(RULE)
        if len(order) <= MOST_NUMBERED_EXPERTS and columns == 1:
            axes.set_xticks(range(len(order)), [str(expert) for expert in order])
            axes.set_yticks(range(len(order)), [str(expert) for expert in order])
        else:
            axes.set_xticks([])
            axes.set_yticks([])
        axes.tick_params(length=0)
        axes.set(ylabel="expert", xlabel="other expert")
    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.8, aspect=30, pad=0.02)
    bar.set_label("share of the expert's tokens")
    bar.outline.set_visible(False)
    return Drawing(
        "co_selection",
        figure,
        "Of the tokens that chose the expert of a row, the share that chose the expert of the column too. "
        "Experts that often work together stand side by side; those never chosen are left out.",
    )


def _keep_outer_labels(panels: Sequence[Axes], columns: int) -> None:
    """Axis labels at the left and at the bottom only: they are the same for all panels."""
    for place, axes in enumerate(panels):
        if place % columns:
            axes.set_ylabel("")
        if place < len(panels) - columns:
            axes.set_xlabel("")

"""Figures of the experts' work: who is chosen, how evenly, and who is chosen together. Drawn from LayerNumbers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

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
    caption = (
        "How many fair shares of a layer's selections each expert has, on a logarithmic scale. The dashed line "
        "is one fair share. Experts that were never chosen have no bar."
    )
    return Drawing("usage_ranked", figure, caption)


class DepthPanel(NamedTuple):
    """What is drawn over depth: lines by their label, each a field of LayerNumbers with its style and colour."""

    title: str
    unit: str
    lines: dict[str, tuple[str, str, str]]
    limit: str = ""  # the field that says where a dashed line stands
    highest: float = 0.0  # the axis's end, if it is known


DEPTH_PANELS = (
    DepthPanel("Gini of the load: 0 is even", "gini",
               {"this run": ("gini", "o-", BLUE), "hash of the token": ("hash_gini", "s--", GREY)}, highest=1.0),
    DepthPanel("Entropy of the load: the dashed line is even", "entropy (bits)",
               {"": ("entropy_bits", "o-", PURPLE)}, limit="max_entropy_bits"),
    DepthPanel("Gate entropy of a token: the dashed line is all alike", "entropy (nats)",
               {"": ("gate_entropy_nats", "o-", ORANGE)}, limit="max_gate_entropy_nats"),
    DepthPanel("Collinearity of the queries: 1 is all alike", "collinearity",
               {"length of the mean": ("query_collinearity", "o-", BLUE),
                "mean cosine of two": ("query_mean_cosine", "s--", ORANGE)}, highest=1.0),
    DepthPanel("How many directions are really used", "effective rank",
               {"queries": ("query_effective_rank", "o-", BLUE), "keys": ("key_effective_rank", "^--", PURPLE)}),
)  # fmt: skip


@styled
def draw_usage_by_depth(layers: Sequence[LayerNumbers]) -> Drawing:
    """Gini, entropy and gate entropy of every layer; with keys, how much its queries point one way."""
    has_keys = all(layer.query_collinearity is not None for layer in layers)
    chosen = DEPTH_PANELS if has_keys else DEPTH_PANELS[:3]
    figure, panels = canvas.make_panels(len(chosen), "The layers, by depth", height=1.7, share_x=True)
    depths = [layer.layer for layer in layers]
    for axes, panel in zip(panels, chosen, strict=True):
        seen = [float(getattr(layers[0], panel.limit))] if panel.limit else [0.0]
        if panel.limit:
            axes.axhline(seen[0], color=SOFT, linewidth=0.9, linestyle="--")
        for label, (name, style, colour) in panel.lines.items():
            values = [float(getattr(layer, name)) for layer in layers]
            axes.plot(depths, values, style, color=colour, label=label)
            seen += values
        axes.set(title=panel.title, ylabel=panel.unit)
        axes.set_ylim(min(0.0, *seen), panel.highest or 1.1 * max(seen) or 1.0)
        if len(panel.lines) > 1:
            axes.legend(ncols=2, loc="best")
    panels[-1].set(xlabel="layer", xlim=(min(depths) - 0.4, max(depths) + 0.4))
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    caption = (
        "Gini and entropy of the selections, and the mean entropy of a token's gate weights. The grey line is the gini "
        "if a hash of the token chose: frequent words alone make use uneven."
    )
    queries = (
        " Collinear queries can only reach the experts on one side of the key store. The effective rank is the "
        "exponential of the entropy of the spectrum."
    )
    return Drawing("usage_by_depth", figure, caption + (queries if has_keys else ""))


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
        numbered = [str(expert) for expert in order] if len(order) <= MOST_NUMBERED_EXPERTS and alone else []
        axes.set_xticks(range(len(numbered)), numbered)
        axes.set_yticks(range(len(numbered)), numbered)
        axes.tick_params(length=0)
        axes.set(ylabel="expert", xlabel="other expert")
        axes.set_title(f"layer {layer}" + (f" ({never} never chosen)" if never else ""))
    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.8, aspect=30, pad=0.02)
    bar.set_label("share of the expert's tokens")
    bar.outline.set_visible(False)
    caption = (
        "Of the tokens that chose the expert of a row, the share that chose the expert of the column too. "
        "Experts that often work together stand side by side; those never chosen are left out."
    )
    return Drawing("co_selection", figure, caption)

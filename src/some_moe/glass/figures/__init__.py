"""Every figure of a run, in the order in which a reader meets them."""

from collections.abc import Iterator

from some_moe.glass.figures.canvas import Drawing, rank_colours
from some_moe.glass.figures.curves import draw_loss, draw_usage_over_steps
from some_moe.glass.figures.keys import draw_key_drift, draw_key_map, draw_key_paths, expert_colours
from some_moe.glass.figures.usage import (
    draw_co_selection,
    draw_queries_by_depth,
    draw_ranked_usage,
    draw_usage_by_depth,
    draw_usage_histogram,
)
from some_moe.glass.inspect.findings import Findings


def choose_colours(findings: Findings) -> dict[int, list[str]]:
    """A colour for each expert of each layer: by the map of its keys, or by where its path ends."""
    if "pca" in findings.maps:
        return expert_colours([layer.layer for layer in findings.layers], findings.maps["pca"])
    return {movement.layer: rank_colours(movement.paths[-1, :, 0]) for movement in findings.movements}


def draw_figures(findings: Findings) -> Iterator[Drawing]:
    """Draw what the findings allow: one figure after the other, so that few are held at a time."""
    run, layers, movements = findings.run, findings.layers, findings.movements
    if run.steps or run.evaluations:
        yield draw_loss(run)
    if layers:
        assert findings.collection is not None
        yield draw_ranked_usage(layers)
        yield draw_usage_histogram(layers)
        yield draw_usage_by_depth(layers)
        yield draw_co_selection(findings.collection)
    if movements or any(record.get("layers") for record in run.evaluations):
        yield draw_usage_over_steps(run, movements)
    if findings.has_keys:
        yield draw_queries_by_depth(layers)
    if movements:
        yield draw_key_paths(movements, choose_colours(findings))
        yield draw_key_drift(movements)


def draw_key_maps(findings: Findings, method: str) -> Drawing:
    """The map of the keys by one of the methods that the findings hold."""
    return draw_key_map(findings.maps[method], findings.layers, choose_colours(findings))

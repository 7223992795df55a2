"""Every figure of a run, in the order in which a reader meets them."""

from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

with chdir(Path(__file__).parent):  # matplotlib would read a file `matplotlibrc` of the current folder, whoever's it is
    import matplotlib  # noqa: F401

from some_moe.glass.figures import curves, keys, usage
from some_moe.glass.figures.canvas import Drawing, rank_colours
from some_moe.glass.inspect.branches import list_owners
from some_moe.glass.inspect.findings import Findings


def choose_colours(findings: Findings) -> dict[int, list[str]]:
    """A colour for each expert of each layer, the same on all maps: its rank along the first axis of the map of its
    layer's keys, or of where its path ends."""
    if "pca" in findings.maps:
        pairs = zip(findings.layers, findings.maps["pca"], strict=True)
        return {layer.layer: rank_colours(key_map.points[:, 0]) for layer, key_map in pairs}
    return {movement.layer: rank_colours(movement.paths[-1, :, 0]) for movement in findings.movements}


def draw_figures(findings: Findings) -> Iterator[Drawing]:
    """Draw what the findings allow: one figure after the other, so that few are held at a time."""
    run, layers, movements = findings.run, findings.layers, findings.movements
    if run.steps or run.evaluations:
        yield curves.draw_loss(run)
    if layers:
        assert findings.collection is not None
        yield usage.draw_ranked_usage(layers)
        yield usage.draw_usage_by_depth(layers)
        yield usage.draw_co_selection(findings.collection)
    if findings.run.grown and "pca" in findings.maps:
        yield keys.draw_branches(findings.maps["pca"], layers, *list_owners(findings.run.grown, layers[0].num_experts))
    if movements or any(record.get("layers") for record in run.evaluations):
        yield curves.draw_usage_over_steps(run, movements)
    if movements:
        yield keys.draw_key_paths(movements, choose_colours(findings))
        yield keys.draw_key_drift(movements)

"""The keys' movement as one HTML page with everything inside: it makes no request and runs no script but its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from some_moe.glass.inspect.movement import LayerMovement
from some_moe.glass.page.render import fill_template, hash_script, read_template, security_policy

MOST_POINTS = 150_000  # of all layers and snapshots together: a page of a few megabytes


def render_movement(run_name: str, movements: Sequence[LayerMovement], colours: Mapping[int, Sequence[str]]) -> str:
    """The page. movements: at least one layer's; colours: of the experts, by layer."""
    frames = _choose_frames(movements)
    steps = movements[0].steps[frames]
    data = {
        "steps": steps.tolist(),
        "layers": [_describe_layer(movement, frames, colours[movement.layer]) for movement in movements],
    }
    script = read_template("movement.js")
    return fill_template(
        "movement.html",
        policy=Markup(security_policy([hash_script(script)])),
        run=run_name,
        first_step=f"{steps[0]:,}",
        last_step=f"{steps[-1]:,}",
        style=Markup(read_template("movement.css")),
        data=data,
        script=Markup(script),
    )


def _choose_frames(movements: Sequence[LayerMovement]) -> np.ndarray:
    """The snapshots to show: all, or evenly chosen ones where there would be too many points."""
    num_frames = len(movements[0].steps)
    points_a_frame = sum(movement.paths.shape[1] for movement in movements)
    most = max(2, MOST_POINTS // points_a_frame)
    return np.unique(np.linspace(0, num_frames - 1, min(num_frames, most)).round().astype(int))


def _describe_layer(movement: LayerMovement, frames: np.ndarray, hues: Sequence[str]) -> dict[str, Any]:
    """One layer for the page's script. A path's coordinates are whole numbers within width × height."""
    paths = movement.paths[frames]
    low = paths.min((0, 1))
    span = np.ptp(paths.reshape(-1, 2), axis=0)
    unit = max(float(span.max()), 1e-9) / 1000
    first, second = 100 * movement.variance
    return {
        "layer": movement.layer,
        "hues": list(hues),
        "paths": ((paths - low) / unit).round().astype(int).reshape(len(frames), -1).tolist(),
        "width": max(1, round(float(span[0]) / unit)),
        "height": max(1, round(float(span[1]) / unit)),
        "usage": movement.usage[frames].astype(float).round(3).tolist(),
        "distance": movement.distance[frames].round(3).tolist(),
        "still": not movement.distance.any(),
        "xLabel": f"axis 1 ({first:.0f} % of variance)",
        "yLabel": f"axis 2 ({second:.0f} %)",
    }

"""How the keys moved during training, read from a run's key snapshots.

Shapes: T snapshots, E experts, D model width. Distances are Euclidean, in the space of the keys, whose length
is 1 at the start. Between two snapshots a key may have wandered, so a path length is a lower bound.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from some_moe.glass.inspect.projections import principal_axes, project
from some_moe.glass.inspect.runs import KeySnapshots

MAX_SNAPSHOTS = 200  # more are thinned: no eye follows them, and memory is finite


@dataclass(frozen=True, kw_only=True)
class LayerMovement:
    """The keys of one layer over training."""

    layer: int
    steps: np.ndarray  # (T,) int64
    paths: np.ndarray  # (T, E, 2) all keys on one plane: the principal axes of all snapshots together
    variance: np.ndarray  # (2,) share of the keys' variance that each axis of the plane shows
    usage: np.ndarray  # (T, E) running share of the load times E
    distance: np.ndarray  # (T, E) from where the key began
    speed: np.ndarray  # (T−1, E) distance a training step, between snapshots

    @property
    def drift(self) -> np.ndarray:
        """How far each key ended from its beginning: (E,)."""
        return np.asarray(self.distance[-1])

    @property
    def path_length(self) -> np.ndarray:
        """How far each key travelled from snapshot to snapshot: (E,)."""
        return np.asarray((self.speed * np.diff(self.steps)[:, None]).sum(0))

    def to_dict(self) -> dict[str, Any]:
        """The numbers behind the figures; paths are in the animation's page."""
        return {
            "layer": self.layer,
            "steps": self.steps.tolist(),
            "variance_on_plane": self.variance.tolist(),
            "drift": self.drift.tolist(),
            "path_length": self.path_length.tolist(),
            "mean_distance": self.distance.mean(1).tolist(),
            "mean_speed": self.speed.mean(1).tolist(),
        }


def trace_movement(snapshots: KeySnapshots) -> list[LayerMovement]:
    """The movement of every layer's keys, in order of depth; none with fewer than two snapshots."""
    steps = thin_out(np.array(snapshots.steps, np.int64))
    if len(steps) < 2:
        return []
    return [_trace_layer(snapshots, layer, steps) for layer in snapshots.layers]


def thin_out(steps: np.ndarray, limit: int = MAX_SNAPSHOTS) -> np.ndarray:
    """At most `limit` steps, evenly chosen, the first and the last among them."""
    return np.asarray(steps[np.linspace(0, len(steps) - 1, min(limit, len(steps))).round().astype(int)])


def _trace_layer(snapshots: KeySnapshots, layer: int, steps: np.ndarray) -> LayerMovement:
    keys = np.stack([snapshots.read("keys", int(step), layer) for step in steps]).astype(np.float64)
    mean, axes, variance = principal_axes(keys.reshape(-1, keys.shape[-1]))
    return LayerMovement(
        layer=layer,
        steps=steps,
        paths=project(keys, mean, axes),
        variance=variance,
        usage=np.stack([snapshots.read("usage", int(step), layer) for step in steps]),
        distance=np.linalg.norm(keys - keys[0], axis=-1),
        speed=np.linalg.norm(np.diff(keys, axis=0), axis=-1) / np.diff(steps)[:, None],
    )

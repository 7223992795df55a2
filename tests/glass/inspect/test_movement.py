"""A planted drift is found again, in the space of the keys and on the plane."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from some_moe.glass.inspect.movement import thin_out, trace_movement
from some_moe.glass.inspect.runs import KeySnapshots

STEPS = (0, 10, 30)


def save_snapshots(folder: Path, keys: np.ndarray, steps: tuple[int, ...] = STEPS) -> KeySnapshots:
    """Write keys (T, E, D) of block 3 as snapshots."""
    paths = {step: folder / f"step-{step}.safetensors" for step in steps}
    for place, path in enumerate(paths.values()):
        usage = np.full(keys.shape[1], 1 + place, np.float32)
        save_file({"3.keys": keys[place].astype(np.float32), "3.usage": usage}, path)
    return KeySnapshots(files=paths, layers=(3,))


def plant() -> np.ndarray:
    """Expert 0 stands still; 1 goes 3 and then 4, in a right angle; 2 goes out by 2 and comes back."""
    keys = np.zeros((3, 3, 5))
    keys[:, 0] = [1, 0, 0, 0, 0]
    keys[1, 1], keys[2, 1] = [0, 3, 0, 0, 0], [0, 3, 4, 0, 0]
    keys[1, 2] = [0, 0, 2, 0, 0]
    return keys


def test_drift_path_and_speed_of_a_planted_movement(tmp_path: Path) -> None:
    (found,) = trace_movement(save_snapshots(tmp_path, plant()))
    assert found.layer == 3
    assert found.steps.tolist() == [0, 10, 30]
    np.testing.assert_allclose(found.drift, [0, 5, 0])
    np.testing.assert_allclose(found.path_length, [0, 7, 4])
    np.testing.assert_allclose(found.distance, [[0, 0, 0], [0, 3, 2], [0, 5, 0]])
    np.testing.assert_allclose(found.speed, [[0, 0.3, 0.2], [0, 0.2, 0.1]])
    assert found.usage[:, 0].tolist() == [1, 2, 3]


def test_movement_within_a_plane_is_shown_at_full_length(tmp_path: Path) -> None:
    keys = plant()
    keys[:, 0] = 0  # what is left lies in the plane of the second and third coordinate
    (found,) = trace_movement(save_snapshots(tmp_path, keys))
    assert found.variance.sum() == pytest.approx(1)
    shown = np.linalg.norm(np.diff(found.paths, axis=0), axis=-1)
    np.testing.assert_allclose(shown, np.linalg.norm(np.diff(keys, axis=0), axis=-1), atol=1e-6)


def test_all_snapshots_share_one_plane(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).standard_normal((3, 6, 5))
    (found,) = trace_movement(save_snapshots(tmp_path, keys))
    np.testing.assert_allclose(found.paths.mean((0, 1)), 0, atol=1e-6)
    shown, real = (np.linalg.norm(np.diff(path, axis=0), axis=-1) for path in (found.paths, keys))
    assert (shown <= real + 1e-6).all()


def test_keys_that_never_move_have_no_drift(tmp_path: Path) -> None:
    keys = np.repeat(np.random.default_rng(0).standard_normal((1, 4, 5)), 3, axis=0)
    (found,) = trace_movement(save_snapshots(tmp_path, keys))
    assert not found.drift.any()
    assert not found.speed.any()


def test_one_snapshot_or_none_is_no_movement(tmp_path: Path) -> None:
    assert trace_movement(KeySnapshots()) == []
    assert trace_movement(save_snapshots(tmp_path, plant()[:1], (0,))) == []


def test_many_snapshots_are_thinned_from_end_to_end() -> None:
    chosen = thin_out(np.arange(0, 1000, 2), limit=50)
    assert len(chosen) == 50
    assert chosen[0] == 0
    assert chosen[-1] == 998
    assert np.all(np.diff(chosen) > 0)
    assert thin_out(np.array([0, 5]), limit=50).tolist() == [0, 5]

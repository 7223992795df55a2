"""Maps keep what is near together, say when they cannot, and come out the same every time."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from some_moe.glass.inspect.projections import (
    FEWEST_KEYS,
    map_keys,
    map_layer,
    principal_axes,
    project,
    umap_in_background,
    unit_rows,
)


def three_bundles(each: int = 8, width: int = 16) -> np.ndarray:
    """Keys around three axes, of different lengths, which must not matter."""
    random = np.random.default_rng(0)
    keys = np.repeat(np.eye(3, width), each, axis=0) + 0.05 * random.standard_normal((3 * each, width))
    return np.asarray(keys * random.uniform(0.5, 2, (3 * each, 1)))


def bundles_stay_apart(points: np.ndarray, each: int = 8) -> bool:
    centres = points.reshape(3, each, 2).mean(1)
    nearest = np.linalg.norm(points[:, None] - centres, axis=-1).argmin(1)
    return np.array_equal(nearest, np.repeat([0, 1, 2], each))


def test_principal_axes_of_a_known_cloud() -> None:
    # Variance 9·2 along the second axis, 1·2 along the third, none along the first.
    cloud = np.array([[5, 3, 1], [5, -3, 1], [5, 3, -1], [5, -3, -1]], float)
    mean, axes, share = principal_axes(cloud)
    assert mean.tolist() == [5, 0, 0]
    np.testing.assert_allclose(axes, [[0, 0], [1, 0], [0, 1]], atol=1e-12)
    np.testing.assert_allclose(share, [0.9, 0.1])
    np.testing.assert_allclose(project(cloud, mean, axes), cloud[:, 1:], atol=1e-12)


def test_only_the_direction_of_a_key_counts() -> None:
    keys = three_bundles()
    stretched = keys * np.linspace(0.1, 10, len(keys))[:, None]
    np.testing.assert_allclose(map_layer(keys, "pca").points, map_layer(stretched, "pca").points, atol=1e-9)
    assert unit_rows(np.zeros((2, 3))).tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_bundles_of_keys_stay_apart(method: str) -> None:
    found = map_layer(three_bundles(), method)
    assert found.note is None
    assert bundles_stay_apart(found.points)
    assert np.array_equal(found.points, map_layer(three_bundles(), method).points)


@pytest.mark.parametrize("num_keys", range(1, FEWEST_KEYS))
@pytest.mark.parametrize("method", ["tsne", "umap"])
def test_few_keys_fall_back_on_pca_with_a_note(method: str, num_keys: int) -> None:
    keys = np.random.default_rng(1).standard_normal((num_keys, 5))
    found = map_layer(keys, method)
    assert found.note is not None
    assert f"at least {FEWEST_KEYS} keys and this layer has {num_keys}" in found.note
    assert np.array_equal(found.points, map_layer(keys, "pca").points)


def test_keys_that_fell_together_are_one_point_with_a_note() -> None:
    found = map_layer(np.ones((12, 4)), "tsne")
    assert found.note is not None
    assert "point the same way" in found.note
    np.testing.assert_allclose(found.points, 0, atol=1e-9)


def test_keys_of_width_one_can_be_mapped() -> None:
    assert map_layer(np.array([[1.0], [-1.0]]), "pca").points.tolist() == [[1, 0], [-1, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("num_keys", [FEWEST_KEYS, 9, 40])
def test_umap_is_finite_and_repeats_itself(num_keys: int) -> None:
    keys = np.random.default_rng(2).standard_normal((num_keys, 12)).astype(np.float32)
    first, second = map_layer(keys, "umap"), map_layer(keys, "umap")
    assert first.note is None
    assert np.isfinite(first.points).all()
    assert np.ptp(first.points, axis=0).min() > 0
    assert np.array_equal(first.points, second.points)


@pytest.mark.slow
def test_umap_elsewhere_gives_the_same_maps_as_here() -> None:
    layers = [three_bundles(), three_bundles(each=8) + 0.01]
    with umap_in_background() as start:
        elsewhere = start(layers)()
    here = map_keys(layers, "umap")
    assert [found.method for found in elsewhere] == ["umap", "umap"]
    for found, expected in zip(elsewhere, here, strict=True):
        assert np.array_equal(found.points, expected.points)
        assert bundles_stay_apart(found.points)


@pytest.mark.slow
def test_umap_elsewhere_does_not_run_the_callers_script_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # without any guard, as people write them
    script.write_text(
        "import numpy as np\n"
        "from some_moe.glass.inspect.projections import umap_in_background\n"
        "print('once')\n"
        "with umap_in_background() as start:\n"
        "    print(start([np.eye(9)])()[0].points.shape)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["once", "(9, 2)"]

"""The galaxy's frames: the map stays, the keys move, what jumped is told, and damage is a sentence."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from some_moe.config import ConfigError
from some_moe.live.keys import Galaxy, find_jumps
from some_moe.live.watched import Watch, Watched
from tests.live.folders import make_run


@pytest.fixture
def run(tmp_path: Path) -> Watched:
    found = Watch([make_run(tmp_path / "run", layers=3, experts=40, width=16)]).runs["0"]
    found.refresh()
    return found


def read(galaxy: Galaxy, step: int, fit: int) -> np.ndarray:
    return np.frombuffer(galaxy.draw(step, fit), "<f4").reshape(3, 40, 4)


def test_a_frame_has_place_use_and_jump_of_every_key(run: Watched) -> None:
    frame = read(Galaxy(run), 20, 20)
    assert np.isfinite(frame).all()
    assert 0.9 < np.abs(frame[..., :2]).max() < 2
    np.testing.assert_allclose(frame[0, :, 2], np.linspace(0.1, 2, 40), rtol=1e-6)


def test_the_map_stays_while_keys_move(run: Watched) -> None:
    galaxy = Galaxy(run)
    before, after = read(galaxy, 0, 20), read(galaxy, 20, 20)
    assert np.abs(before - after)[..., :2].max() > 0.05
    mean, axes, size = next(found for key, found in galaxy.axes.items() if key[:2] == (20, 1))
    again = (galaxy.read("keys", 0, 1) - mean) @ axes / size
    np.testing.assert_allclose(again, before[1, :, :2], atol=1e-5)


def test_a_key_that_was_put_elsewhere_jumped() -> None:
    random = np.random.default_rng(0)
    before = random.standard_normal((30, 8))
    after = before + 0.01 * random.standard_normal((30, 8))
    after[7] = -before[7]
    assert np.flatnonzero(find_jumps(before, after)).tolist() == [7]
    assert not find_jumps(before, before).any()
    assert not find_jumps(before, random.standard_normal((30, 8))).any()  # all of them wandered far


def test_neighbours_are_the_nearest_by_angle_and_load_is_over_time(run: Watched) -> None:
    galaxy = Galaxy(run)
    found = galaxy.describe(1, 5, 20)
    keys = galaxy.read("keys", 20, 1)
    near = keys @ keys[5]
    near[5] = -9
    assert found["neighbours"][0][0] == int(near.argmax())
    assert [at for at, _ in found["load"]] == [0, 10, 20]
    assert found["load"][0][1] == pytest.approx(np.linspace(0.1, 2, 40)[5], abs=1e-4)


@pytest.mark.parametrize("damage", ["truncate", "shape", "nan", "missing", "gone", "folder", "link"])
def test_a_damaged_snapshot_is_a_sentence(run: Watched, damage: str) -> None:
    file = run.path / "keys" / "step-10.safetensors"
    tensors = load_file(file)
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:200])
    elif damage == "shape":
        save_file(tensors | {"1.keys": np.zeros((4, 4), np.float32)}, file)
    elif damage == "nan":
        save_file(tensors | {"1.keys": np.full((40, 16), np.nan, np.float32)}, file)
    elif damage == "missing":
        save_file({name: tensor for name, tensor in tensors.items() if name != "1.keys"}, file)
    else:
        file.unlink()
    if damage == "folder":
        file.mkdir()
    if damage == "link":
        outside = run.path.parent / "outside"
        save_file(tensors, outside)
        file.symlink_to(outside)
    with pytest.raises(ConfigError):
        Galaxy(run).draw(10, 20)
    assert len(Galaxy(run).draw(0, 20)) == 3 * 40 * 16


def test_without_snapshots_the_keys_of_checkpoints_are_shown(run: Watched) -> None:
    tensors = load_file(run.path / "keys" / "step-20.safetensors")
    shutil.rmtree(run.path / "keys")
    place = run.path / "checkpoints" / "step-20"
    place.mkdir(parents=True)
    named = {}
    for name, tensor in tensors.items():
        layer, what = name.split(".")
        named[f"blocks.{layer}.ffn.key_router.state.{what}"] = tensor
    save_file(named, place / "model.safetensors")
    (place / "state.json").write_text("{}", encoding="utf-8")
    run._looked = 0.0
    run.refresh()
    assert run.snapshots == (20,)
    assert read(Galaxy(run), 20, 20)[..., 3].sum() == 0


def test_frames_are_kept_within_bounds(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("some_moe.live.keys.MOST_BYTES", 3 * 40 * 16)
    galaxy = Galaxy(run)
    for step in (0, 10, 20):
        galaxy.draw(step, 20)
    assert [key[:2] for key in galaxy.frames] == [(20, 20)]


def test_a_snapshot_that_was_written_anew_is_drawn_anew(run: Watched) -> None:
    import os

    galaxy = Galaxy(run)
    before = read(galaxy, 10, 20)
    file = run.path / "keys" / "step-10.safetensors"
    shutil.copy(run.path / "keys" / "step-0.safetensors", file)
    os.utime(file, ns=(1, 1))
    assert np.abs(read(galaxy, 10, 20) - before).max() > 0.01

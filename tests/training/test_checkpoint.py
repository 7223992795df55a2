"""A checkpoint is loaded into the model that it was saved from, or refused in one sentence."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import some_moe
from some_moe.config import ConfigError
from some_moe.sinks.display import Display
from some_moe.training.loop import resume, start, train
from some_moe.training.run_folder import RunFolder
from tests.shared.tiny import A1, TINY
from tests.shared.typed import listing

CONFIG = A1.config.override(TINY)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    trainer = start(CONFIG, RunFolder(tmp_path / "saved"), Display())
    trainer.save()
    trainer.folder.release()
    return tmp_path / "saved" / "checkpoints" / "step-0"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.num_layers": 1}, r"of \S+ it has shape \(.*\), the config none"),
        ({"model.num_layers": 3}, r"of \S+ it has none, the config shape \(.*\)"),
        ({"model.num_experts": 4}, r"of \S+keys it has shape \(8, 32\), the config shape \(4, 32\)"),
        ({"model.trainability": "full"}, r"of \S+ it has none, the config shape \(.*\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    place: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"step-0' does not fit this config: {words}; use the config that was saved"):
        start(CONFIG.override(changes), RunFolder(tmp_path / "run"), Display(), init_from=place)
    assert not (tmp_path / "run").exists()


def test_experts_of_another_seed_are_refused(place: Path, tmp_path: Path) -> None:
    config = CONFIG.override({"model.expert_seed": 1})
    with pytest.raises(ConfigError, match="the experts of layer 0 have seed 1, but the saved model was made with 0"):
        start(config, RunFolder(tmp_path / "run"), Display(), init_from=place)


def test_a_checkpoint_without_its_tokenizer_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "saved" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"the run '.*/saved' has no tokenizer.json; restore it, or give another run"):
        start(CONFIG, RunFolder(tmp_path / "run"), Display(), init_from=place)


# --- files that somebody has changed, and whose hashes fit -----------------------------------------------------


def forge(place: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Save other tensors under a name, and let state.json vouch for them."""
    save_file(tensors, place / name)
    state = json.loads((place / "state.json").read_text())
    state["hashes"][name] = hashlib.sha256((place / name).read_bytes()).hexdigest()
    (place / "state.json").write_text(json.dumps(state))


def refuse_resume(place: Path) -> str:
    """Resume a checkpoint that must be refused: nothing is changed. Returns the sentence."""
    folder = RunFolder(place.parent.parent)
    before = listing(folder.path)
    with pytest.raises(ConfigError) as error:
        resume(folder, Display(), place)
    assert listing(folder.path) == before
    return str(error.value)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    train(start(CONFIG.override({"train.save_every": 1}), RunFolder(tmp_path / "saved"), Display()))
    return tmp_path / "saved" / "checkpoints" / "step-1"


def test_nan_among_weights_keys_and_the_optimizers_memory_is_refused(trained: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        good = load_file(trained / name)
        for one in [key for key, value in good.items() if value.is_floating_point()][:: 1 + len(good) // 6]:
            for bad in (math.nan, math.inf):
                forge(trained, name, good | {one: torch.full_like(good[one], bad)})
                assert f"{name}' has nan or infinity in {one}; remove that folder" in refuse_resume(trained)
        forge(trained, name, good)
    resume(RunFolder(trained.parent.parent), Display(), trained).folder.release()


def test_an_optimizer_of_other_names_shapes_and_types_is_refused_before_anything_is_touched(trained: Path) -> None:
    good = load_file(trained / "optimizer.safetensors")
    one = next(name for name in good if name.endswith("/exp_avg"))
    less = {name: value for name, value in good.items() if name != one}
    for forged, words in (
        (less, "it has none, the config shape"),
        (less | {one + "2": good[one]}, f"of {one} it has none"),
        (good | {one: good[one][:1].clone()}, f"of {one} it has shape"),
        (good | {one: good[one].double()}, "of float64, the config shape"),
        (good | {"epoch_counts": good["epoch_counts"].float()}, "of epoch_counts it has shape (2, 8), the config"),
        (good | {"more": torch.zeros(3)}, "of more it has shape (3,), the config none"),
    ):
        forge(trained, "optimizer.safetensors", forged)
        assert words in refuse_resume(trained)


@pytest.mark.parametrize(("part", "value"), [("step", -1.0), ("step", 2.0), ("step", -3.4e38), ("exp_avg_sq", -1e-9)])
def test_what_no_optimizer_could_remember_is_refused(trained: Path, part: str, value: float) -> None:
    good = load_file(trained / "optimizer.safetensors")
    one = next(name for name in good if name.endswith(f"/{part}"))
    forge(trained, "optimizer.safetensors", good | {one: torch.full_like(good[one], value)})
    assert "optimizer.safetensors' holds what no optimizer remembers; remove that folder" in refuse_resume(trained)


def test_a_file_that_is_no_safetensors_or_far_too_large_is_refused_unread(trained: Path) -> None:
    forge(trained, "model.safetensors", load_file(trained / "model.safetensors") | {"more": torch.zeros(1 << 23)})
    assert "of more it has shape (8388608,), the config none" in refuse_resume(trained)
    (trained / "model.safetensors").write_bytes(b"\xff" * 64)
    state = json.loads((trained / "state.json").read_text())
    state["hashes"]["model.safetensors"] = hashlib.sha256(b"\xff" * 64).hexdigest()
    (trained / "state.json").write_text(json.dumps(state))
    assert "model.safetensors' is damaged (" in refuse_resume(trained)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": "x"}, "step must be a valid integer"),
        ({"step": 2}, "its state.json says step 2"),
        ({"hashes": 5}, "hashes must be a valid dictionary"),
        ({"libraries": [[1]]}, "libraries.0 must be a valid dictionary"),
        ({"libraries": []}, "it has experts of 0 layers, the config of 2"),
        ({"best_step": "1"}, "best_step must be a valid integer"),
        ({"epochs": [{"epoch": 1}]}, "epochs.0.step is missing"),
        ({"epoch_loss": None}, "epoch_loss must be a valid number"),
        ({"stopped_early": 0}, "stopped_early must be a valid boolean"),
        ({"format_version": 9}, "has format version 9, newer than"),
    ],
)
def test_a_state_that_does_not_fit_is_damage(trained: Path, changes: dict[str, Any], words: str) -> None:
    file = trained / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert words in refuse_resume(trained)


def test_a_state_that_may_not_be_read_is_not_called_damaged(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "state.json":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"state.json' cannot be used \(Permission denied\); ask its owner"):
        some_moe.load(trained.parent.parent)


PARTS = "config.yaml tokenizer.json result.json checkpoints checkpoints/step-1 checkpoints/step-1/model.safetensors"


@pytest.mark.parametrize("name", [*PARTS.split(), "checkpoints/step-1/state.json"])
def test_nothing_of_a_run_is_read_through_a_link_that_leads_out_of_it(trained: Path, name: str) -> None:
    run = trained.parent.parent
    outside = run.parent / "outside"
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    with pytest.raises(ConfigError, match=r"leads out of its folder, to '.*/outside"):
        _ = some_moe.load(run, checkpoint="step-1").model, some_moe.load(run).result, some_moe.load(run).tokenizer

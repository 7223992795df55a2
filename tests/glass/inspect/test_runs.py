"""A run folder is read in whatever state it was left, and what is missing is said in sentences."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from some_moe.config import ConfigError, RunConfig
from some_moe.glass.inspect.runs import UNFINISHED, read_run

STEP = {"step": 2, "epoch": 1, "tokens": 90, "train_loss": 5.5, "gini_middle": 0.2}
SIZES = {"model.num_layers": 2, "model.num_experts": 2, "model.top_k": 1, "model.d_model": 4, "model.num_heads": 1}
EVALUATION = {"step": 4, "epoch": 1, "tokens": 180, "val_loss": 5.0, "layers": []}


def write_lines(path: Path, *records: Any) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run, written by hand: two snapshots of two keys in blocks 0 and 1."""
    RunConfig(name="mine").override(SIZES).save(tmp_path / "config.yaml")
    (tmp_path / "env.json").write_text('{"torch": "2.11"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "result.json").write_text('{"status": "finished", "steps": 4}')
    write_lines(tmp_path / "metrics.jsonl", STEP, EVALUATION)
    write_lines(tmp_path / "samples.jsonl", {"step": 4, "text": "Once."})
    (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-4" / "state.json").write_text("{}")
    (tmp_path / "keys").mkdir()
    for step in (0, 10, 4):
        keys = {f"{layer}.keys": np.full((2, 4), step + layer, np.float32) for layer in (0, 1)}
        usage = {f"{layer}.usage": np.ones(2, np.float32) for layer in (0, 1)}
        save_file(keys | usage, tmp_path / "keys" / f"step-{step}.safetensors")
    return tmp_path


def test_a_finished_run_lacks_nothing(folder: Path) -> None:
    run = read_run(folder)
    assert run.missing == ()
    assert run.status == "finished"
    assert run.name == "mine"
    assert run.steps == [STEP]
    assert run.evaluations == [EVALUATION]
    assert run.samples[0]["text"] == "Once."
    assert run.checkpoints == (4,)
    assert run.env == {"torch": "2.11"}


def test_snapshots_are_in_the_order_of_steps(folder: Path) -> None:
    snapshots = read_run(folder).snapshots
    assert snapshots.steps == (0, 4, 10)
    assert snapshots.layers == (0, 1)
    assert [snapshots.read("keys", step, 1).tolist() for step in snapshots.steps] == [[[n] * 4] * 2 for n in (1, 5, 11)]
    assert snapshots.read("usage", 4, 0).tolist() == [1, 1]


def test_reading_a_run_needs_no_torch(folder: Path) -> None:
    code = "from some_moe.glass.inspect.runs import read_run"
    code = f"import sys; {code}; read_run(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_run_without_result_is_training_or_killed(folder: Path) -> None:
    (folder / "result.json").unlink()
    run = read_run(folder)
    assert run.status == UNFINISHED
    assert run.result is None
    assert [sentence for sentence in run.missing if "test loss is not known" in sentence]


def test_an_unfinished_last_line_is_left_out_and_named(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train_lo')
    run = read_run(folder)
    assert run.steps == [STEP]
    assert run.missing == (
        "The last line of metrics.jsonl is unfinished and left out, as when a run is killed in writing.",
    )


def test_damaged_lines_between_are_named_by_number(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(STEP), "###", "[1]", json.dumps(EVALUATION)]) + "\n")
    run = read_run(folder)
    assert run.evaluations == [EVALUATION]
    assert "metrics.jsonl cannot be read at line 2, 3: what stood there is left out." in run.missing


def test_a_damaged_snapshot_is_left_out_and_named(folder: Path) -> None:
    (folder / "keys" / "step-4.safetensors").write_bytes(b"nonsense")
    run = read_run(folder)
    assert run.snapshots.steps == (0, 10)
    assert run.missing == ("The key snapshot step-4.safetensors is damaged and left out.",)


@pytest.mark.parametrize("change", ["another layer", "too few", "too wide", "another type"])
def test_a_snapshot_of_another_model_is_left_out_and_named(folder: Path, change: str) -> None:
    tensors = {f"{layer}.keys": np.ones((2, 4), np.float32) for layer in (0, 1)}
    tensors |= {f"{layer}.usage": np.ones(2, np.float32) for layer in (0, 1)}
    if change == "another layer":
        tensors["zz.keys"] = tensors.pop("1.keys")
    elif change == "too few":
        del tensors["1.usage"]
    else:
        tensors["0.keys"] = np.ones((2, 5), np.float32) if change == "too wide" else np.ones((2, 4), np.int32)
    save_file(tensors, folder / "keys" / "step-4.safetensors")
    run = read_run(folder)
    assert run.snapshots.steps == (0, 10)
    assert run.missing == ("The key snapshot step-4.safetensors is damaged and left out.",)


def test_keys_that_are_no_numbers_are_refused_when_they_are_read(folder: Path) -> None:
    tensors = {f"{layer}.keys": np.full((2, 4), np.nan, np.float32) for layer in (0, 1)}
    tensors |= {f"{layer}.usage": np.ones(2, np.float32) for layer in (0, 1)}
    save_file(tensors, folder / "keys" / "step-4.safetensors")
    with pytest.raises(ConfigError, match=r"step-4.safetensors' holds what is no number; restore it, or remove it"):
        read_run(folder).snapshots.read("keys", 4, 0)


def test_a_damaged_result_is_no_result(folder: Path) -> None:
    (folder / "result.json").write_text("{")
    run = read_run(folder)
    assert run.result is None
    assert "result.json is damaged and left out." in run.missing


def test_an_empty_run_says_everything_that_follows(tmp_path: Path) -> None:
    RunConfig().save(tmp_path / "config.yaml")
    run = read_run(tmp_path)
    said = " ".join(run.missing)
    for words in ("test loss", "env.json", "training curve", "validation curve", "key movement", "replayed", "sample"):
        assert words in said
    assert run.last_step == 0
    assert all(sentence.endswith(".") for sentence in run.missing)


def test_one_snapshot_is_no_movement(folder: Path) -> None:
    for step in (4, 10):
        (folder / "keys" / f"step-{step}.safetensors").unlink()
    assert read_run(folder).missing == ("Only one key snapshot: key movement needs two.",)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"model.ffn": "dense", "model.dense_width": 8}, "dense blocks"),
        ({"model.router": "hash"}, "hash routing"),
    ],
)
def test_a_model_without_keys_misses_no_snapshots(folder: Path, changes: dict[str, Any], kind: str) -> None:
    off = {f"gravity.{name}": False for name in ("use_alpha", "use_beta", "use_delta")}
    RunConfig().override(off | {"gravity.balance_rate": 0.0} | changes).save(folder / "config.yaml")
    run = read_run(folder)
    assert not run.has_keys
    assert run.missing == (f"This model has no keys ({kind}): there is no key map and no key movement.",)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run: it has no config"):
        read_run(tmp_path / "nowhere")

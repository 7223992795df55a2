"""Resuming: settings that were changed meanwhile, training longer, and going back, killed at every moment of it."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import some_moe
from some_moe.config import ConfigError, RunConfig, TrainingStoppedError
from some_moe.errors import FailureError
from some_moe.sinks.display import Display
from some_moe.training import run_folder as run_folder_module
from some_moe.training.run_folder import RunFolder
from some_moe.training.runs import Run
from tests.shared.tiny import A1, TINY
from tests.shared.typed import listing

CONFIG = A1.config.override(
    TINY | {"data.train_subset_size": 32, "train.save_every": 1, "train.keep_last": 9}
)  # 4 steps


class Listener(Display):
    """Keeps what it is told; `die_at` is the step at which the process is gone."""

    def __init__(self, die_at: int | None = None) -> None:
        self.lines: list[str] = []
        self.die_at = die_at

    def say(self, text: str) -> None:
        self.lines.append(text)

    def advance(self, step: int) -> None:
        if step == self.die_at:
            raise DiedError


class DiedError(BaseException):
    """Stands for a process that is gone."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ["SOME_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    return some_moe.train(CONFIG, out=tmp_path_factory.mktemp("finished") / "run", display=False).path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def edit(run: Path, changes: dict[str, Any]) -> None:
    """Change config.yaml by hand, in a run that has not finished."""
    (run / "result.json").unlink(missing_ok=True)
    RunConfig.load(run / "config.yaml").override(changes).save(run / "config.yaml")


def contents(run: Path) -> dict[str, Any]:
    """All that a run leaves, but for what time measured."""
    result = json.loads((run / "result.json").read_text())
    newest = run / "checkpoints" / f"step-{result['steps']}"
    tensors = load_file(newest / "model.safetensors") | load_file(newest / "optimizer.safetensors")
    logs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in (result, *logs):
        for name in ("seconds", "tokens_per_second", "compile_seconds", "phases"):
            record.pop(name, None)
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*"))
    return {"result": result, "logs": logs, "names": names} | {name: value.tolist() for name, value in tensors.items()}


# --- settings that were changed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "before"),
    [
        ("gravity.ema_decay", 0.5, None), ("train.seed", 7, "0"), ("train.epochs", 2, "1"), ("data.seq_len", 32, "64"),
        ("train.learning_rate", 0.5, None), ("model.router", "learned", "gravity"), ("train.precision", "bf16", "auto"),
    ],
)  # fmt: skip
def test_a_config_that_was_edited_is_named_and_nothing_is_touched(
    run: Path, field: str, value: Any, before: str | None
) -> None:
    before = before or str(CONFIG.flatten()[field])
    learned = {"gravity.use_alpha": False, "gravity.use_beta": False, "gravity.use_delta": False}
    edit(run, {field: value} | (learned if value == "learned" else {}))
    there = listing(run)
    with pytest.raises(
        ConfigError, match=rf"step-4' was trained with .*{field} {before}.* up to step 4, config.yaml now"
    ):
        some_moe.train(resume=run, display=False)
    assert listing(run) == there


def test_what_changes_no_result_may_differ(run: Path, finished: Path) -> None:
    edit(run, {"train.log_every": 3, "train.save_every": 2, "data.workers": 2, "train.device": "auto"})
    result = some_moe.train(resume=run / "checkpoints" / "step-2", display=False).result
    assert result is not None
    assert result["changes"] == []
    assert result["test_loss"] == json.loads((finished / "result.json").read_text())["test_loss"]


def test_accepted_changes_are_recorded_in_the_result_and_in_every_later_state(run: Path) -> None:
    edit(run, {"train.weight_decay": 0.5})
    place = run / "checkpoints" / "step-2"
    before = CONFIG.train.weight_decay
    expected = [{"step": 2, "field": "train.weight_decay", "before": before, "after": 0.5}]
    with pytest.raises(DiedError):  # before another checkpoint is saved: what was accepted stays so
        some_moe.train(resume=place, accept_changes=True, display=Listener(die_at=3))
    assert json.loads((place / "state.json").read_text())["changes"] == expected
    result = some_moe.train(resume=run, display=False).result
    assert result is not None
    assert result["changes"] == expected
    state = json.loads((run / "checkpoints" / "step-4" / "state.json").read_text())
    assert (state["changes"], state["config"]["train.weight_decay"]) == (expected, 0.5)


def test_changes_that_are_asked_for_are_written_into_the_config(run: Path) -> None:
    wanted = RunConfig.load(run / "config.yaml").override({"train.weight_decay": 0.5})
    with pytest.raises(ConfigError, match=r"another config: train.weight_decay .*; resume it .* add --accept-changes"):
        some_moe.train(wanted, resume=run / "checkpoints" / "step-1", display=False)
    done = some_moe.train(wanted, resume=run / "checkpoints" / "step-1", accept_changes=True, display=False)
    assert RunConfig.load(run / "config.yaml") == wanted == done.config
    assert done.result is not None
    assert [change["field"] for change in done.result["changes"]] == ["train.weight_decay"]


def test_a_checkpoint_of_before_has_no_config_to_compare(run: Path) -> None:
    for place in (run / "checkpoints").iterdir():
        state = json.loads((place / "state.json").read_text())
        del state["config"], state["changes"]
        (place / "state.json").write_text(json.dumps(state))
    edit(run, {"train.weight_decay": 0.5})
    assert some_moe.train(resume=run / "checkpoints" / "step-3", display=False).result is not None


# --- training longer ------------------------------------------------------------------------------------------


def longer(run: Path, display: Display | bool = False, **changes: Any) -> Run:
    config = RunFolder(run).read_config().override(changes or {"train.epochs": 3})
    return some_moe.train(config, resume=run, display=display)


def test_a_finished_run_is_trained_longer_and_says_so(run: Path, finished: Path) -> None:
    listener = Listener()
    result = longer(run, listener).result
    assert result is not None
    assert (result["steps"], len(result["epochs"])) == (12, 3)
    assert result["changes"] == [{"step": 4, "field": "train.epochs", "before": 1, "after": 3}]
    assert any("training to step 12 instead of 4: the learning rate follows" in line for line in listener.lines)
    assert RunConfig.load(run / "config.yaml").train.epochs == 3
    assert result["epochs"][0] == json.loads((finished / "result.json").read_text())["epochs"][0]
    assert some_moe.train(resume=run, display=False).result == json.loads((run / "result.json").read_text())


@pytest.mark.parametrize("die_at", [5, 8, 9])
def test_a_run_that_is_trained_longer_and_killed_ends_with_the_same_bits(
    run: Path, tmp_path: Path, finished: Path, die_at: int
) -> None:
    whole = Path(shutil.copytree(finished, tmp_path / "whole"))
    longer(whole)
    with pytest.raises(DiedError):
        longer(run, Listener(die_at=die_at))
    some_moe.train(resume=run, display=False)
    assert contents(run) == contents(whole)


def test_a_run_that_stopped_early_goes_on(tmp_path: Path) -> None:
    changes = {"train.early_stop": 1, "train.eval_every": 1, "train.learning_rate": 5.0, "train.clip": 0.0}
    first = some_moe.train(CONFIG.override(changes), out=tmp_path / "run", display=False).result
    assert first is not None
    assert first["status"] == "stopped early"
    again = longer(tmp_path / "run", **{"train.epochs": 2}).result
    assert again is not None
    assert again["steps"] > first["steps"]
    assert again["best_val_loss"] <= first["best_val_loss"]


def test_lengths_only_grow_and_beyond_the_present_step(run: Path) -> None:
    there = listing(run)
    with pytest.raises(ConfigError, match=r"has made all of the 4 steps .*; give more by --train.epochs"):
        longer(run, **{"train.epochs": 2, "train.max_steps": 4})
    with pytest.raises(ConfigError, match=r"another config: train.max_steps \(None there, 2 here\)"):
        longer(run, **{"train.max_steps": 2})
    assert listing(run) == there
    result = longer(run, **{"train.epochs": 2, "train.max_steps": 6}).result
    assert result is not None
    assert result["steps"] == 6


# --- going back -----------------------------------------------------------------------------------------------


def die_before(number: int, patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let the process be gone before it renames or removes for the number-th time."""
    calls = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise DiedError
            return original(*arguments, **options)

        return call

    for module, name in ((os, "replace"), (shutil, "rmtree"), (Path, "unlink")):
        patch.setattr(module, name, counted(getattr(module, name)))
    return lambda: calls


def test_killed_at_any_moment_of_going_back_it_is_as_it_was_or_as_was_asked(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = RunConfig.load(finished / "config.yaml").override({"train.epochs": 2})
    whole = Path(shutil.copytree(finished, tmp_path / "whole"))
    some_moe.train(asked, resume=whole / "checkpoints" / "step-1", display=False)
    before = {"finished": 0, "asked": 0}
    for number in range(1, 40):
        run = Path(shutil.copytree(finished, tmp_path / str(number)))
        with monkeypatch.context() as patch:
            died = die_before(number, patch)
            with contextlib.suppress(DiedError):
                some_moe.train(asked, resume=run / "checkpoints" / "step-1", display=Listener(die_at=2))
            if died() < number:
                break
        if RunFolder(run).read_result() is not None:  # as it was
            before["finished"] += 1
            assert [place.name for place in RunFolder(run).list_checkpoints()] == [f"step-{n}" for n in (1, 2, 3, 4)]
        else:
            before["asked"] += 1
            assert [place.name for place in RunFolder(run).list_checkpoints()] == ["step-1"]
            assert some_moe.load(run).config == asked
    assert before["finished"] >= 1
    assert before["asked"] > 8
    some_moe.train(resume=run, display=False)
    assert contents(run) == contents(whole)


def test_what_killed_processes_left_is_cleared_when_a_run_goes_on(run: Path) -> None:
    (run / "result.json").unlink()
    left = [".result.json.00000000-7.tmp", ".config.yaml.tmp", "keys/.step-9.safetensors.00000000-7.tmp"]
    for name in left:
        (run / name).write_text("half")
    (run / "checkpoints" / f".step-9.00000000-{os.getpid()}.tmp").mkdir()
    (run / ".report.html.00000000-7.tmp").write_text("somebody else's, on another machine")
    some_moe.train(resume=run, display=False)
    assert {path.name for path in run.rglob(".*")} == {".report.html.00000000-7.tmp", ".run.lock"}


def test_what_a_killed_process_left_in_a_finished_run_is_cleared_too(run: Path) -> None:
    before = listing(run)
    (run / f"..resume.json.00000000-{os.getpid()}.tmp").write_text("half")
    assert some_moe.train(resume=run, display=False).result is not None
    assert listing(run) == before


def test_one_checkpoint_too_many_is_removed_at_the_end(run: Path) -> None:
    edit(run, {"train.keep_last": 1})
    some_moe.train(resume=run, display=False)
    assert [place.name for place in RunFolder(run).list_checkpoints()] == ["step-4"]


def test_a_pipe_instead_of_a_log_is_refused_and_a_dangling_checkpoint_is_removed(run: Path) -> None:
    (run / "checkpoints" / "step-9").symlink_to("nowhere")
    (run / "keys" / "step-9.safetensors").mkdir()
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    place = run / "checkpoints" / "step-2"
    with pytest.raises(ConfigError, match=r"metrics.jsonl' is a pipe, not a file"):
        some_moe.train(resume=place, display=False)
    assert len(RunFolder(run).list_checkpoints()) == 5
    (run / "metrics.jsonl").unlink()
    assert some_moe.train(resume=place, display=False).result is not None


def test_a_full_disk_while_going_back_is_a_failure_and_can_be_repeated(
    run: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for name, left in (("write_whole", 4), ("cut_log", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(run_folder_module, name, fill)
            with pytest.raises(
                FailureError, match=r"cannot be written \(No space left on device\); make room, and resume"
            ):
                some_moe.train(resume=run / "checkpoints" / "step-2", display=False)
        assert len(RunFolder(run).list_checkpoints()) == left
    some_moe.train(resume=run, display=False)
    assert contents(run) == contents(finished)


def test_a_link_that_leads_out_is_not_written_through(run: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "result.json", ".run.lock", "keys/step-3.safetensors"):
        copy = Path(shutil.copytree(run, tmp_path / f"copy of {Path(name).name}"))
        (copy / "result.json").unlink()
        (copy / name).unlink(missing_ok=True)
        (copy / name).symlink_to(tmp_path / "mine.txt")
        (tmp_path / "mine.txt").write_text("mine")
        with pytest.raises(ConfigError, match=r"leads out of its folder, to '.*mine.txt'"):
            some_moe.train(resume=copy / "checkpoints" / "step-2", display=False)
        assert (tmp_path / "mine.txt").read_text() == "mine"
        assert not (copy / ".resume.json").exists()


@pytest.mark.parametrize("name", ["checkpoints", "keys"])
def test_what_lies_where_a_folder_belongs_is_refused(run: Path, name: str) -> None:
    shutil.rmtree(run / name)
    os.mkfifo(run / name)
    (run / "result.json").unlink()
    with pytest.raises(ConfigError, match=rf"{name}' is no folder; a run needs one there, so remove it"):
        some_moe.train(resume=run, display=False)


def test_bits_do_not_depend_on_how_often_it_was_resumed(run: Path, finished: Path) -> None:
    for step in (3, 1, 2):
        with pytest.raises((DiedError, TrainingStoppedError)):
            some_moe.train(resume=run / "checkpoints" / f"step-{step}", display=Listener(die_at=4))
    some_moe.train(resume=run, display=False)
    left, right = (load_file(path / "checkpoints" / "step-4" / "model.safetensors") for path in (run, finished))
    assert all(torch.equal(left[name], right[name]) for name in left)

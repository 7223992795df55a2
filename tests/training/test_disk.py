"""What a run writes to the disk: everything, weights alone, or the best at the end; and never more than there is."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import some_moe
from some_moe import memory
from some_moe.cli import main
from some_moe.config import ConfigError, RunConfig, TrainingStoppedError
from some_moe.lab.estimate import estimate
from some_moe.sinks.display import Display
from some_moe.training.loop import Trainer, resume, start, train
from some_moe.training.run_folder import RunFolder
from tests.shared.tiny import A1, TINY

SIX_STEPS = TINY | {"data.train_subset_size": 24, "train.epochs": 2, "train.save_every": 1, "train.threads": 1}


def make_config(**changes: Any) -> RunConfig:
    config = A1.config.override(SIX_STEPS)
    return config.override({name.replace("__", "."): value for name, value in changes.items()})


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    return train(start(make_config(**changes), RunFolder(folder), Display()))


def held(folder: Path) -> list[str]:
    return [place.name for place in RunFolder(folder).list_checkpoints()]


class Note(Display):
    """Keeps what is said, and interrupts at a step."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.at, self.lines = at, list[str]()

    def advance(self, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGINT)

    def say(self, text: str) -> None:
        self.lines.append(text)


FIGURES = ("val_loss", "best_val_loss", "test_loss", "test_loss_last_step", "epochs", "layers", "best_step", "steps")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saves everything, whose second epoch is worse than its first."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, train__keep_last=9, **WORSE)
    return folder


WORSE = {"train__eval_every": 1, "train__learning_rate": 0.3, "train__warmup": 0.0}


def result_of(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    return {name: result[name] for name in FIGURES}


@pytest.mark.parametrize("kind", ["weights", "best"])
def test_what_is_saved_changes_no_figure(whole: Path, tmp_path: Path, kind: str) -> None:
    run(tmp_path / "run", train__checkpoints=kind, **WORSE)
    assert result_of(tmp_path / "run") == result_of(whole)
    assert result_of(whole)["best_step"] < 6


def test_weights_alone_are_a_third_and_load_like_any_checkpoint(whole: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", train__checkpoints="weights", train__keep_last=9, **WORSE)
    assert held(tmp_path / "run") == held(whole)
    for name in held(whole):
        here, there = (folder / "checkpoints" / name for folder in (tmp_path / "run", whole))
        mine, other = (load_file(place / "model.safetensors") for place in (here, there))
        assert all(torch.equal(mine[one], other[one]) for one in mine.keys() | other.keys())
        assert [*load_file(here / "optimizer.safetensors")] == ["epoch_counts"]
    assert some_moe.load(tmp_path / "run").evaluate()["loss"] == some_moe.load(whole).evaluate()["loss"]


def test_the_best_is_written_once_at_the_end(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = Trainer.write
    monkeypatch.setattr(Trainer, "write", lambda self, kept: (written.append(self.progress.step), write(self, kept))[1])
    run(tmp_path / "run", train__checkpoints="best", **WORSE)
    assert written == [6]
    best = f"step-{result_of(whole)['best_step']}"
    assert held(tmp_path / "run") == [best]
    here, there = (
        load_file(folder / "checkpoints" / best / "model.safetensors") for folder in (tmp_path / "run", whole)
    )
    assert all(torch.equal(here[name], there[name]) for name in there)
    assert some_moe.load(tmp_path / "run", checkpoint="last").step == result_of(whole)["best_step"]


def test_an_interrupted_run_of_the_best_alone_goes_on_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(TrainingStoppedError, match="interrupted at step 5, which is saved"):
        train(start(make_config(train__checkpoints="best", **WORSE), folder, Note(at=5)))
    best = f"step-{result_of(whole)['best_step']}"
    assert held(folder.path) == [best, "step-5"]
    train(resume(folder, note := Note(), folder.newest_checkpoint()))
    assert not [line for line in note.lines if "weights alone" in line]
    assert result_of(folder.path) == result_of(whole)
    assert held(folder.path) == [best]
    assert json.loads(folder.result_file.read_text())["changes"] == []


def test_a_run_that_diverges_keeps_the_best_that_was_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = start(make_config(train__checkpoints="best", train__eval_every=1), RunFolder(tmp_path / "run"), Display())
    step = trainer.stepper

    def diverge(*arguments: Any) -> Any:
        result = step(*arguments)
        return replace(result, loss=result.loss * float("nan")) if trainer.progress.step == 4 else result

    monkeypatch.setattr(diverge, "compile_seconds", 0.0, raising=False)
    monkeypatch.setattr(trainer, "stepper", diverge)
    with pytest.raises(TrainingStoppedError, match="the loss became nan at step 5; the last good checkpoint is"):
        train(trainer)
    assert held(tmp_path / "run") == ["step-4"]


def test_weights_alone_are_resumed_with_a_word_and_a_record_of_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(TrainingStoppedError, match="interrupted at step 3"):
        train(start(make_config(train__checkpoints="weights"), folder, Note(at=3)))
    trainer = resume(folder, note := Note(), folder.newest_checkpoint())
    assert note.lines == [
        f"{folder}/checkpoints/step-3 holds weights alone: the optimizer begins anew, and the run ends otherwise"
    ]
    assert not trainer.optimizer.state
    result = train(trainer)
    assert result["steps"] == 6
    assert [(one["step"], one["field"]) for one in result["changes"]] == [(3, "optimizer")]
    assert folder.read_result() is not None


# --- before it begins -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"model.trainability": "full"}, {"model.init_method": "orthogonal"}])
@pytest.mark.parametrize("kind", ["all", "weights"])
def test_the_formula_gives_a_checkpoints_size(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    config = make_config().override(changes | {"train.checkpoints": kind, "train.max_steps": 1})
    train(start(config, RunFolder(tmp_path / "run"), Display()))
    (place,) = RunFolder(tmp_path / "run").list_checkpoints()
    size = sum(file.stat().st_size for file in place.glob("*.safetensors"))
    assert memory.checkpoint_bytes(config, whole=kind == "all") == pytest.approx(size, rel=0.05, abs=20_000)


def test_a_disk_that_checkpoints_would_fill_is_refused_with_both_numbers_and_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()
    one, needed = memory.disk_bytes(config, 6)
    assert needed == 4 * one  # two kept, the best, and one being written
    monkeypatch.setattr(memory, "free_disk", lambda _: needed - 1)
    with pytest.raises(
        ConfigError, match=r"the checkpoints of 'run' take up to .* MiB \(.* MiB each\), and .* free in"
    ):
        some_moe.train(config.override({"name": "run"}), out=tmp_path / "run", display=False)
    assert not (tmp_path / "run").exists()
    monkeypatch.chdir(tmp_path)
    words = ["train", "--preset", "smoke", "--train.device", "cpu", "--train.keep-last", "9"]
    monkeypatch.setattr(memory, "free_disk", lambda _: 1000)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.endswith("choose another --out, lower train.keep_last, or set train.checkpoints to weights or best\n")
    assert main([*words, "--train.checkpoints", "weights"]) == 2
    assert capsys.readouterr().err.endswith("lower train.keep_last, or set train.checkpoints to best\n")
    monkeypatch.setattr(memory, "free_disk", lambda _: needed)
    run(tmp_path / "run")


def test_a_resumed_run_counts_what_lies_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(TrainingStoppedError, match="interrupted at step 3"):
        train(start(make_config(), folder, Note(at=3)))
    one, _ = memory.disk_bytes(make_config(), 6)
    monkeypatch.setattr(memory, "free_disk", lambda _: one)
    with pytest.raises(ConfigError, match="take up to"):
        resume(folder, Display(), folder.newest_checkpoint())
    monkeypatch.setattr(memory, "free_disk", lambda _: 2 * one)
    resume(folder, Display(), folder.newest_checkpoint()).folder.release()


def test_the_need_follows_from_what_is_kept_and_from_how_much_is_saved_at_all() -> None:
    config = make_config(train__keep_last=1000)
    one, needed = memory.disk_bytes(config, 6)
    assert needed == (6 + 2 + 2) * one
    assert memory.disk_bytes(config, None)[1] == 1002 * one
    alone, of_best = memory.disk_bytes(config.override({"train.checkpoints": "best"}), 6)
    assert of_best == alone + one
    assert 2.5 < one / alone < 3.2


def test_a_dry_run_tells_the_need_and_what_is_free(tmp_path: Path) -> None:
    printed = estimate(make_config(), tmp_path / "not" / "yet")
    assert f"are free in {tmp_path}/not/yet\n" in printed
    assert "\ndisk: checkpoints take up to " in printed
    assert memory.free_disk(tmp_path / "not" / "yet") == pytest.approx(memory.free_disk(tmp_path), rel=0.1)

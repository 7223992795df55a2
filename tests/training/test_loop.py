"""The loop in one process: what it writes, how it stops, and that a resumed run equals an uninterrupted one."""

import json
import math
import os
import re
import shlex
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

import some_moe
from some_moe.config import ConfigError, RunConfig
from some_moe.lab.registry.presets import smoke
from some_moe.sinks.display import Display
from some_moe.training import checkpoint
from some_moe.training import loop as loop_module
from some_moe.training.loop import TrainingStoppedError, resume, start, train
from some_moe.training.run_folder import RunFolder, read_log

CHANGES = {"data.train_subset_size": 48, "data.val_subset_size": 8, "train.sample_tokens": 8}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def make_config(**changes: Any) -> RunConfig:
    return smoke().override(CHANGES | changes)


def run(path: Path, **changes: Any) -> dict[str, Any]:
    return train(start(make_config(**changes), RunFolder(path), Display()))


def final_state(path: Path) -> dict[str, torch.Tensor]:
    place = RunFolder(path).list_checkpoints()[-1]
    return load_file(place / "model.safetensors") | load_file(place / "optimizer.safetensors")


def assert_same_run(left: Path, right: Path) -> None:
    """Same losses, same bits of weights, keys and optimizer, same logs but for time."""
    results = [json.loads((path / "result.json").read_text()) for path in (left, right)]
    for result in results:
        del result["seconds"], result["tokens_per_second"], result["phases"]
    assert results[0] == results[1]
    states = [final_state(path) for path in (left, right)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for log in ("metrics.jsonl", "samples.jsonl"):
        records = [read_log(path / log) for path in (left, right)]
        for record in (*records[0], *records[1]):
            record.pop("tokens_per_second", None)
        assert records[0] == records[1]
    assert {p.name for p in (left / "keys").iterdir()} == {p.name for p in (right / "keys").iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 12 steps."""
    os.environ["SOME_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    path = tmp_path_factory.mktemp("whole") / "run"
    run(path)
    return path


def test_the_run_folder_holds_what_the_contract_says(whole: Path) -> None:
    assert {p.name for p in whole.iterdir()} == {
        ".run.lock",
        "config.yaml",
        "env.json",
        "tokenizer.json",
        "metrics.jsonl",
        "samples.jsonl",
        "keys",
        "checkpoints",
        "result.json",
    }
    assert RunConfig.load(whole / "config.yaml") == make_config()
    result = json.loads((whole / "result.json").read_text())
    required = """name experiment status steps tokens seconds tokens_per_second train_loss val_loss best_val_loss
        test_loss val_loss_padded perplexity bits_per_byte total_parameters trainable_parameters middle_layer layers
        seed device epochs"""
    for name in required.split():
        assert name in result
    assert result["steps"] == 12
    assert result["middle_layer"] == 1
    assert result["val_loss_padded"] is None
    assert result["perplexity"] == pytest.approx(math.exp(result["val_loss"]))
    assert [epoch["epoch"] for epoch in result["epochs"]] == [1, 2]
    assert {"layer", "gini", "entropy_bits", "experts_used", "num_experts", "respawns"} <= {*result["layers"][0]}
    env = json.loads((whole / "env.json").read_text())
    assert {"torch", "python", "commit", "device", "command"} <= {*env}
    assert sorted(p.name for p in (whole / "keys").iterdir()) == [
        "step-0.safetensors",
        "step-12.safetensors",
        "step-6.safetensors",
    ]


def test_no_file_of_a_run_is_a_pickle(whole: Path) -> None:
    suffixes = {path.suffix for path in whole.rglob("*") if path.is_file() and path.name != ".run.lock"}
    assert suffixes == {".yaml", ".json", ".jsonl", ".safetensors"}


def test_a_frozen_models_checkpoint_holds_no_expert_weights(whole: Path) -> None:
    place = RunFolder(whole).list_checkpoints()[-1]
    saved = load_file(place / "model.safetensors")
    model = some_moe.load(whole).model
    stacks = sum(stack.numel() for library in model.libraries for stack in library.stacks())
    keys = sum(b.numel() * b.element_size() for layer in model.layers for b in layer.state.buffers())  # type: ignore[union-attr]
    trained = sum(p.numel() for p in model.parameters())
    assert stacks > 0
    assert not [name for name in saved if "library" in name]
    size = (place / "model.safetensors").stat().st_size
    assert size == pytest.approx(4 * trained + keys, abs=8192)
    assert (place / "optimizer.safetensors").stat().st_size == pytest.approx(8 * trained, abs=16384)


def test_two_runs_of_one_seed_are_the_same_to_the_bit(whole: Path, tmp_path: Path) -> None:
    run(tmp_path / "again")
    assert_same_run(whole, tmp_path / "again")
    other = run(tmp_path / "other", **{"train.seed": 1})
    assert other["val_loss"] != json.loads((whole / "result.json").read_text())["val_loss"]


class DiedError(Exception):
    """Stands for a process that is gone."""


@pytest.mark.parametrize("stop_at", [1, 4, 5, 6, 7, 11])
def test_a_run_that_dies_after_any_step_resumes_to_the_same_bits(
    whole: Path, tmp_path: Path, stop_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(make_config(), RunFolder(tmp_path / "run"), Display())
    original = trainer.stepper

    def dying_step(*arguments: Any) -> Any:
        if trainer.progress.step == stop_at:
            raise DiedError
        return original(*arguments)

    monkeypatch.setattr(dying_step, "compile_seconds", 0.0, raising=False)
    monkeypatch.setattr(trainer, "stepper", dying_step)
    with pytest.raises(DiedError):
        train(trainer)
    folder = RunFolder(tmp_path / "run")
    train(resume(folder, Display(), folder.newest_checkpoint()))
    assert_same_run(whole, tmp_path / "run")


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_resume(whole: Path, tmp_path: Path) -> None:
    trainer = start(make_config(), RunFolder(tmp_path / "run"), Display())

    class PressAtSeven(Display):
        def advance(self, step: int) -> None:
            if step == 7:
                os.kill(os.getpid(), signal.SIGINT)

    trainer.display = PressAtSeven()
    with pytest.raises(
        TrainingStoppedError, match=r"interrupted at step 7, which is saved; continue with: .*--resume auto"
    ) as e:
        train(trainer)
    assert e.value.code == 130
    assert (tmp_path / "run" / "checkpoints" / "step-7").is_dir()
    folder = RunFolder(tmp_path / "run")
    train(resume(folder, Display(), folder.newest_checkpoint()))
    assert_same_run(whole, tmp_path / "run")


def test_checkpoints_written_while_it_learns_are_those_of_a_run_that_waits(whole: Path, tmp_path: Path) -> None:
    for name, at in (("run", 0), ("stopped", 7)):
        trainer = start(make_config(), RunFolder(tmp_path / name), Display())
        trainer.writer = ThreadPoolExecutor(1)  # as beside a GPU

        class Press(Display):
            def advance(self, step: int, at: int = at) -> None:
                if step == at:
                    os.kill(os.getpid(), signal.SIGINT)

        trainer.display = Press()
        if at:
            with pytest.raises(TrainingStoppedError, match="interrupted at step 7, which is saved"):
                train(trainer)
            folder = RunFolder(tmp_path / name)
            trainer = resume(folder, Display(), folder.newest_checkpoint())
        train(trainer)
        assert_same_run(whole, tmp_path / name)


def test_a_checkpoint_that_cannot_be_written_meanwhile_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = start(make_config(), RunFolder(tmp_path / "run"), Display())
    trainer.writer = ThreadPoolExecutor(1)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_checkpoint", fail)
    with pytest.raises(TrainingStoppedError, match=r"cannot write to .* \(No space left on device\); no checkpoint"):
        train(trainer)


def test_a_run_tells_where_its_time_went(whole: Path, tmp_path: Path) -> None:
    phases = json.loads((whole / "result.json").read_text())["phases"]
    assert set(phases) >= {"start", "data", "model", "steps", "evaluation", "samples", "checkpoints", "other"}
    assert all(seconds >= 0 for seconds in phases.values())
    folder = RunFolder(tmp_path / "run")
    trainer = start(make_config(), folder, Display())
    train(trainer)
    newest = json.loads((folder.newest_checkpoint() / "state.json").read_text())["phases"]
    trainer = resume(folder, Display(), folder.newest_checkpoint())
    assert trainer.progress.phases == newest
    assert trainer.phases.table(newest)["steps"] == newest["steps"]  # none was made in this process yet


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    trainer = start(make_config(), RunFolder(tmp_path / "run"), Display())
    original = loop_module.Trainer.run_periodic

    def poison(self: Any, epoch: int) -> None:
        original(self, epoch)
        if self.progress.step == 8:
            with torch.no_grad():
                self.model.head.bias.fill_(math.nan)

    trainer.run_periodic = poison.__get__(trainer)  # type: ignore[method-assign]
    with pytest.raises(
        TrainingStoppedError, match=r"loss became nan at step 9; the last good checkpoint is .*step-6"
    ) as error:
        train(trainer)
    assert error.value.code == 1
    newest = RunFolder(tmp_path / "run").newest_checkpoint()
    assert newest is not None
    assert all(torch.isfinite(value).all() for value in load_file(newest / "model.safetensors").values())
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize(("clip", "cure"), [(0.0, " or set train.clip"), (1.0, "")])
def test_a_gradient_that_is_not_finite_is_named_when_the_loss_is(tmp_path: Path, clip: float, cure: str) -> None:
    trainer = start(make_config(**{"train.clip": clip}), RunFolder(tmp_path / "run"), Display())
    trainer.model.head.bias.register_hook(lambda gradient: gradient * (math.inf if trainer.progress.step else 1))
    with pytest.raises(TrainingStoppedError) as error:
        train(trainer)
    assert re.fullmatch(
        rf"the norm of the gradient became (inf|nan) at step 2; .*; lower train.learning_rate{cure}", str(error.value)
    )


def test_a_first_step_that_gives_no_number_is_not_blamed_on_the_learning_rate(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingStoppedError, match=r"at step 1; no checkpoint .*; bring model.embedding_std and"
    ) as error:
        run(tmp_path / "run", **{"model.embedding_std": 1e38})
    assert "learning_rate" not in str(error.value)


class Press(Display):
    """Sends signals to this process when a step is done."""

    def __init__(self, at: int, *numbers: int) -> None:
        self.at, self.numbers, self.lines = at, numbers, list[str]()

    def advance(self, step: int) -> None:
        if step == self.at:
            for number in self.numbers:
                os.kill(os.getpid(), number)

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
@pytest.mark.parametrize("names", [["SIGHUP"], ["SIGTERM"], ["SIGUSR1"], ["SIGUSR2"], ["SIGTERM", "SIGUSR2", "SIGINT"]])
def test_a_closed_terminal_a_polite_kill_and_a_cluster_save_as_ctrl_c_does(tmp_path: Path, names: list[str]) -> None:
    numbers = [getattr(signal, name) for name in names]
    ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]  # as nohup has it
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(TrainingStoppedError, match="interrupted at step 2, which is saved") as error:
            train(start(make_config(), RunFolder(tmp_path / "my run"), Press(2, *numbers)))
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
    assert error.value.code == 130
    assert shlex.split(str(error.value).partition("continue with: ")[2]) == [
        "some", "train", "--out", str(tmp_path / "my run"), "--resume", "auto",
    ]  # fmt: skip


@pytest.mark.parametrize("saved", [False, True])
def test_more_ctrl_c_stop_at_once_and_tell_which_checkpoint_is_there(tmp_path: Path, saved: bool) -> None:
    press = Press(7 if saved else 2, *[signal.SIGINT] * 5)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(TrainingStoppedError, match="stopped at once, at step") as error:
        train(start(make_config(), RunFolder(tmp_path / "run"), press))
    assert error.value.code == 130
    assert ("the last whole checkpoint is" in str(error.value)) == saved
    assert press.lines[-1].startswith("stopping after this step")
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a folder in use where it is")
@pytest.mark.parametrize("at", [1, 5])
def test_a_folder_that_is_moved_away_in_training_is_said_to_be_gone(tmp_path: Path, at: int) -> None:
    class MoveAway(Display):
        def advance(self, step: int) -> None:
            if step == at:
                (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(TrainingStoppedError, match=r"the run folder '.*/run' is gone: it was moved or removed"):
        train(start(make_config(**{"train.save_every": 1}), RunFolder(tmp_path / "run"), MoveAway()))
    assert not (tmp_path / "run").exists()
    assert some_moe.train(resume=tmp_path / "moved", display=False).result is not None


def test_a_disk_that_fills_up_leaves_the_last_checkpoint_whole(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(make_config(), RunFolder(tmp_path / "run"), Display())
    original = safetensors.torch.save_file

    def full(tensors: Any, path: Path, *metadata: Any) -> None:
        original(tensors, path, *metadata)
        if ".step-10" in str(path):
            path.write_bytes(path.read_bytes()[:100])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(
        TrainingStoppedError, match=r"No space left on device.*last whole checkpoint is .*step-6"
    ) as error:
        train(trainer)
    assert error.value.code == 1
    monkeypatch.setattr(safetensors.torch, "save_file", original)
    folder = RunFolder(tmp_path / "run")
    assert not list(folder.checkpoints.glob(".*"))
    train(resume(folder, Display(), folder.newest_checkpoint()))
    assert_same_run(whole, tmp_path / "run")


def test_early_stop_ends_the_run_and_test_is_reported_at_the_best_step(tmp_path: Path) -> None:
    result = run(
        tmp_path / "run",
        **{
            "train.early_stop": 2,
            "train.eval_every": 2,
            "train.epochs": 40,
            "train.learning_rate": 0.1,
            "train.clip": 0,
        },
    )
    assert result["status"] == "stopped early"
    assert result["best_step"] < result["steps"] < 240
    assert result["best_val_loss"] < result["val_loss"]
    assert result["test_loss"] != result["test_loss_last_step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{result['best_step']}").is_dir()


def test_only_the_last_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    run(tmp_path / "run", **{"train.save_every": 1, "train.keep_last": 3})
    names = [path.name for path in RunFolder(tmp_path / "run").list_checkpoints()]
    assert names == ["step-10", "step-11", "step-12"]


def test_a_used_folder_is_never_written_over(whole: Path) -> None:
    before = (whole / "result.json").read_bytes()
    with pytest.raises(ConfigError, match="is not empty; continue it with --resume auto"):
        start(make_config(), RunFolder(whole), Display())
    assert (whole / "result.json").read_bytes() == before


def test_changed_data_is_noticed_on_resume(tmp_path: Path) -> None:
    source = tmp_path / "stories.jsonl"
    source.write_text("".join(json.dumps({"text": f"A story of {n} hens."}) + "\n" for n in range(90)))
    changes = {"data.source": str(source), "data.train_subset_size": None, "train.max_steps": 6}
    trainer = start(make_config(**changes), RunFolder(tmp_path / "run"), Display())
    train(trainer)
    source.write_text("".join(json.dumps({"text": f"A story of {n} cows."}) + "\n" for n in range(90)))
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"has changed since .*step-6' was saved"):
        resume(folder, Display(), folder.newest_checkpoint())


def test_init_from_starts_with_the_weights_and_keys_of_another_run(whole: Path, tmp_path: Path) -> None:
    place = RunFolder(whole).list_checkpoints()[-1]
    trainer = start(make_config(), RunFolder(tmp_path / "run"), Display(), init_from=place)
    saved = load_file(place / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.progress.step == 0
    assert not trainer.optimizer.state


def test_a_run_with_the_weights_of_another_keeps_them_when_it_dies_early(whole: Path, tmp_path: Path) -> None:
    place, folder = RunFolder(whole).list_checkpoints()[-1], RunFolder(tmp_path / "run")
    start(make_config(), folder, Display(), init_from=place)
    folder.release()
    trainer = resume(folder, Display(), folder.newest_checkpoint())
    saved = load_file(place / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in trainer.model.state_dict().items())
    train(trainer)
    train(start(make_config(), RunFolder(tmp_path / "again"), Display(), init_from=place))
    assert_same_run(tmp_path / "run", tmp_path / "again")


def test_a_clock_in_nanoseconds_is_a_seed(tmp_path: Path) -> None:
    for seed in (1731700000000000000, 2**63 - 1):
        result = run(tmp_path / str(seed), **{"train.seed": seed, "train.max_steps": 2})
        assert result["seed"] == seed


def test_resuming_an_earlier_checkpoint_makes_the_later_steps_again(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    folder = RunFolder(copy)
    trainer = resume(folder, Display(), copy / "checkpoints" / "step-10")
    assert [place.name for place in folder.list_checkpoints()] == ["step-10"]
    assert folder.read_result() is None
    assert max(record["step"] for record in read_log(copy / "metrics.jsonl")) <= 10
    train(trainer)
    assert_same_run(whole, copy)


def test_load_gives_the_model_that_was_evaluated(whole: Path) -> None:
    loaded = some_moe.load(whole)
    assert loaded.step == 12
    assert not loaded.model.training
    saved = load_file(whole / "checkpoints" / "step-12" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in loaded.model.state_dict().items())
    with pytest.raises(ConfigError, match="has no checkpoint 'step-1'; it has step-10, step-12"):
        some_moe.load(whole, checkpoint="step-1")


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_every_way_of_batching_trains(tmp_path: Path, batching: str) -> None:
    result = run(tmp_path / "run", **{"data.batching": batching, "train.max_steps": 3})
    assert math.isfinite(result["test_loss"])


def test_the_published_protocol_reports_both_losses(tmp_path: Path) -> None:
    result = run(
        tmp_path / "run",
        **{
            "data.batching": "padded",
            "data.loss_on": "all_positions",
            "data.count_padding": True,
            "data.seq_len": 640,
            "train.max_steps": 3,
        },
    )
    share = result["text_share"]
    assert 0.2 < share < 1
    expected = share * result["val_loss"] + (1 - share) * result["val_loss_on_padding"]
    assert result["val_loss_padded"] == pytest.approx(expected)


def test_top_k_warmup_is_logged_and_deterministic_mode_trains(tmp_path: Path) -> None:
    run(tmp_path / "run", **{"train.top_k_warmup": 0.5, "train.log_every": 1, "train.deterministic": True})
    torch.use_deterministic_algorithms(False)
    steps = [record for record in read_log(tmp_path / "run" / "metrics.jsonl") if "top_k" in record]
    assert [record["top_k"] for record in steps] == [1] * 6 + [2] * 6


def test_tensorboard_gets_the_figures_where_asked(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path / "run", **{"train.tensorboard": True})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [4, 8, 12]
    assert len(events.Scalars("val_loss")) == 2
    assert len(events.Scalars("layer 1/gini")) == 2

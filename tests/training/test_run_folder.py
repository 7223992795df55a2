"""The run folder: when a run has begun, what a killed start leaves, and that one process at a time trains there.

And what a run says of where it comes from.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import some_moe
from some_moe.config import ConfigError, RunConfig
from some_moe.config import base as base_module
from some_moe.environment import describe_program
from some_moe.sinks.display import Display
from some_moe.system import processes
from some_moe.training import checkpoint as checkpoint_module
from some_moe.training import run_folder as run_folder_module
from some_moe.training.loop import Trainer, resume, start, train
from some_moe.training.run_folder import RunFolder, read_log
from tests.shared.tiny import A1, TINY

CONFIG = A1.config.override(TINY)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def begin(path: Path, config: RunConfig = CONFIG, init_from: Path | None = None) -> Trainer:
    return start(config, RunFolder(path), Display(), init_from=init_from)


def leave_checkpoint(path: Path) -> Path:
    """The checkpoint of a run that has made no step."""
    trainer = begin(path)
    trainer.save()
    trainer.folder.release()
    return path / "checkpoints" / "step-0"


class DiedError(Exception):
    """Stands for a process that is gone."""


@pytest.mark.parametrize("killed_at", ["tokenizer.json", "env.json", "state.json", "config.yaml"])
def test_a_start_that_was_killed_does_not_stand_in_the_way(
    tmp_path: Path, killed_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, path = leave_checkpoint(tmp_path / "other"), tmp_path / "run"

    def write_half(to: Path, text: str) -> None:
        if to.name == killed_at:
            to.with_name(f".{to.name}.tmp").write_text(text[:9])
            raise DiedError
        to.write_text(text)

    with monkeypatch.context() as patch:
        for module in (run_folder_module, checkpoint_module, base_module):
            patch.setattr(module, "write_whole", write_half)
        with pytest.raises(DiedError):
            begin(path, init_from=place)
    assert bool(RunFolder(path).list_checkpoints()) == (killed_at == "config.yaml")
    assert not RunFolder(path).exists()
    # The weights that the first start had saved are not those of the second.
    begin(path).folder.release()
    assert RunFolder(path).read_config() == CONFIG
    assert RunFolder(path).list_checkpoints() == []


@pytest.mark.parametrize("names", [["tokenizer.json"], [".run.lock", "notes.txt"], [".run.lock", "metrics.jsonl"]])
def test_a_folder_that_holds_something_else_is_not_free(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        begin(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)


def test_one_process_at_a_time_trains_in_a_folder_and_anyone_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    trainer = begin(path)
    trainer.save()
    with pytest.raises(ConfigError, match=r"^another process is training in '.*/run'; wait for it to end, or choose"):
        resume(RunFolder(path), Display(), None)
    assert some_moe.load(path).step == 0
    train(trainer)
    with pytest.raises(ConfigError, match="is not a whole checkpoint"):
        resume(RunFolder(path), Display(), path)  # and what fails gives the folder back
    resume(RunFolder(path), Display(), None).folder.release()


def test_of_two_starts_in_one_folder_the_first_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    first: list[Trainer] = []

    def start_meanwhile(trainer: Any) -> None:  # noqa: ARG001
        monkeypatch.undo()
        first.append(begin(path, CONFIG.override({"name": "first"})))

    monkeypatch.setattr(Trainer, "verify_group", start_meanwhile)
    with pytest.raises(ConfigError, match="another process is training in"):
        begin(path)
    first[0].folder.release()
    assert RunFolder(path).read_config().name == "first"


def test_a_run_that_began_and_ended_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    begin(folder.path).folder.release()
    with folder.claim(), pytest.raises(ConfigError, match="is not empty"):
        folder.create("{}", "a machine")
    folder.release()
    assert folder.tokenizer_file.read_text() != "{}"


def write_log(folder: RunFolder, *lines: str) -> Path:
    path = folder.path / "metrics.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_going_back_keeps_good_lines_behind_a_damaged_one_and_the_damaged_one_too(tmp_path: Path) -> None:
    path = write_log(RunFolder(tmp_path), '{"step": 1}', "###", '{"step": 2}', '{"step": 3}', '{"st')
    RunFolder(tmp_path).cut_back(2)
    assert path.read_text() == '{"step": 1}\n###\n{"step": 2}\n'
    damaged: list[str] = []
    assert read_log(path, damaged) == [{"step": 1}, {"step": 2}]
    assert damaged == ["metrics.jsonl cannot be read at line 2: what stood there is left out."]
    RunFolder(tmp_path).cut_back(-1)
    assert path.read_text() == ""


def test_lines_that_tell_no_step_and_logs_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    path = write_log(RunFolder(tmp_path), "[1]", '{"step": 1}', '{"loss": 2}')
    assert read_log(path) == [{"step": 1}]
    assert read_log(tmp_path / "samples.jsonl") == []


def test_a_damaged_result_is_refused_with_its_cure(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(ConfigError, match=r"result.json' is damaged: .*; restore it, or remove it and resume the run"):
        RunFolder(tmp_path).read_result()


def test_a_run_folder_is_read_without_torch() -> None:
    script = "import sys, some_moe.training.run_folder; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 30),  # 80 rows make ten steps of eight, three times
        ({"train.max_steps": 7}, 7),
        ({"train.max_steps": 70}, 30),
        ({"train.global_batch_tokens": 3 * 8 * 64}, 9),  # 24 rows a step
    ],
)
def test_the_number_of_steps_follows_from_config_and_rows(changes: dict[str, Any], steps: int) -> None:
    settings = {"data.batch_size": 8, "data.seq_len": 64, "data.train_subset_size": 80, "train.epochs": 3}
    config = RunConfig().override(settings | {"train.max_steps": None} | changes)
    assert config.count_steps(80) == config.count_steps(87) == config.known_steps == steps
    unknown = config.override({"data.train_subset_size": None})
    assert unknown.known_steps == changes.get("train.max_steps")


# --- where a run comes from -------------------------------------------------------------------------------


def git(place: Path, *words: str) -> str:
    identity = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
    return subprocess.run(["git", *identity, *words], cwd=place, capture_output=True, text=True, check=True).stdout


def test_the_commit_is_that_of_a_repository_that_holds_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / ".venv" / "some_moe" / "system" / "processes.py"
    source.parent.mkdir(parents=True)
    source.write_text("first\n")
    monkeypatch.setattr(processes, "__file__", str(source))
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "--message", "somebody else's")
    assert describe_program()["commit"] is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "our own")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert describe_program()["commit"] == commit
    source.write_text("second\n")
    assert describe_program()["commit"] == commit + "+"


def test_the_environment_names_the_device_that_computes_and_not_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an idle GPU")
    trainer = begin(tmp_path / "run")
    trainer.folder.release()
    environment = json.loads((tmp_path / "run" / "env.json").read_text())
    assert environment["device"] == trainer.machine.describe() != "an idle GPU"

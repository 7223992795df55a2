"""Several processes on this machine: they end with one another's bits, and with one process's figures."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from some_moe.cli import main
from some_moe.config import ConfigError, TrainConfig
from some_moe.parallel.process_group import BUCKET_BYTES, ProcessGroup, digest_tensors, fill_buckets
from some_moe.training.machine import choose_machine
from some_moe.training.run_folder import RunFolder, read_log
from tests.parallel.members import MEMBER, SETTINGS, Members, assert_agree, free_port, launched, run_torchrun, said

UNEVEN = [45, 5]  # rows to score in batches of eight: six batches, the last of them short; and one batch for two


# --- steps ----------------------------------------------------------------------------------------------------


def test_two_processes_end_with_the_same_bits_and_with_what_one_process_finds(members: Members, tmp_path: Path) -> None:
    assert members.run("steps", tmp_path, measure=UNEVEN) == [0, 0]
    mine, other = (load_file(tmp_path / f"steps-{rank}.safetensors") for rank in range(2))
    assert digest_tensors(mine) == digest_tensors(other)
    member = runpy.run_path(str(MEMBER))
    expected = member["take_steps"]()
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        sampled = mine[f"{name}_order"] < torch.iinfo(torch.int64).max if name.endswith(".sample") else ...
        assert torch.allclose(mine[name][sampled].double(), value[sampled].double(), rtol=0, atol=1e-9), name
    respawns = [value for name, value in expected.items() if name.endswith("respawns")]
    assert len(respawns) == 10
    assert all(int(value.sum()) > 0 for value in respawns)
    assert (mine["few tokens/0.sample_order"] == torch.iinfo(torch.int64).max).any()
    messages = [json.loads((tmp_path / f"messages-{rank}.json").read_text()) for rank in range(2)]
    assert messages == [[False, True, ["note 0", "note 1"]]] * 2
    for rank in range(2):
        for num_rows, found in zip(UNEVEN, json.loads((tmp_path / f"figures-{rank}.json").read_text()), strict=True):
            figures = json.loads(json.dumps(member["measure"](num_rows)))
            layers = zip(found.pop("layers"), figures.pop("layers"), strict=True)
            assert found.pop("stories") == figures.pop("stories")
            assert found == pytest.approx(figures, abs=1e-9)
            assert all(theirs == pytest.approx(ours, abs=1e-9) for theirs, ours in layers)


def test_buckets_hold_every_tensor_once_by_dtype_and_close_when_full() -> None:
    large = torch.empty(BUCKET_BYTES // 4)
    tensors = [
        torch.empty(3),
        torch.empty(2, dtype=torch.int64),
        large,
        torch.empty(5),
        torch.empty((), dtype=torch.int64),
    ]
    buckets = fill_buckets(tensors)
    assert [[t.numel() for t in bucket] for bucket in buckets] == [[3, large.numel()], [2, 1], [5]]
    assert all(len({t.dtype for t in bucket}) == 1 for bucket in buckets)


# --- whole runs -----------------------------------------------------------------------------------------------


def test_torchrun_trains_to_the_figures_of_one_process(alone: Path, members: Members, tmp_path: Path) -> None:
    done = run_torchrun(members, tmp_path / "run", [], ["-m", "some_moe"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 12/12") == 1
    assert "12 steps on 2 processes, each on" in done.stdout
    assert_agree(alone, tmp_path / "run")
    assert {p.name for p in (tmp_path / "run").iterdir()} == {p.name for p in alone.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(members: Members, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes that a killed one is held against."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    assert members.run("command", path.parent, words=[*SETTINGS, "--out", str(path)]) == [0, 0]
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("dies_at", "goes_on_at"), [(2, 0), (8, 6)])
def test_torchrun_restarts_a_run_whose_process_was_killed_to_the_bits_of_an_undisturbed_one(
    members: Members, undisturbed: Path, tmp_path: Path, dies_at: int, goes_on_at: int
) -> None:
    program = [str(MEMBER.with_name("mortal.py"))]
    done = run_torchrun(members, tmp_path / "run", ["--max-restarts", "1"], program, DIES_AT=str(dies_at))
    assert done.returncode == 0, done.stderr
    assert "process 0 of 2 lost touch with the others" in done.stderr
    assert f"at step {goes_on_at} of 12" in done.stdout
    for file in ("checkpoints/step-12/model.safetensors", "checkpoints/step-12/optimizer.safetensors"):
        assert (tmp_path / "run" / file).read_bytes() == (undisturbed / file).read_bytes()
    logs = [read_log(run / "metrics.jsonl") for run in (tmp_path / "run", undisturbed)]
    losses = [[record.get("train_loss", record.get("val_loss")) for record in log] for log in logs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 14


@pytest.mark.slow
def test_two_launchers_as_on_two_machines_start_a_killed_process_again(
    members: Members, undisturbed: Path, tmp_path: Path
) -> None:
    run, port = tmp_path / "run", free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]
    torchrun += ["--local-addr", "127.0.0.1", "--max-restarts", "2", str(MEMBER.with_name("mortal.py"))]
    told = os.environ | launched(members, run) | {"DIES_AT": "8", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = [*torchrun, *SETTINGS, "--out", str(run), "--resume", "auto"]
    launchers = [subprocess.Popen(words, env=told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
    found = [launcher.communicate(timeout=120)[0].decode() for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], found
    assert (tmp_path / "died").exists()
    assert any("at step 6 of 12" in text for text in found)
    for file in ("checkpoints/step-12/model.safetensors", "checkpoints/step-12/optimizer.safetensors"):
        assert (run / file).read_bytes() == (undisturbed / file).read_bytes()


def test_a_signal_to_one_process_stops_both_after_the_same_step_and_one_process_resumes(
    alone: Path, members: Members, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = [*SETTINGS, "--out", str(run)]
    codes = members.run("command", tmp_path, words=words, deed="be asked to stop", at_step=7)
    assert codes == [130, 130]
    assert said(tmp_path)[1] == said(tmp_path, "out")[1] == ""
    assert f"interrupted at step 7, which is saved; continue with: some train --out {run}" in said(tmp_path)[0]
    assert [place.name for place in RunFolder(run).list_checkpoints()] == ["step-6", "step-7"]
    assert main([*words, "--resume", "auto"]) == 0
    assert "at step 7 of 12" in capsys.readouterr().out
    assert_agree(alone, run)


def test_a_run_of_one_process_goes_on_in_two(alone: Path, members: Members, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(alone, run)
    words = ["train", "--resume", str(run / "checkpoints" / "step-10")]
    assert members.run("command", tmp_path, words=words) == [0, 0], said(tmp_path)
    assert "at step 10 of 12" in said(tmp_path, "out")[0]
    assert said(tmp_path, "out")[1] == ""
    assert_agree(alone, run)


# --- what goes wrong ------------------------------------------------------------------------------------------


def test_rows_that_do_not_divide_are_refused_in_one_sentence(members: Members, tmp_path: Path) -> None:
    words = [*SETTINGS, "--data.batch-size", "7", "--out", str(tmp_path / "run")]
    assert members.run("command", tmp_path, words=words) == [2, 2]
    assert said(tmp_path) == [
        "some: a step of 7 rows cannot be shared equally by 2 processes; make data.batch_size a multiple of 2, or "
        "start another number of them\n",
        "",
    ]
    assert not (tmp_path / "run").exists()


def test_bad_input_that_one_process_finds_is_said_once_and_ends_both(members: Members, tmp_path: Path) -> None:
    words = [*SETTINGS, "--out", str(tmp_path / "run")]
    assert members.run("command", tmp_path, words=words, deed="find no data") == [2, 2]
    assert said(tmp_path) == ["some: data.source 'x' does not exist here; give another\n", ""]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("deed", "reason"), [("die", "onnection"), ("freeze", "imed out")])
def test_the_others_do_not_wait_for_ever_for_a_process_that_is_gone(
    members: Members, tmp_path: Path, deed: str, reason: str
) -> None:
    words = [*SETTINGS, "--out", str(tmp_path / "run")]
    codes = members.run("command", tmp_path, words=words, deed=deed, at_step=8, patience=3, frozen=deed == "freeze")
    assert codes == [1, None if deed == "freeze" else -9]
    sentence = said(tmp_path)[0]
    assert sentence.startswith("some: process 0 of 2 lost touch with the others (")
    assert reason in sentence
    assert sentence.endswith("checkpoints/step-6; continue with --resume auto\n")
    assert sentence.count("\n") == 1


def test_processes_started_with_different_settings_do_not_begin(members: Members, tmp_path: Path) -> None:
    words = [*SETTINGS, "--out", str(tmp_path / "run")]
    assert members.run("command", tmp_path, words=words, deed="have another seed") == [1, 1]
    expected = "some: process 1 does not have the same settings, parameters and keys as process 0 (all need the same"
    assert said(tmp_path)[0].startswith(expected)
    assert said(tmp_path)[1] == ""
    assert not (tmp_path / "run").exists()


def test_processes_that_no_longer_hold_the_same_stop_before_they_save(members: Members, tmp_path: Path) -> None:
    words = [*SETTINGS, "--out", str(tmp_path / "run")]
    assert members.run("command", tmp_path, words=words, deed="drift", at_step=8) == [1, 1]
    sentence = said(tmp_path)[0]
    assert "process 1 does not have the same parameters and keys as process 0" in sentence
    assert "checkpoints/step-6; continue with --resume auto" in sentence
    assert [place.name for place in RunFolder(tmp_path / "run").list_checkpoints()] == ["step-5", "step-6"]


# --- one process ----------------------------------------------------------------------------------------------


def test_without_torchrun_a_process_is_a_team_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    group = ProcessGroup.from_environment()
    assert (group.rank, group.world_size, group.is_single, group.is_main) == (0, 1, True, True)
    group.join(torch.device("cpu"))
    assert not torch.distributed.is_initialized()
    assert group.barrier("note") == ["note"]


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set; start the processes with torchrun"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "MASTER_ADDR is not set"),
    ],
)
def test_half_a_launch_is_refused_with_a_sentence(
    environment: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=sentence):
        ProcessGroup.from_environment()


def test_each_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    second = ProcessGroup(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert choose_machine(TrainConfig(device="auto"), second).device == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="'cuda:1' is one GPU for 4 processes; use auto, cuda or cpu"):
        choose_machine(TrainConfig(device="cuda:1"), second)
    with pytest.raises(ConfigError, match="3 processes were started on this machine, but torch sees 2 GPUs"):
        choose_machine(TrainConfig(device="cuda"), ProcessGroup(rank=0, world_size=3, local_world_size=3))

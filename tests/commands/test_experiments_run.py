"""`some experiments run` as a person types it: real processes, stopped and killed, and bad input refused."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from some_moe.cli import main
from some_moe.lab.jobs import Job
from some_moe.lab.queue import Queue

TINY = [
    *("--model.d-model", "32", "--model.num-layers", "2", "--model.num-heads", "2", "--model.vocab-size", "512"),
    *("--model.num-experts", "8", "--model.d-ffn", "32", "--model.top-k", "2", "--data.seq-len", "64"),
    *("--data.batch-size", "8", "--data.train-subset-size", "32", "--data.val-subset-size", "4"),
    *("--train.device", "cpu", "--train.sample-tokens", "0", "--train.log-every", "1", "--data", "stories"),
]
LONG = [*TINY, "--data.train-subset-size", "160"]  # 80 steps: time enough to be stopped in the middle
SHORT = [*TINY, "--train.epochs", "2"]


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def train_here(queue: Queue, job: Job) -> tuple[int, str]:
    """Train a job in this process, which saves the start of another; its output is dropped as the queue would."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return main([*job.training_words, "--out", str(queue.out / job.name), "--resume", "auto"]), ""


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "_train", train_here)


def begin(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "some_moe", "experiments", "run", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.005)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def states(out: Path) -> dict[str, str]:
    return {job["name"]: job["state"] for job in json.loads((out / "queue.json").read_text())["jobs"]}


def outcome(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    times = ("seconds", "tokens_per_second", "phases", "date")
    return {name: value for name, value in result.items() if name not in times}


def listing(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must be refused; return its one sentence."""
    capsys.readouterr()
    assert main(["experiments", "run", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("some: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


@pytest.mark.usefixtures("in_this_process")
def test_records_keep_the_loss_of_each_story_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "run", "A1", *SHORT, "--stories", "--out", "q", "--results", "r"]) == 0
    text = (tmp_path / "r" / "A1-seed0.json").read_text()
    record = json.loads(text)
    (split,) = record["stories"]
    kept = record["stories"][split]
    assert (split, len(kept["nats"]), len(kept["tokens"])) == ("test", 4, 4)
    assert sum(kept["nats"]) / sum(kept["tokens"]) == pytest.approx(record["test_loss"], abs=1e-3)
    assert json.dumps(kept["tokens"], separators=(",", ":")) in text  # on one line
    # They are no other experiment, and the command that is kept asks for them again.
    assert "train.story_losses" not in record["overrides"]
    assert "--stories" in record["command"]
    assert main(["experiments", "run", "A1", *SHORT, "--stories", "--out", "q", "--results", "r"]) == 0
    both = ("--stories", "--train.story-losses", "all")
    assert "--stories and --train.story-losses all differ" in refused(capsys, "A1", *SHORT, *both)


@pytest.mark.usefixtures("in_this_process")
def test_a_run_that_is_about_what_comes_afterwards_says_how_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "run", "C-still-keys", *SHORT, "--out", "q", "--results", "r"]) == 0
    said = capsys.readouterr().out
    assert "C-still-keys-seed0 goes on with: some adapt q/C-still-keys-seed0 --stream OLD NEW OLD (row still)\n" in said


# --- what works -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stopped_and_continued_queues_end_like_undisturbed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["A1", *LONG, "--seeds", "0,1", "--out", "stopped", "--results", "stopped/results"]
    process = begin(*words)
    wait_until(lambda: count_lines(tmp_path / "stopped" / "A1-seed0" / "metrics.jsonl") > 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""
    assert "stopping: what runs is saved after its step, and no other is begun" in out
    assert "[1/2] A1, seed 0: interrupted" in out
    assert "the same command goes on with what is not done" in out
    folder = tmp_path / "stopped" / "A1-seed0"
    assert list((folder / "checkpoints").glob("step-*"))
    assert not (folder / "result.json").exists()
    assert states(tmp_path / "stopped") == {"A1-seed0": "interrupted", "A1-seed1": "waiting"}

    assert main(["experiments", "run", *words]) == 0
    assert "resuming" in (tmp_path / "stopped" / "logs" / "A1-seed0.txt").read_text()
    assert states(tmp_path / "stopped") == {"A1-seed0": "done", "A1-seed1": "done"}
    monkeypatch.setattr(Queue, "_train", train_here)
    assert main(["experiments", "run", "A1", *LONG, "--out", "whole", "--results", "whole/results"]) == 0
    assert outcome(tmp_path / "stopped/results/A1-seed0.json") == outcome(tmp_path / "whole/results/A1-seed0.json")
    assert outcome(tmp_path / "stopped/results/A1-seed1.json")["seed"] == 1


def test_a_run_that_outlives_its_queue_keeps_others_out_until_it_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["A1", *LONG, "--out", "q"]
    process = begin(*words)
    wait_until(lambda: count_lines(tmp_path / "q" / "A1-seed0" / "metrics.jsonl") > 2)
    process.kill()
    process.communicate()
    assert states(tmp_path / "q") == {"A1-seed0": "running"}
    assert "'q' is in use by another queue, or by a run that one left behind" in refused(capsys, *words)
    wait_until((tmp_path / "q" / "A1-seed0" / "result.json").is_file)
    # The process has written its result; soon it ends.
    wait_until(lambda: main(["experiments", "run", *words]) == 0)
    assert states(tmp_path / "q") == {"A1-seed0": "done"}
    assert outcome(tmp_path / "results/A1-seed0.json")["steps"] == 80


@pytest.mark.usefixtures("in_this_process")
def test_names_times_seeds_then_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiments", "run", "a1", "Frozen-Keys", *SHORT, "--seeds", "0,1", "--results", "measured"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    names = {"A1-seed0", "A1-seed1", "frozen-keys-seed0", "frozen-keys-seed1"}
    assert {path.stem for path in (tmp_path / "measured").iterdir()} == names
    assert all((tmp_path / "runs" / name / "result.json").is_file() for name in names)
    lines = [line.split() for line in printed.splitlines()]
    assert [line[:3] for line in lines if line[-1:] == ["done"]] == [
        ["A1", "0", "8"],
        ["A1", "1", "8"],
        ["frozen-keys", "0", "8"],
        ["frozen-keys", "1", "8"],
    ]
    before = listing(tmp_path / "runs")
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert [job["state"] for job in summary["jobs"]] == ["done already"] * 4
    assert summary["jobs"][0]["published_val_loss"] == 0.7629
    assert summary["jobs"][2]["published_val_loss"] is None
    assert captured.err.splitlines()[3] == "[4/4] frozen-keys, seed 1: done already"
    assert listing(tmp_path / "runs") == before


def test_a_failed_run_is_told_and_the_next_one_has_its_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "run", "A1", "A2", *SHORT, "--train.learning-rate", "1e30"]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("failed: the loss became nan") == 2
    assert "what the runs wrote in runs/logs" in captured.out
    jobs = json.loads((tmp_path / "runs" / "queue.json").read_text())["jobs"]
    assert [job["state"] for job in jobs] == ["failed", "failed"]
    assert jobs[1]["reason"].startswith("the loss became nan at step 2; ")


def test_fewer_stories_are_said_in_one_line_for_all_and_a_dry_run_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few").mkdir()
    for split, count in (("train", 20), ("valid", 3), ("test", 3)):
        texts = [f"This is {split} story number {n} of a rather small book." for n in range(count)]
        (tmp_path / "few" / f"{split}.txt").write_text("\n\n".join(texts))
    before = listing(tmp_path)
    words = ["experiments", "run", "A1", "frozen-keys", "--train.epochs", "3", "--seeds", "0,1", "--dry-run"]
    words += [*TINY[:-1], str(tmp_path / "few")]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        "A1, frozen-keys: 20 training stories instead of 32, so 6.00 epochs of 2 steps instead of 3 of 4 make the "
        "same 12 steps; validation on 3 of 4 stories"
    )
    rows = [line.split() for line in printed if line.endswith("waiting")]
    assert [row[:3] for row in rows] == [[name, seed, "12"] for name in ("A1", "frozen-keys") for seed in ("0", "1")]
    assert main([*words, "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)
    assert [job["standing"] for job in jobs] == ["new"] * 4
    assert (jobs[0]["stories"], jobs[0]["epochs"]) == (20, 6.0)
    assert (jobs[0]["steps"], jobs[0]["published_steps"]) == (12, 1248)
    assert jobs[0]["command"].startswith("some experiments run A1 --data few --seeds 0 --model.d-model=32")
    assert "--train.epochs=3" in jobs[0]["command"]
    assert listing(tmp_path) == before


# --- what is refused --------------------------------------------------------------------------------------


def test_bad_words_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (["A1", "frozen-kys"], "'frozen-kys' is not a registered experiment; did you mean 'frozen-keys'?"),
        (["baseline"], "'baseline' is neither an experiment nor a series; did you mean 'baselines'?"),
        ([], "`some experiments run` needs NAME"),
        (["A1", "--seeds", "0,x"], "--seeds '0,x' is not a list of whole numbers"),
        (["A1", "--seeds", "1,1"], "--seeds '1,1' names a seed twice"),
        (["A1", "--at-once", "0"], "--at-once 0 runs nothing; use 1 or more"),
        (["A1", "--train.seed", "3"], "--train.seed 3 is given by --seeds here"),
        (["A1", "--model.top-q", "3"], "did you mean '--model.top-k'?"),
        (["A1", "--sed", "3"], "--sed is not an option of `some experiments run`; did you mean '--seeds'?"),
        (["A1", "--data", "none.txt"], "A1: data.source 'none.txt' does not exist"),
        (["A1", "--data", "a.txt", "--data.source", "b.txt"], "--data a.txt and --data.source b.txt differ"),
        (["A1", *SHORT, "--data.batch-size", "64"], "gives 32 training stories, fewer than one step of 64"),
        (["A1", *SHORT, "--train.device", "cuda:99"], "train.device 'cuda:99' is not there"),
        (["A1", *SHORT, "--model.top-k", "9"], "A1: model.top_k 9 is more than num_experts 8"),
    ):
        assert sentence in refused(capsys, *words)
    assert list(tmp_path.iterdir()) == []


def test_settings_may_stand_before_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "run", *SHORT, "A1", "--dry-run", "--json"]) == 0
    assert [job["experiment"] for job in json.loads(capsys.readouterr().out)] == ["A1"]


@pytest.mark.usefixtures("in_this_process")
def test_a_folder_of_another_config_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "run", "A1", *SHORT]) == 0
    before = listing(tmp_path)
    sentence = refused(capsys, "A2", "A1", *SHORT, "--train.clip", "2")
    assert "'runs/A1-seed0' was run with another config: train.clip (1.0 there, 2.0 here); choose another" in sentence
    assert listing(tmp_path) == before


def test_help_names_what_may_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "run", "--help"]) == 0
    printed = capsys.readouterr().out
    for word in ("NAME", "--data", "--seeds", "--out", "--results", "--dry-run", "--json", "published, studies"):
        assert word in printed

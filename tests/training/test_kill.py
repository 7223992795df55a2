"""Real processes, really killed: whatever the moment, the resumed run ends with the bits of an uninterrupted one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

KILLS = 10
SETTINGS = [
    *("--preset", "smoke", "--data.train-subset-size", "96", "--data.val-subset-size", "8"),
    *("--train.epochs", "6", "--train.save-every", "2", "--train.sample-tokens", "4", "--train.log-every", "1"),
]
# Threads fight over two cores, and each process starts anew: one thread each is fastest here.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}

# Kills itself in the middle of its third checkpoint: tensors written, state.json not.
DIES_WHILE_SAVING = """
import os, signal, sys
from some_moe.training import checkpoint
original, calls = checkpoint.write_whole, []
def write_whole(path, text):
    if path.name == "state.json":
        calls.append(path)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    original(path, text)
checkpoint.write_whole = write_whole
from some_moe.cli import main
sys.exit(main(sys.argv[1:]))
"""


def command(out: Path) -> list[str]:
    return ["-m", "some_moe", "train", *SETTINGS, "--out", str(out), "--resume", "auto"]


def run(words: list[str], cache: Path) -> int:
    environment = ENVIRONMENT | {"SOME_CACHE": str(cache)}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def outcome(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    result = json.loads((path / "result.json").read_text())
    for name in ("seconds", "tokens_per_second"):
        del result[name]
    last = path / "checkpoints" / f"step-{result['steps']}"
    return result, load_file(last / "model.safetensors") | load_file(last / "optimizer.safetensors")


def assert_same(left: Path, right: Path) -> None:
    (left_result, left_state), (right_result, right_state) = outcome(left), outcome(right)
    assert left_result == right_result
    assert left_state.keys() == right_state.keys()
    assert all(torch.equal(left_state[name], right_state[name]) for name in left_state)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("whole")
    assert run(command(base / "run"), base / "cache") == 0
    return base / "run", base / "cache"


def test_a_run_killed_at_random_moments_ends_like_an_uninterrupted_one(
    uninterrupted: tuple[Path, Path], tmp_path: Path
) -> None:
    whole, cache = uninterrupted
    chance = random.Random(0)
    out = tmp_path / "run"
    kills = 0
    while kills < KILLS:
        process = subprocess.Popen(
            [sys.executable, *command(out)],
            env=ENVIRONMENT | {"SOME_CACHE": str(cache)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # Kill at a random moment after the process has made progress, so that the run as a whole does too.
        seen = list((out / "checkpoints").glob("step-*")) if out.exists() else []
        newest = max((int(path.name[5:]) for path in seen), default=0)
        goal = newest + chance.randint(1, 7)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            log = out / "metrics.jsonl"
            lines = log.read_bytes().count(b"\n") if log.exists() else 0
            if lines >= goal:
                break
            time.sleep(0.002)
        time.sleep(chance.random() * 0.03)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills == KILLS, "the run ended before it was killed often enough; make it longer"
    assert run(command(out), cache) == 0
    assert_same(whole, out)


def test_a_process_killed_while_it_writes_a_checkpoint_loses_only_that_one(
    uninterrupted: tuple[Path, Path], tmp_path: Path
) -> None:
    whole, cache = uninterrupted
    out = tmp_path / "run"
    assert run(["-c", DIES_WHILE_SAVING, *command(out)[2:]], cache) == -signal.SIGKILL
    assert list((out / "checkpoints").glob(".step-*.tmp"))
    assert run(command(out), cache) == 0
    assert not list((out / "checkpoints").glob(".step-*.tmp"))
    assert_same(whole, out)

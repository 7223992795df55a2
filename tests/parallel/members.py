"""How the tests of this folder start processes, and hold what they leave against each other."""

import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from some_moe.training.run_folder import RunFolder, read_log

MEMBER = Path(__file__).with_name("group_member.py")
PATIENCE_SECONDS = 60

# Twelve steps of 8 rows; three batches to validate on, so that two processes score unequal shares.
SETTINGS = [
    *("train", "--preset", "smoke", "--data.train-subset-size", "48", "--data.val-subset-size", "20"),
    *("--train.sample-tokens", "4", "--train.log-every", "1", "--model.center-queries", "true"),
    *("--gravity.delta", "0.05", "--gravity.theta-percentile", "0.3", "--gravity.token-fraction", "0.5"),
    *("--gravity.respawn-below", "0.9", "--gravity.respawn-patience", "2"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Members:
    """Starts teams of processes, each a quick fork of one server that has imported what they need."""

    def __init__(self, cache: Path) -> None:
        self.context = multiprocessing.get_context("forkserver")
        needed = ["some_moe.training.loop", "some_moe.commands.training", "some_moe.parallel.parts"]
        self.context.set_forkserver_preload([*needed, "torch.distributed.fsdp"])
        self.cache = cache

    def run(
        self, job: str, place: Path, *, size: int = 2, machines: int = 1, frozen: bool = False, **options: Any
    ) -> list[int | None]:
        """Run a job of group_member.py in all, for their exit codes. `frozen`: the second will not end by itself."""
        place.mkdir(exist_ok=True)
        on_each = size // machines
        shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(on_each), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(free_port()), "SOME_CACHE": str(self.cache)}
        processes = []
        for rank in range(size):
            told = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank % on_each)}
            what = {"environment": told, "job": job, "place": str(place), "options": options}
            processes.append(self.context.Process(target=runpy.run_path, args=(str(MEMBER), what, "__main__")))
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            process.join(0 if frozen and rank == 1 else PATIENCE_SECONDS)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        return codes


def said(place: Path, stream: str = "err") -> list[str]:
    """What each process has said."""
    return [path.read_text() for path in sorted(place.glob(f"{stream}-*"))]


def assert_agree(left: Path, right: Path) -> None:
    """Same losses, logs, parameters, keys and optimizer, but for rounding."""
    results = [json.loads((path / "result.json").read_text()) for path in (left, right)]
    for name in ("train_loss", "val_loss", "best_val_loss", "test_loss", "bits_per_byte"):
        assert results[0][name] == pytest.approx(results[1][name], abs=1e-5), name
    assert results[0]["tokens"] == results[1]["tokens"]
    logs = [read_log(path / "metrics.jsonl") for path in (left, right)]
    assert [record["step"] for record in logs[0]] == [record["step"] for record in logs[1]]
    losses = [[record["train_loss"] for record in log if "train_loss" in record] for log in logs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert [p.name for p in RunFolder(left).list_checkpoints()] == [p.name for p in RunFolder(right).list_checkpoints()]
    for file in ("model.safetensors", "optimizer.safetensors"):
        states = [load_file(RunFolder(path).list_checkpoints()[-1] / file) for path in (left, right)]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            assert torch.allclose(value.double(), states[1][name].double(), rtol=0, atol=1e-4), name


def run_torchrun(
    members: Members, run: Path, launch: list[str], program: list[str], *settings: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    words = [*torchrun, *launch, *program, *SETTINGS, *settings, "--out", str(run), "--resume", "auto"]
    told = os.environ | launched(members, run) | environment
    return subprocess.run(words, env=told, capture_output=True, text=True, timeout=120)


def launched(members: Members, run: Path) -> dict[str, str]:
    """The environment of what torchrun starts."""
    shared = {"SOME_CACHE": str(members.cache), "DIED": str(run.with_name("died"))}
    return shared | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

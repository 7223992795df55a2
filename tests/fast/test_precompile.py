"""Kernels compiled by children: every job is done once, whatever becomes of a child."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from some_moe.fast import precompile
from some_moe.fast.precompile import NotedJobs, run_in_children, zeros_for_empty


def write_own_number(folder: Path, name: str) -> None:
    with (folder / name).open("a") as file:
        file.write(f"{os.getpid()}\n")


def test_every_job_is_done_once_and_by_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    run_in_children([lambda name=name: write_own_number(tmp_path, str(name)) for name in range(300)])
    written = [(tmp_path / str(name)).read_text().split() for name in range(300)]
    assert all(len(numbers) == 1 for numbers in written)
    assert str(os.getpid()) not in {number for numbers in written for number in numbers}


def test_a_job_that_fails_or_kills_its_child_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)

    def fail() -> None:
        raise ValueError("no such kernel")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    run_in_children([fail, die, *(lambda name=name: write_own_number(tmp_path, str(name)) for name in range(20))])
    assert len(list(tmp_path.iterdir())) == 20


def test_a_child_that_hangs_is_killed_in_time(tmp_path: Path) -> None:
    def hang() -> None:
        write_own_number(tmp_path, "child")
        time.sleep(600)

    run_in_children([hang], seconds=1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "child").read_text()), 0)


def test_noted_jobs_have_their_results_after_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(precompile, "run_in_children", lambda jobs: done.append(len(jobs)))
    jobs = NotedJobs()
    good, bad = jobs.submit(lambda: "kernel"), jobs.submit(lambda: 1 / 0)
    assert not good.done()
    jobs.finish()
    assert done == [2]
    assert good.result() == "kernel"
    with pytest.raises(ZeroDivisionError):
        bad.result()


class MakesEmpty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return torch.empty(1000) + torch.empty_like(x).sum() + x.new_empty(1000)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return grad.new_empty(1000)


def test_what_kernels_would_fill_is_zeros_in_both_passes() -> None:
    found = torch.empty, torch.empty_like, torch.Tensor.new_empty
    full = [torch.full((1000,), 7.0) for _ in range(50)]  # what memory holds when it is given out again
    x = torch.ones(1000, requires_grad=True)
    del full
    with zeros_for_empty():
        y = MakesEmpty.apply(x)
        y.sum().backward()
    assert y.count_nonzero() == 0
    assert x.grad is not None
    assert x.grad.count_nonzero() == 0
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == found

"""Triton kernels compiled side by side: a pass that launches none of them tells which there are.

The first step of a run would compile its kernels one after the other, each when it is reached: half a minute. Here the
step's forward and backward pass is made once for its shapes alone: launches are noted, and tensors that kernels would
have filled are zeros. Then children of this process compile what was noted, for much of Triton's compiler is Python,
and threads would wait for its lock. What they made is in Triton's cache on disk, where this process finds it.
"""

import os
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

MOST_CHILDREN = 16
MOST_SECONDS = 120.0  # then children are killed, and whatever is missing is compiled where it is launched
NUMBER = struct.Struct("H")


@contextmanager
def zeros_for_empty() -> Iterator[None]:
    """Within, nothing is left as it was found in memory: zeros are numbers, and good indices.

    By other functions in the places of torch's, in every thread: a mode of functions does not reach backward passes,
    and a mode of dispatch loads torch's compiler, which takes two seconds.
    """
    makers = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    found = [getattr(owner, name) for owner, name in makers]

    def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *arguments, **options: make(*arguments, **options).zero_()

    try:
        for (owner, name), make in zip(makers, found, strict=True):
            setattr(owner, name, zeroed(make))
        yield
    finally:
        for (owner, name), make in zip(makers, found, strict=True):
            setattr(owner, name, make)


def run_in_children(jobs: Sequence[Callable[[], object]], seconds: float = MOST_SECONDS) -> None:
    """Run each job once, in one of several forked children, for what it leaves on disk. A job that fails, or a child
    that dies or hangs, is nobody's harm: who needs the result finds that it is missing.

    As for a DataLoader's workers, a child must not touch CUDA, and compiling does not.
    """
    if not jobs or not hasattr(os, "fork"):
        return
    reader, writer = os.pipe()
    os.write(writer, b"".join(map(NUMBER.pack, range(len(jobs)))))  # which job is next; far less than a pipe holds
    os.close(writer)
    children: list[int] = []
    ends = time.monotonic() + seconds
    try:
        for _ in range(min(MOST_CHILDREN, os.cpu_count() or 1, len(jobs))):
            with warnings.catch_warnings(action="ignore"):  # Python warns of threads that a child would miss
                child = os.fork()
            if child == 0:
                _work(jobs, reader)
            children.append(child)
        while children and time.monotonic() < ends:
            children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
            time.sleep(0.005)
    finally:
        os.close(reader)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _work(jobs: Sequence[Callable[[], object]], reader: int) -> None:
    """What a child does until there is nothing more to do. It never returns."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what went wrong is said where it is launched
        while number := os.read(reader, NUMBER.size):
            with suppress(Exception):
                jobs[NUMBER.unpack(number)[0]]()
    finally:
        os._exit(0)


def build(job: Callable[[], Any]) -> None:
    """Compile one kernel, and the C code that launches it: Triton has a C compiler make it when first it is needed, a
    quarter of a second for each kernel."""
    from triton.runtime import driver

    kernel = job()
    driver.active.launcher_cls(kernel.src, kernel.metadata)


class NotedJobs:
    """Stands in for an executor: what it is to run waits until the pass is over."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], object], Future[object]]] = []

    def submit(self, job: Callable[[], object]) -> Future[object]:
        self.waiting.append((job, Future()))
        return self.waiting[-1][1]

    def finish(self) -> None:
        run_in_children([partial(build, job) for job, _ in self.waiting])
        for job, future in self.waiting:
            try:
                future.set_result(job())  # from the cache on disk
            except Exception as error:
                future.set_exception(error)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within, kernels are noted where they would be launched; at the end, all of them are compiled.

    One that does not compile is left to its launch, which says why. Does nothing where Triton cannot do it.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    launch, jobs = JITFunction.run, NotedJobs()
    mode = AsyncCompileMode(jobs, ignore_errors=True)

    def note(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:  # noqa: ARG001
        token = active_mode.set(mode)  # autograd has threads of its own
        try:
            return launch(self, *arguments, grid=grid, warmup=True, **options)
        finally:
            active_mode.reset(token)

    JITFunction.run = note
    try:
        with zeros_for_empty():
            yield
    finally:
        JITFunction.run = launch
    jobs.finish()
    for kernel in mode.future_kernels.values():
        kernel.result(ignore_errors=True)

"""Timing that is fair: warm, repeated, in turns, with the cache emptied, on the device's own clock."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

FLUSH_BYTES = 256 << 20  # several times any chip's L2 cache
MOST_REPEATS = 2000

Name = TypeVar("Name")


@dataclass(frozen=True)
class Task:
    """What is timed, and what must happen before each time, untimed."""

    timed: Callable[[], Any]
    before: Callable[[], object] | None = None

    def run(self) -> Any:
        """Do both once; return what the timed call returns."""
        if self.before is not None:
            self.before()
        return self.timed()


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of one call over the repeats: median, quartiles, and the least."""

    ms: float
    ms_low: float
    ms_high: float
    ms_least: float
    repeats: int

    @classmethod
    def of(cls, times: list[float]) -> "Timing":
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        return cls(ms=middle, ms_low=low, ms_high=high, ms_least=min(times), repeats=len(times))


def mark(device: torch.device) -> Any:
    """A moment on the device's own clock: on a GPU an event, so that the host may run ahead as it does in training."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Between two moments that have passed."""
    return 1e3 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))


def wait_for(device: torch.device) -> None:
    """Until a GPU has done all it was told; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Measures calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.int8, device=device)

    def measure(self, task: Task, repeats: int) -> list[float]:
        """Milliseconds of each of `repeats` calls."""
        moments = []
        wait_for(self.device)
        for _ in range(repeats):
            if task.before is not None:
                task.before()
            self.flush.zero_()
            start = mark(self.device)
            task.timed()
            moments.append((start, mark(self.device)))
        wait_for(self.device)
        return [milliseconds(start, end) for start, end in moments]

    def seconds(self, task: Task) -> float:
        """Wall-clock seconds of one call, whatever it does on the way: for compilation."""
        wait_for(self.device)
        started = time.perf_counter()
        self.measure(task, 1)
        return time.perf_counter() - started

    def weigh(self, task: Task) -> tuple[int | None, Any]:
        """Bytes that one call allocates at its peak, which a GPU alone counts, and what the call returns."""
        if self.device.type != "cuda":
            return None, task.run()
        wait_for(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = task.run()
        wait_for(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before, result


def time_in_turns(
    clock: Clock, tasks: Mapping[Name, Task], seconds: float, *, rounds: int = 5, least: int = 3
) -> dict[Name, Timing]:
    """Time every task for about `seconds`, in rounds in which each has its turn: drifting clocks hit all alike."""
    estimates = {name: statistics.median(clock.measure(task, 3)) for name, task in tasks.items()}
    repeats = {name: min(MOST_REPEATS, max(least, round(1e3 * seconds / ms))) for name, ms in estimates.items()}
    times: dict[Name, list[float]] = {name: [] for name in tasks}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            # Back and forth, so that no task always follows the same one.
            for name in list(tasks)[:: 1 if turn % 2 == 0 else -1]:
                share = repeats[name] // rounds + (turn < repeats[name] % rounds)
                times[name] += clock.measure(tasks[name], share)
    finally:
        if was_enabled:
            gc.enable()
    return {name: Timing.of(found) for name, found in times.items()}

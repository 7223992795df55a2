"""Where a run's time goes: wall seconds by phase. A command counts from the start of its process, imports and all."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

REST = "other"
_began: float | None = None  # when the present command's process started


def count_from_start() -> None:
    """Let the next `Phases` begin where this process did."""
    global _began
    _began = time.monotonic() - _process_age()


def _process_age() -> float:
    """Seconds since this process was started, where the system tells; else since it first used a processor."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.process_time()


class Phases:
    """A run's phases in this process."""

    def __init__(self) -> None:
        global _began
        now = time.monotonic()
        self.began, _began = now if _began is None else _began, None
        self.seconds = {"start": now - self.began}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """What is done within belongs to this phase. Phases do not overlap."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def table(self, before: Mapping[str, float]) -> dict[str, float]:
        """Seconds by phase, with those of the run's earlier processes; they add up to all of its time."""
        rest = max(0.0, time.monotonic() - self.began - sum(self.seconds.values()))
        found = self.seconds | {REST: rest}
        return {name: before.get(name, 0.0) + found.get(name, 0.0) for name in dict.fromkeys((*found, *before))}

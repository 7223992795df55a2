"""Timing that is fair: warm, repeated, in turns, with the cache emptied, on the device's own clock."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLUSH_BYTES = 256 << 20  # several times any chip's L2 cache
MOST_REPEATS = 2000

Call = Callable[[], Any]


def summarize_times(times: list[float]) -> dict[str, Any]:
    """Milliseconds of one call over the repeats: median, quartiles, and the least."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {"ms": middle, "ms_low": low, "ms_high": high, "ms_least": min(times), "repeats": len(times)}


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

    def measure(self, call: Call, repeats: int) -> list[float]:
        """Milliseconds of each of `repeats` calls."""
        moments = []
        wait_for(self.device)
        for _ in range(repeats):
            self.flush.zero_()
            start = mark(self.device)
            call()
            moments.append((start, mark(self.device)))
        wait_for(self.device)
        return [milliseconds(start, end) for start, end in moments]

    def weigh(self, call: Call) -> tuple[int | None, Any]:
        """Bytes that one call allocates at its peak, which a GPU alone counts, and what the call returns."""
        if self.device.type != "cuda":
            return None, call()
        wait_for(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = call()
        wait_for(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before, result


def time_in_turns(
    clock: Clock, calls: Mapping[str, Call], seconds: float, *, rounds: int = 5, least: int = 3
) -> dict[str, dict[str, Any]]:
    """Time every call for about `seconds`, in rounds in which each has its turn: drifting clocks hit all alike."""
    estimates = {name: statistics.median(clock.measure(call, 3)) for name, call in calls.items()}
    repeats = {name: min(MOST_REPEATS, max(least, round(1e3 * seconds / ms))) for name, ms in estimates.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            # Back and forth, so that no call always follows the same one.
            for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
                share = repeats[name] // rounds + (turn < repeats[name] % rounds)
                times[name] += clock.measure(calls[name], share)
    finally:
        gc.enable()
    return {name: summarize_times(found) for name, found in times.items()}

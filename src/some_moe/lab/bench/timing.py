"""Timing that is fair: warm, repeated, in turns, with the cache emptied, on the device's own clock.

And on a GPU of a recording, where one can be made: without Python, as training replays its steps.
"""

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

FLUSH_BYTES = 256 << 20  # several times any chip's L2 cache
MOST_REPEATS = 2000
WARMUP_CALLS = 3
_FAILED_GRAPHS: list[torch.cuda.CUDAGraph] = []

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


class UnrecordableError(RuntimeError):
    """A call that cannot be recorded. Its message says why, in a few words."""


def record(call: Call, device: torch.device) -> tuple[Call, Any]:
    """Record a call as a CUDA graph: its replays, and what the recorded call returned, which each replay fills anew.

    Raises `UnrecordableError`, after which the device is as usable as before.
    """
    # An autograd graph that is still alive would tie the recording to the stream of its own call.
    gc.collect()
    stream, pool = side_stream(device), torch.cuda.graph_pool_handle()
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.stream(stream):  # and back to the one before, which a recording that breaks off forgets
            warm_up(call)
            graph, result = capture(call, pool, stream)
    finally:
        torch.cuda.synchronize(device)
    return graph.replay, result


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings: the default one cannot be recorded, and each new one has workspaces of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def warm_up(call: Call) -> None:
    """Call on the current stream, the last time with waiting forbidden: what waits cannot be recorded.

    Finding that out by recording would be worse: a recording that breaks off may leave torch's allocator astray.
    """
    try:
        for _ in range(WARMUP_CALLS - 1):
            call()
        with waiting_forbidden():
            call()
    except Exception as error:
        if "synchronizing CUDA operation" in str(error):
            raise UnrecordableError("it waits for the device on its way") from None
        raise UnrecordableError(first_line(error)) from None


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Within, an operation for whose result the host would wait raises an error."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def capture(call: Call, pool: Any, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record one call, without doing it, and return the graph and the call's result."""
    graph = torch.cuda.CUDAGraph()
    reason = ""
    try:
        # Other threads (a compiler's, autograd's) may do what this one must not.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                result = call()
            except Exception as error:
                reason = first_line(error)  # the end of a broken recording raises an error of its own
                raise
    except Exception as error:
        give_up(graph, pool, stream)
        raise UnrecordableError(reason or first_line(error)) from None
    return graph, result


def give_up(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a broken recording is over, which torch 2.11 forgets to do.

    It would refuse to empty its cache from then on. The graph stays, for the allocator may still point to it.
    """
    _FAILED_GRAPHS.append(graph)
    with suppress(RuntimeError, AttributeError):  # where torch has done so itself
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)


def first_line(error: Exception) -> str:
    """What an error says first; its kind where it says nothing."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]

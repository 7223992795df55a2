"""A timed call as a CUDA graph: recorded once and replayed without Python, as training does with its steps."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from some_moe.lab.bench.timing import Call

WARMUP_CALLS = 3
_FAILED_GRAPHS: list[torch.cuda.CUDAGraph] = []


class UnrecordableError(RuntimeError):
    """A call that cannot be recorded. Its message says why, in a few words."""


def record(call: Call, device: torch.device) -> tuple[Call, Any]:
    """A call's replays, and what the recorded call returned: tensors that each replay fills anew.

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

"""Triton kernels compiled side by side: a pass that launches none of them tells which there are.

The first step of a run would compile its kernels one after the other, each when it is reached: half a minute. Here the
step's forward and backward pass is made once for its shapes alone. Every launch becomes a compilation on a pool of
threads (Triton leaves Python's lock alone for most of it), and tensors that kernels would have filled are zeros.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

MOST_THREADS = 16


class ZerosForEmpty(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Nothing is left as it was found in memory: zeros are numbers, and good indices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith("some_moe::") or "empty" in name:
            made = tree_map_only(torch.Tensor, torch.Tensor.zero_, made)
        return made


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within, kernels are compiled where they would be launched; at the end, all of them are there.

    One that does not compile is left to its launch, which says why. Does nothing where Triton cannot do it.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    launch = JITFunction.run
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        mode = AsyncCompileMode(pool, ignore_errors=True)

        def compile_it(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:  # noqa: ARG001
            token = active_mode.set(mode)  # autograd has threads of its own
            try:
                return launch(self, *arguments, grid=grid, warmup=True, **options)
            finally:
                active_mode.reset(token)

        JITFunction.run = compile_it
        try:
            with ZerosForEmpty():  # type: ignore[no-untyped-call]
                yield
        finally:
            JITFunction.run = launch
            for kernel in mode.future_kernels.values():
                kernel.result(ignore_errors=True)

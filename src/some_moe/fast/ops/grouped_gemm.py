"""The experts' four products on a GPU: which kernel makes each, in blocks of which sizes.

On Hopper they are those of `pingpong`, where widths are whole blocks; elsewhere, in float32, and where wider blocks are
better because an expert has few rows, the plain ones of `fused_kernels`.

Shapes: P rows in tiles of m rows of one expert, D model width, F hidden width.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from some_moe.fast.ops import pingpong_gemm
from some_moe.fast.ops import tma_gemm as kernels


@dataclass(frozen=True)
class Blocks:
    """Sizes of one matrix kernel's blocks: a program makes n columns for a tile of rows."""

    n: int  # the next smaller power of two that divides the columns is taken where this one does not
    k: int
    warps: int
    stages: int
    registers: int | None = None  # at most so many a thread, so that more programs fit beside each other
    programs: int = 1  # on each multiprocessor, for the kernels whose programs stay


@dataclass(frozen=True)
class Plan:
    """Rows of a tile, and the block sizes of the four matrix kernels."""

    m: int
    up: Blocks
    down: Blocks
    down_backward: Blocks
    up_backward: Blocks


# Measured on an H200: see benchmarks/RESULTS.md.
_LARGE = Plan(
    m=128,
    up=Blocks(128, 64, 8, 3, registers=128, programs=2),
    down=Blocks(128, 64, 8, 3, registers=128, programs=2),
    down_backward=Blocks(128, 32, 4, 4, registers=168),
    up_backward=Blocks(128, 64, 8, 3, registers=128, programs=2),
)
_SMALL = Plan(
    m=128,
    up=Blocks(128, 64, 8, 3, registers=128, programs=2),
    down=Blocks(256, 64, 8, 3),
    down_backward=Blocks(128, 64, 8, 3, registers=128),
    up_backward=Blocks(256, 64, 8, 3),
)
_TINY = Plan(
    m=64,
    up=Blocks(128, 64, 4, 3, programs=2),
    down=Blocks(128, 64, 4, 3, programs=2),
    down_backward=Blocks(128, 64, 4, 3),
    up_backward=Blocks(128, 64, 4, 3, programs=2),
)
_FLOAT32 = Plan(
    m=32,
    up=Blocks(32, 32, 4, 2, programs=4),
    down=Blocks(32, 32, 4, 2, programs=4),
    down_backward=Blocks(32, 32, 4, 2),
    up_backward=Blocks(32, 32, 4, 2, programs=4),
)


def choose_plan(dtype: torch.dtype, num_slots: int, num_experts: int) -> Plan:
    """Few rows an expert want other blocks: a tile is never shared between experts, and weights weigh more."""
    if dtype == torch.float32:
        return _FLOAT32
    rows = num_slots // num_experts
    return _LARGE if rows >= 512 else _SMALL if rows >= 96 else _TINY


@lru_cache(maxsize=256)
def fit(blocks: Blocks, width: int) -> Blocks:
    """Narrow the columns of a block until they divide the width, down to 64: a cut block costs a whole one."""
    n = blocks.n
    while n > 64 and width % n:
        n //= 2
    return replace(blocks, n=n)


def ceil_div(total: int, size: int) -> int:
    return -(-total // size)


def slope_dtype(dtype: torch.dtype, width: int) -> torch.dtype:
    """How slopes are kept (see `fused_kernels.pack_slope`): in bytes where the copy engine takes rows of so many."""
    return torch.uint8 if dtype == torch.bfloat16 and width % 16 == 0 else dtype


def _describe(matrix: Tensor, rows: int, columns: int) -> Any:
    """A matrix, for the copy engine to fetch blocks from or to bring them to."""
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [rows, columns])


_DESCRIPTORS: dict[tuple[Any, ...], Any] = {}


def _describe_stack(stack: Tensor, rows: int, columns: int, describe: Callable[..., Any] = _describe) -> Any:
    """A stack as one matrix. Frozen weights stay where they are: described once, and forgotten when they are freed.
    What is one matrix is trained, and described anew: tomorrow something else may lie there."""
    if stack.dim() == 2:
        return describe(stack, rows, columns)
    key = stack.data_ptr(), stack.shape, stack.dtype, rows, columns, describe
    found = _DESCRIPTORS.get(key)
    if found is None:
        # `.data` is the same memory and no view of `stack`, which would keep alive the tensor whose end it awaits.
        found = _DESCRIPTORS[key] = describe(stack.data.view(-1, stack.shape[-1]), rows, columns)
        weakref.finalize(stack, _DESCRIPTORS.pop, key, None)
    return found


@dataclass(frozen=True)
class Tiles:
    """What every product works on: which expert each tile of m rows has, and how many tiles are in use."""

    m: int
    expert: Tensor | None  # (at most T,) int32; None: there is but one expert
    used: Tensor | int  # () int32, on the device; a number where there is but one expert
    device: torch.device

    @property
    def most(self) -> int:
        return len(self.expert) if self.expert is not None else int(self.used)


def _launch(
    kernel: Any, blocks: Blocks, width: int, tiles: Tiles, *arguments: Any, stays: bool = True, **sizes: Any
) -> None:
    """Launch one of the four matrix kernels over `width` columns; stays: its programs take one block after another."""
    grid = (_programs(tiles, width, blocks.n, blocks.programs),) if stays else (ceil_div(width, blocks.n), tiles.most)
    kernel[grid](
        *arguments, tiles.expert, tiles.used, **sizes, BM=tiles.m, BN=blocks.n, BK=blocks.k,
        num_warps=blocks.warps, num_stages=blocks.stages, maxnreg=blocks.registers,
    )  # fmt: skip


def _programs(tiles: Tiles, width: int, n: int, on_each: int = 1) -> int:
    """Programs that stay: so many on each multiprocessor, and never more than there are blocks of n columns."""
    return min(ceil_div(width, n) * tiles.most, on_each * _multiprocessors(tiles.device))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def size_up(up: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """What the products must know of up (…, F, D). Full float32 for float32; sums of bf16 are exact in it anyway."""
    return {"D": up.shape[-1], "F": up.shape[-2], "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}


def multiply_up(
    spread: Tensor, up: Tensor, up_bias: Tensor, hidden: Tensor, slope: Tensor, tiles: Tiles, plan: Plan,
    sizes: dict[str, Any],
) -> None:  # fmt: skip
    """hidden and slope of the rows `spread`, in an order of slopes that `multiply_down_backward` knows."""
    d, f = sizes["D"], sizes["F"]
    m, n, k = pingpong_gemm.ROWS, pingpong_gemm.COLUMNS, pingpong_gemm.INNER
    if pingpong_gemm.can_take_turns(spread, plan.m, f):
        source, weights = pingpong_gemm.describe(spread, m, k), _describe_stack(up, n, k, pingpong_gemm.describe)
        arguments = source, weights, up_bias, pingpong_gemm.describe(hidden, m, n // 2), slope, tiles.expert, tiles.used
        pingpong_gemm.launch(pingpong_gemm.up_kernel, _programs(tiles, f, n), *arguments, D=d, F=f)
        return
    b = fit(plan.up, f)
    source, weights = _describe(spread, plan.m, b.k), _describe_stack(up, b.n, b.k)
    targets = _describe(hidden, plan.m, b.n // 4), _describe(slope, plan.m, b.n // 4)
    _launch(kernels.up_kernel, b, f, tiles, source, weights, up_bias, *targets, **sizes)


def multiply_down_backward(
    spread: Tensor, down: Tensor, slope: Tensor, grad_pre: Tensor, tiles: Tiles, plan: Plan, sizes: dict[str, Any],
    sums: Tensor | None = None,
) -> bool:  # fmt: skip
    """grad_pre of the gradients `spread`. sums (tiles, F): room for the sums of each tile's columns; returns whether
    they were made."""
    d, f = sizes["D"], sizes["F"]
    m, n, k = pingpong_gemm.ROWS, pingpong_gemm.COLUMNS, pingpong_gemm.INNER
    if pingpong_gemm.can_take_turns(spread, plan.m, f):
        source, weights = pingpong_gemm.describe(spread, m, k), _describe_stack(down, k, n, pingpong_gemm.describe)
        arguments = source, weights, slope, pingpong_gemm.describe(grad_pre, m, n // 2), sums, tiles.expert, tiles.used
        pingpong_gemm.launch(pingpong_gemm.down_backward_kernel, _programs(tiles, f, n), *arguments, D=d, F=f)
        return sums is not None
    b = fit(plan.down_backward, f)
    source, weights = _describe(spread, plan.m, b.k), _describe_stack(down, b.k, b.n)
    targets = _describe(slope, plan.m, b.n), _describe(grad_pre, plan.m, b.n)
    _launch(kernels.down_backward_kernel, b, f, tiles, source, weights, *targets, stays=False, **sizes)
    return False


def _multiply_plainly(
    rows: Tensor, stack: Tensor, bias: Tensor | None, target: Tensor, tiles: Tiles, blocks: Blocks, precision: str, *,
    transposed: bool,
) -> None:  # fmt: skip
    """target = rows @ each tile's matrix of the stack (its transpose) + bias."""
    width = target.shape[1]
    sizes: dict[str, Any] = {
        "INNER": rows.shape[1],
        "WIDTH": width,
        "HEIGHT": stack.shape[-2],
        "TRANSPOSED": transposed,
    }
    if blocks.n == pingpong_gemm.COLUMNS and pingpong_gemm.can_take_turns(rows, tiles.m, width):
        m, n, k = pingpong_gemm.ROWS, pingpong_gemm.COLUMNS, pingpong_gemm.INNER
        weights = _describe_stack(stack, *((n, k) if transposed else (k, n)), pingpong_gemm.describe)
        arguments = pingpong_gemm.describe(rows, m, k), weights, bias, pingpong_gemm.describe(target, m, n // 2)
        programs = _programs(tiles, width, n)
        pingpong_gemm.launch(pingpong_gemm.plain_kernel, programs, *arguments, tiles.expert, tiles.used, **sizes)
        return
    b = fit(blocks, width)
    weights = _describe_stack(stack, *((b.n, b.k) if transposed else (b.k, b.n)))
    arguments = _describe(rows, tiles.m, b.k), weights, bias, _describe(target, tiles.m, b.n // 2)
    _launch(kernels.plain_kernel, b, width, tiles, *arguments, **sizes, PRECISION=precision)


def multiply_down(
    hidden: Tensor, down: Tensor, down_bias: Tensor, rows: Tensor, tiles: Tiles, plan: Plan, sizes: dict[str, Any]
) -> None:
    """rows (P, D) of hidden."""
    _multiply_plainly(hidden, down, down_bias, rows, tiles, plan.down, sizes["PRECISION"], transposed=True)


def multiply_up_backward(
    grad_pre: Tensor, up: Tensor, grad_spread: Tensor, tiles: Tiles, plan: Plan, sizes: dict[str, Any]
) -> None:
    """grad_spread (P, D) of grad_pre."""
    _multiply_plainly(grad_pre, up, None, grad_spread, tiles, plan.up_backward, sizes["PRECISION"], transposed=False)

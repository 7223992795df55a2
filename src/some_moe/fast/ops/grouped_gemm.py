"""The experts' four grouped GEMMs: which kernel runs each, with which block sizes.

On Hopper, where widths are whole blocks, those of `pingpong_gemm`; elsewhere, in float32, and where an expert has few
rows and wider blocks are better, those of `tma_gemm`.

Shapes: P rows in M-tiles of m rows of one expert, D model width, F hidden width.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from some_moe.fast.ops import pingpong_gemm as pingpong
from some_moe.fast.ops import tma_gemm


@dataclass(frozen=True)
class BlockConfig:
    """Block sizes and launch options of one GEMM kernel: output tiles of m × n."""

    n: int  # BLOCK_N; narrowed where it does not divide the width (`fit`)
    k: int  # BLOCK_K
    warps: int
    stages: int
    registers: int | None = None  # maxnreg, for occupancy
    programs: int = 1  # on each SM, of persistent kernels


@dataclass(frozen=True)
class Plan:
    """BLOCK_M, and the configs of the four GEMMs."""

    m: int
    up: BlockConfig
    down: BlockConfig
    down_backward: BlockConfig
    up_backward: BlockConfig


# Measured on an H200: see benchmarks/RESULTS.md.
_LARGE = Plan(
    m=128,
    up=BlockConfig(128, 64, 8, 3, registers=128, programs=2),
    down=BlockConfig(128, 64, 8, 3, registers=128, programs=2),
    down_backward=BlockConfig(128, 32, 4, 4, registers=168),
    up_backward=BlockConfig(128, 64, 8, 3, registers=128, programs=2),
)
_SMALL = Plan(
    m=128,
    up=BlockConfig(128, 64, 8, 3, registers=128, programs=2),
    down=BlockConfig(256, 64, 8, 3),
    down_backward=BlockConfig(128, 64, 8, 3, registers=128),
    up_backward=BlockConfig(256, 64, 8, 3),
)
_LOW = Plan(
    m=64,
    up=BlockConfig(256, 64, 8, 3),
    down=BlockConfig(256, 64, 8, 3),
    down_backward=BlockConfig(256, 64, 8, 3),
    up_backward=BlockConfig(256, 64, 8, 3),
)
_TINY = Plan(
    m=64,
    up=BlockConfig(128, 64, 4, 3, programs=2),
    down=BlockConfig(128, 64, 4, 3, programs=2),
    down_backward=BlockConfig(128, 64, 4, 3),
    up_backward=BlockConfig(128, 64, 4, 3, programs=2),
)
_FLOAT32 = Plan(
    m=32,
    up=BlockConfig(32, 32, 4, 2, programs=4),
    down=BlockConfig(32, 32, 4, 2, programs=4),
    down_backward=BlockConfig(32, 32, 4, 2),
    up_backward=BlockConfig(32, 32, 4, 2, programs=4),
)


def choose_plan(dtype: torch.dtype, num_slots: int, num_experts: int, widths: Sequence[int] = (1,)) -> Plan:
    """By rows an expert: with few of them padding and the loads of weights cost more. widths: of the experts, D and F;
    low tiles are wide."""
    if dtype == torch.float32:
        return _FLOAT32
    rows = num_slots // num_experts
    if rows >= 512:
        return _LARGE
    if rows < 96:
        return _TINY
    return _LOW if all(width % _LOW.up.n == 0 for width in widths) else _SMALL


@lru_cache(maxsize=256)
def fit(config: BlockConfig, width: int) -> BlockConfig:
    """Halve BLOCK_N until it divides the width, down to 64: a partial block costs a whole one."""
    n = config.n
    while n > 64 and width % n:
        n //= 2
    return replace(config, n=n)


def cdiv(total: int, size: int) -> int:
    return -(-total // size)


def dgelu_dtype(dtype: torch.dtype, width: int) -> torch.dtype:
    """How gelu′ is saved (see `tma_gemm.quantize_dgelu`): uint8 where TMA takes rows of so many bytes."""
    return torch.uint8 if dtype == torch.bfloat16 and width % 16 == 0 else dtype


def _make_descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    """The TMA descriptor of a matrix, for blocks (rows, columns)."""
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [rows, columns])


_DESCRIPTORS: dict[tuple[Any, ...], Any] = {}


def _stack_descriptor(stack: Tensor, rows: int, columns: int, describe: Callable[..., Any] = _make_descriptor) -> Any:
    """The TMA descriptor of a stack as one matrix. Frozen weights do not move: cached until they are freed. A single
    matrix is trained, and its cast lies elsewhere every step: never cached."""
    if stack.dim() == 2:
        return describe(stack, rows, columns)
    key = stack.data_ptr(), stack.shape, stack.dtype, rows, columns, describe
    found = _DESCRIPTORS.get(key)
    if found is None:
        # `.data` is the same memory and no view of `stack`: a view would keep alive the tensor that `finalize` watches.
        found = _DESCRIPTORS[key] = describe(stack.data.view(-1, stack.shape[-1]), rows, columns)
        weakref.finalize(stack, _DESCRIPTORS.pop, key, None)
    return found


@dataclass(frozen=True)
class Tiles:
    """What every grouped GEMM works on: the expert of each M-tile, and how many M-tiles are in use."""

    m: int
    expert: Tensor | None  # (max_tiles,) int32; None: there is but one expert
    num_tiles: Tensor | int  # () int32, on the device; an int where there is but one expert
    device: torch.device

    @property
    def max_tiles(self) -> int:
        return len(self.expert) if self.expert is not None else int(self.num_tiles)


def _launch(
    kernel: Any, config: BlockConfig, width: int, tiles: Tiles, *arguments: Any, persistent: bool = True, **sizes: Any
) -> None:
    """Launch one of the `tma_gemm` kernels over `width` columns; persistent: programs loop over output tiles."""
    num_programs = _num_programs(tiles, width, config.n, config.programs)
    grid = (num_programs,) if persistent else (cdiv(width, config.n), tiles.max_tiles)
    kernel[grid](
        *arguments, tiles.expert, tiles.num_tiles, **sizes, BM=tiles.m, BN=config.n, BK=config.k,
        num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
    )  # fmt: skip


def _num_programs(tiles: Tiles, width: int, n: int, per_sm: int = 1) -> int:
    """The grid of a persistent kernel: so many programs on each SM, and never more than output tiles."""
    return min(cdiv(width, n) * tiles.max_tiles, per_sm * num_sms(tiles.device))


@cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def gemm_sizes(up: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """The constexprs of the GEMMs, from up (…, F, D). float32 is multiplied in full (IEEE), not as TF32."""
    return {"D": up.shape[-1], "F": up.shape[-2], "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}


def gemm_up_gelu(
    x_rows: Tensor, up: Tensor, up_bias: Tensor, hidden: Tensor, dgelu: Tensor, tiles: Tiles, plan: Plan,
    sizes: dict[str, Any],
) -> None:  # fmt: skip
    """hidden and dgelu of x_rows; dgelu in a layout that only `gemm_down_dgelu` knows."""
    d, f = sizes["D"], sizes["F"]
    m, n, k = plan.m, plan.up.n, pingpong.BLOCK_K
    if pingpong.can_pingpong(x_rows, m, f, n):
        a, b = pingpong.make_descriptor(x_rows, m, k), _stack_descriptor(up, n, k, pingpong.make_descriptor)
        arguments = a, b, up_bias, pingpong.make_descriptor(hidden, m, n // 2), dgelu, tiles.expert, tiles.num_tiles
        pingpong.launch(pingpong.up_gelu_kernel, _num_programs(tiles, f, n), m, *arguments, D=d, F=f)
        return
    config = fit(plan.up, f)
    a, b = _make_descriptor(x_rows, plan.m, config.k), _stack_descriptor(up, config.n, config.k)
    outputs = (_make_descriptor(out, plan.m, config.n // 4) for out in (hidden, dgelu))
    _launch(tma_gemm.up_gelu_kernel, config, f, tiles, a, b, up_bias, *outputs, **sizes)


def gemm_down_dgelu(
    grad_y_rows: Tensor, down: Tensor, dgelu: Tensor, grad_pre: Tensor, tiles: Tiles, plan: Plan,
    sizes: dict[str, Any], dbias: Tensor | None = None,
) -> bool:  # fmt: skip
    """grad_pre of grad_y_rows. dbias (tiles, F): a buffer for the column sums of each M-tile; returns whether it was
    filled."""
    d, f = sizes["D"], sizes["F"]
    m, n, k = plan.m, plan.down_backward.n, pingpong.BLOCK_K
    if pingpong.can_pingpong(grad_y_rows, m, f, n):
        a, b = pingpong.make_descriptor(grad_y_rows, m, k), _stack_descriptor(down, k, n, pingpong.make_descriptor)
        arguments = a, b, dgelu, pingpong.make_descriptor(grad_pre, m, n // 2), dbias, tiles.expert, tiles.num_tiles
        pingpong.launch(pingpong.down_dgelu_kernel, _num_programs(tiles, f, n), m, *arguments, D=d, F=f)
        return dbias is not None
    config = fit(plan.down_backward, f)
    a, b = _make_descriptor(grad_y_rows, plan.m, config.k), _stack_descriptor(down, config.k, config.n)
    tiled = (_make_descriptor(matrix, plan.m, config.n) for matrix in (dgelu, grad_pre))
    _launch(tma_gemm.down_dgelu_kernel, config, f, tiles, a, b, *tiled, persistent=False, **sizes)
    return False


def gemm_rows(
    rows: Tensor, stack: Tensor, bias: Tensor | None, out: Tensor, tiles: Tiles, config: BlockConfig,
    sizes: dict[str, Any], *, transposed: bool,
) -> None:  # fmt: skip
    """out = rows @ each M-tile's matrix of the stack (or its transpose) + bias."""
    width, precision = out.shape[1], sizes["PRECISION"]
    sizes = {"K": rows.shape[1], "N": width, "B_ROWS": stack.shape[-2], "TRANSPOSED": transposed}
    m, n, k = tiles.m, config.n, pingpong.BLOCK_K
    if pingpong.can_pingpong(rows, m, width, n):
        b = _stack_descriptor(stack, *((n, k) if transposed else (k, n)), pingpong.make_descriptor)
        arguments = pingpong.make_descriptor(rows, m, k), b, bias, pingpong.make_descriptor(out, m, n // 2)
        programs = _num_programs(tiles, width, n)
        pingpong.launch(pingpong.grouped_gemm_kernel, programs, m, *arguments, tiles.expert, tiles.num_tiles, **sizes)
        return
    config = fit(config, width)
    b = _stack_descriptor(stack, *((config.n, config.k) if transposed else (config.k, config.n)))
    arguments = _make_descriptor(rows, tiles.m, config.k), b, bias, _make_descriptor(out, tiles.m, config.n // 2)
    _launch(tma_gemm.grouped_gemm_kernel, config, width, tiles, *arguments, **sizes, PRECISION=precision)


def gemm_down(
    hidden: Tensor, down: Tensor, down_bias: Tensor, y_rows: Tensor, tiles: Tiles, plan: Plan, sizes: dict[str, Any]
) -> None:
    """y_rows (P, D) of hidden."""
    gemm_rows(hidden, down, down_bias, y_rows, tiles, plan.down, sizes, transposed=True)


def gemm_up_backward(
    grad_pre: Tensor, up: Tensor, grad_x_rows: Tensor, tiles: Tiles, plan: Plan, sizes: dict[str, Any]
) -> None:
    """grad_x_rows (P, D) of grad_pre."""
    gemm_rows(grad_pre, up, None, grad_x_rows, tiles, plan.up_backward, sizes, transposed=False)

"""The Triton path for frozen experts on a GPU: products whose every byte the copy engine moves.

Forward: give each slot (token, choice) a row beside the others of its expert → `spread_kernel` (x to those rows) →
`up_kernel` (product, bias, GELU and its slope) → `down_kernel` (product, bias) → `mix_kernel` (each token's weighted
sum). Backward makes dX and the gate gradient, and no gradient of a weight: `spread_backward_kernel` (gate gradient,
and the weighted gradient to the rows) → `down_backward_kernel` (product, times the slope) → `up_backward_kernel` →
`mix_kernel` (sum). Kept for it: the slopes (P, F) and the experts' outputs (P, D). bf16 in, fp32 sums, no atomics.

On Hopper the two products with long endings are those of `pingpong`, which are faster.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from some_moe.kernels import fused_kernels as kernels
from some_moe.kernels import pingpong
from some_moe.kernels.placing import most_tiles, place_slots
from some_moe.kernels.weights import ExpertWeights

LARGEST_TILE = 128  # rows


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


def pad_to_power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def count_rows(num_slots: int, num_experts: int) -> int:
    """P: room for every slot, and for each expert to begin a tile, whichever plan is chosen."""
    return most_tiles(num_slots, num_experts, LARGEST_TILE) * LARGEST_TILE


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


def _per_token(kernel: Any, *arguments: Any, num_tokens: int, top_k: int, d: int) -> None:
    """Launch one of the kernels that go over the tokens."""
    padded = pad_to_power(d)
    block = max(1, 2048 // padded)
    kernel[(ceil_div(num_tokens, block),)](*arguments, num_tokens, K=top_k, D=d, BLOCK=block, BD=padded)


def multiply_up(
    spread: Tensor, up: Tensor, up_bias: Tensor, hidden: Tensor, slope: Tensor, tiles: Tiles, plan: Plan,
    sizes: dict[str, Any],
) -> None:  # fmt: skip
    """hidden and slope of the rows `spread`, in an order of slopes that `multiply_down_backward` knows."""
    d, f = sizes["D"], sizes["F"]
    m, n, k = pingpong.ROWS, pingpong.COLUMNS, pingpong.INNER
    if pingpong.can_take_turns(spread, plan.m, f):
        source, weights = pingpong.describe(spread, m, k), _describe_stack(up, n, k, pingpong.describe)
        arguments = source, weights, up_bias, pingpong.describe(hidden, m, n // 2), slope, tiles.expert, tiles.used
        pingpong.launch(pingpong.up_kernel, _programs(tiles, f, n), *arguments, D=d, F=f)
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
    m, n, k = pingpong.ROWS, pingpong.COLUMNS, pingpong.INNER
    if pingpong.can_take_turns(spread, plan.m, f):
        source, weights = pingpong.describe(spread, m, k), _describe_stack(down, k, n, pingpong.describe)
        arguments = source, weights, slope, pingpong.describe(grad_pre, m, n // 2), sums, tiles.expert, tiles.used
        pingpong.launch(pingpong.down_backward_kernel, _programs(tiles, f, n), *arguments, D=d, F=f)
        return sums is not None
    b = fit(plan.down_backward, f)
    source, weights = _describe(spread, plan.m, b.k), _describe_stack(down, b.k, b.n)
    targets = _describe(slope, plan.m, b.n), _describe(grad_pre, plan.m, b.n)
    _launch(kernels.down_backward_kernel, b, f, tiles, source, weights, *targets, stays=False, **sizes)
    return False


def _multiply_plainly(
    rows: Tensor, stack: Tensor, bias: Tensor | None, target: Tensor, tiles: Tiles, *, transposed: bool
) -> None:
    """target = rows @ each tile's matrix of the stack (its transpose) + bias, by groups that take turns."""
    m, n, k = pingpong.ROWS, pingpong.COLUMNS, pingpong.INNER
    weights = _describe_stack(stack, *((n, k) if transposed else (k, n)), pingpong.describe)
    arguments = pingpong.describe(rows, m, k), weights, bias, pingpong.describe(target, m, n // 2)
    width = target.shape[1]
    pingpong.launch(
        pingpong.plain_kernel, _programs(tiles, width, n), *arguments, tiles.expert, tiles.used, INNER=rows.shape[1],
        WIDTH=width, HEIGHT=stack.shape[-2], TRANSPOSED=transposed,
    )  # fmt: skip


def multiply_down(
    hidden: Tensor, down: Tensor, down_bias: Tensor, rows: Tensor, tiles: Tiles, plan: Plan, sizes: dict[str, Any]
) -> None:
    """rows (P, D) of hidden."""
    d = sizes["D"]
    if pingpong.can_take_turns(hidden, plan.m, d):
        _multiply_plainly(hidden, down, down_bias, rows, tiles, transposed=True)
        return
    b = fit(plan.down, d)
    source, weights = _describe(hidden, plan.m, b.k), _describe_stack(down, b.n, b.k)
    _launch(kernels.down_kernel, b, d, tiles, source, weights, down_bias, _describe(rows, plan.m, b.n // 2), **sizes)


def multiply_up_backward(
    grad_pre: Tensor, up: Tensor, grad_spread: Tensor, tiles: Tiles, plan: Plan, sizes: dict[str, Any]
) -> None:
    """grad_spread (P, D) of grad_pre."""
    d = sizes["D"]
    if pingpong.can_take_turns(grad_pre, plan.m, d):
        _multiply_plainly(grad_pre, up, None, grad_spread, tiles, transposed=False)
        return
    b = fit(plan.up_backward, d)
    source, weights = _describe(grad_pre, plan.m, b.k), _describe_stack(up, b.k, b.n)
    target = _describe(grad_spread, plan.m, b.n // 2)
    _launch(kernels.up_backward_kernel, b, d, tiles, source, weights, target, **sizes)


def run_forward(
    x: Tensor, experts: Tensor, gates: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor,
    onto: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y (N, D), onto what is given, and for the backward pass: slope (P, F), rows (P, D), each slot's row (N, K), and
    the tiles' experts and number."""
    num_tokens, top_k = experts.shape
    num_experts, f, d = up.shape
    plan = choose_plan(x.dtype, num_tokens * top_k, num_experts)
    m = plan.m
    placed = place_slots(experts, num_experts, m)
    tiles = Tiles(m, placed.tile_expert, placed.num_tiles, x.device)
    size = count_rows(num_tokens * top_k, num_experts)
    sizes = size_up(up, x.dtype)
    tokens: dict[str, int] = {"num_tokens": num_tokens, "top_k": top_k, "d": d}
    spread, hidden, rows = (x.new_empty(size, width) for width in (d, f, d))
    slope = x.new_empty(size, f, dtype=slope_dtype(x.dtype, f))
    _per_token(kernels.spread_kernel, x, placed.row, spread, **tokens)
    multiply_up(spread, up, up_bias, hidden, slope, tiles, plan, sizes)
    multiply_down(hidden, down, down_bias, rows, tiles, plan, sizes)
    y = torch.empty_like(x)
    _per_token(kernels.mix_kernel, rows, placed.row, gates, onto, y, **tokens)
    return y, slope, rows, placed.row, placed.tile_expert, placed.num_tiles


def run_backward(
    grad_y: Tensor, gates: Tensor, slope: Tensor, rows: Tensor, row: Tensor, tile_expert: Tensor, num_tiles: Tensor,
    up: Tensor, down: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x (N, D) and of the gates (N, K)."""
    num_tokens, top_k = gates.shape
    num_experts, _, d = up.shape
    plan = choose_plan(grad_y.dtype, num_tokens * top_k, num_experts)
    m = plan.m
    tiles = Tiles(m, tile_expert, num_tiles, grad_y.device)
    sizes = size_up(up, rows.dtype)
    tokens: dict[str, int] = {"num_tokens": num_tokens, "top_k": top_k, "d": d}
    spread, grad_pre, grad_spread = torch.empty_like(rows), rows.new_empty(slope.shape), torch.empty_like(rows)
    grad_x, grad_gates = torch.empty_like(grad_y), torch.empty_like(gates)
    _per_token(kernels.spread_backward_kernel, grad_y, row, gates, rows, spread, grad_gates, **tokens)
    multiply_down_backward(spread, down, slope, grad_pre, tiles, plan, sizes)
    multiply_up_backward(grad_pre, up, grad_spread, tiles, plan, sizes)
    _per_token(kernels.mix_kernel, grad_spread, row, None, None, grad_x, **tokens)
    return grad_x, grad_gates


class FrozenExperts(torch.autograd.Function):
    """Both passes, called directly: what a custom op checks at every call, only compiled code needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Tensor, gates: Tensor, *rest: Any) -> Tensor:
        up, _, down, _, onto = rest
        y, *kept = run_forward(x, experts, gates, *rest)
        ctx.save_for_backward(gates, *kept, up, down)
        ctx.has_onto = onto is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_gates = run_backward(grads[0].contiguous(), *ctx.saved_tensors)
        return grad_x, None, grad_gates, None, None, None, None, grads[0] if ctx.has_onto else None


# --- the same as operations that a compiler takes as they are --------------------------------------------


@torch.library.custom_op("some_moe::frozen_experts", mutates_args=())
def frozen_experts(
    x: Tensor, experts: Tensor, gates: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor,
    onto: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return run_forward(x, experts, gates, up, up_bias, down, down_bias, onto)  # type: ignore[return-value]


@frozen_experts.register_fake
def _(x: Tensor, experts: Tensor, gates: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    num_experts, f, d = up.shape
    slots = experts.shape[0] * experts.shape[1]
    size = count_rows(slots, num_experts)
    row = experts.new_empty(experts.shape, dtype=torch.int32)
    most = most_tiles(slots, num_experts, choose_plan(x.dtype, slots, num_experts).m)
    slope = x.new_empty(size, f, dtype=slope_dtype(x.dtype, f))
    return torch.empty_like(x), slope, x.new_empty(size, d), row, row.new_empty(most), row.new_empty(())


@torch.library.custom_op("some_moe::frozen_experts_backward", mutates_args=())
def frozen_experts_backward(
    grad_y: Tensor, gates: Tensor, slope: Tensor, rows: Tensor, row: Tensor, tile_expert: Tensor, num_tiles: Tensor,
    up: Tensor, down: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return run_backward(grad_y, gates, slope, rows, row, tile_expert, num_tiles, up, down)


@frozen_experts_backward.register_fake
def _(grad_y: Tensor, gates: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(grad_y), torch.empty_like(gates)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, gates, up, _, down, _, onto = inputs
    _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(gates, *kept, up, down)
    ctx.has_onto = onto is not None


def _backward(ctx: Any, grad_y: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG001
    grad_x, grad_gates = frozen_experts_backward(grad_y.contiguous(), *ctx.saved_tensors)
    return grad_x, None, grad_gates, None, None, None, None, grad_y if ctx.has_onto else None


frozen_experts.register_autograd(_backward, setup_context=_save)


def can_mix(x: Tensor, weights: ExpertWeights) -> bool:
    """Whether this path computes what is asked: frozen experts with a down-projection, in the type of x."""
    plain = weights.is_frozen and weights.down is not None
    aligned = weights.up.shape[1] % 8 == 0 and weights.up.shape[2] % 8 == 0  # rows of the copy engine: 16 bytes
    return plain and aligned and x.dtype in (torch.bfloat16, torch.float32) and weights.up.dtype == x.dtype


def mix_experts(
    x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights, onto: Tensor | None = None
) -> Tensor:
    """See `some_moe.kernels`. Takes what `can_mix` admits."""
    assert weights.down is not None
    assert weights.down_bias is not None
    if onto is not None and onto.dtype != x.dtype:
        return onto + mix_experts(x, experts, gates, weights)
    stacks = weights.up, weights.up_bias, weights.down, weights.down_bias
    inputs = x.contiguous(), experts.contiguous(), gates.contiguous(), *stacks
    if onto is not None:
        onto = onto.contiguous()
    if torch.compiler.is_compiling():
        compiled: Tensor = frozen_experts(*inputs, onto)[0]
        return compiled
    y: Tensor = FrozenExperts.apply(*inputs, onto)  # type: ignore[no-untyped-call]
    return y

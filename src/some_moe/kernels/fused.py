"""The Triton path for frozen experts on a GPU: gather, products, GELU and gates in three kernels each way.

Forward: sort the slots by expert → tiles → `up_kernel` (gather + product + bias + GELU) → `down_kernel`
(product + bias) → `mix_kernel` (each token's weighted sum). Backward makes dX and the gate gradient, and no
gradient of a weight: `down_backward_kernel` (product, GELU′ and gate in its epilogue) → `up_backward_kernel`
→ `mix_backward_kernel`. Only the pre-activations and the sorted order are kept for it. bf16 in, fp32 sums.
"""

import weakref
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from some_moe.kernels import fused_kernels as kernels
from some_moe.kernels.tables import sort_slots
from some_moe.kernels.weights import ExpertWeights


@dataclass(frozen=True)
class Blocks:
    """Sizes of one matrix kernel's blocks: a program makes n columns for a tile of m sorted slots."""

    m: int
    n: int  # the next smaller power of two that divides the columns is taken where this one does not
    k: int
    warps: int
    stages: int
    registers: int | None = None  # at most so many a thread, so that more programs fit beside each other


@dataclass(frozen=True)
class Plan:
    """Block sizes of the four matrix kernels."""

    up: Blocks
    down: Blocks
    down_backward: Blocks
    up_backward: Blocks


# Measured on an H200: see benchmarks/RESULTS.md.
_LARGE = Plan(
    up=Blocks(128, 128, 64, 8, 3, registers=128),
    down=Blocks(128, 256, 64, 8, 4),
    down_backward=Blocks(64, 128, 64, 4, 3),
    up_backward=Blocks(128, 256, 64, 8, 4),
)
_SMALL = Plan(
    up=Blocks(64, 256, 32, 8, 3, registers=128),
    down=Blocks(128, 256, 64, 8, 4),
    down_backward=Blocks(64, 256, 32, 8, 3, registers=128),
    up_backward=Blocks(128, 256, 64, 8, 4),
)
_TINY = Plan(
    up=Blocks(64, 128, 64, 4, 3),
    down=Blocks(64, 128, 64, 4, 3),
    down_backward=Blocks(64, 128, 64, 4, 3),
    up_backward=Blocks(64, 128, 64, 4, 3),
)
_FLOAT32 = Plan(
    up=Blocks(32, 32, 32, 4, 2),
    down=Blocks(32, 32, 32, 4, 2),
    down_backward=Blocks(32, 32, 32, 4, 2),
    up_backward=Blocks(32, 32, 32, 4, 2),
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


Tiles = tuple[Tensor, Tensor, Tensor]


def _make_tiles(ends: Tensor, num_slots: int, m: int) -> Tiles:
    """The expert (or −1), the first sorted slot and the end of each of at most S/m + E tiles, int32."""
    num_experts = len(ends)
    num_tiles = ceil_div(num_slots, m) + num_experts
    expert, first, end = ends.new_empty(3, num_tiles).unbind()
    padded = pad_to_power(num_experts)
    block = max(1, min(32, 16384 // padded))
    kernels.tile_kernel[(ceil_div(num_tiles, block),)](
        ends, expert, first, end, num_experts, num_tiles, E=padded, BM=m, BT=block
    )
    return expert, first, end


def _describe(tensor: Tensor, rows: int, columns: int) -> Any:
    """A stack or matrix as rows × width, for the copy engine to fetch blocks from."""
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), [rows, columns])


_DESCRIPTORS: dict[tuple[Any, ...], Any] = {}


def _describe_stack(stack: Tensor, rows: int, columns: int) -> Any:
    """The same for frozen weights, which stay where they are: described once, and forgotten when they are freed."""
    key = stack.data_ptr(), stack.shape, stack.dtype, rows, columns
    found = _DESCRIPTORS.get(key)
    if found is None:
        # `.data` is the same memory and no view of `stack`, which would keep alive the tensor whose end it awaits.
        found = _DESCRIPTORS[key] = _describe(stack.data, rows, columns)
        weakref.finalize(stack, _DESCRIPTORS.pop, key, None)
    return found


def _launch(kernel: Any, blocks: Blocks, width: int, *arguments: Any, tiles: Tiles, **sizes: Any) -> None:
    """Launch one of the four matrix kernels over `width` columns."""
    kernel[(ceil_div(width, blocks.n), len(tiles[0]))](
        *arguments, *tiles, **sizes, BM=blocks.m, BN=blocks.n, BK=blocks.k,
        num_warps=blocks.warps, num_stages=blocks.stages, maxnreg=blocks.registers,
    )  # fmt: skip


def _precision(dtype: torch.dtype) -> str:
    """Full float32 products for float32 weights; those of bf16 are exact in float32 sums anyway."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _token_block(d: int) -> tuple[int, int]:
    """(tokens, padded width) of a program of the two mixing kernels."""
    padded = pad_to_power(d)
    return max(1, 2048 // padded), padded


def run_forward(
    x: Tensor, experts: Tensor, gates: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (N, D), and for the backward pass: pre (S, F), order (S,), ends (E,)."""
    num_tokens, top_k = experts.shape
    num_experts, f, d = up.shape
    slots = num_tokens * top_k
    plan = choose_plan(x.dtype, slots, num_experts)
    table = sort_slots(experts, num_experts)
    sizes: dict[str, Any] = {"D": d, "F": f, "PRECISION": _precision(x.dtype)}
    pre, hidden = x.new_empty(slots, f), x.new_empty(slots, f)
    blocks = fit(plan.up, f)
    tiles = _make_tiles(table.ends, slots, blocks.m)
    weights = _describe_stack(up, blocks.n, blocks.k)
    _launch(kernels.up_kernel, blocks, f, x, table.order, weights, up_bias, pre, hidden, tiles=tiles, K=top_k, **sizes)
    rows = x.new_empty(slots, d)
    blocks = fit(plan.down, d)
    tiles = tiles if blocks.m == plan.up.m else _make_tiles(table.ends, slots, blocks.m)
    weights, source = _describe_stack(down, blocks.n, blocks.k), _describe(hidden, blocks.m, blocks.k)
    _launch(kernels.down_kernel, blocks, d, source, table.order, weights, down_bias, rows, tiles=tiles, **sizes)
    y = torch.empty_like(x)
    block, padded = _token_block(d)
    kernels.mix_kernel[(ceil_div(num_tokens, block),)](rows, gates, y, num_tokens, K=top_k, D=d, BLOCK=block, BD=padded)
    return y, pre, table.order, table.ends


def run_backward(
    grad_y: Tensor, experts: Tensor, gates: Tensor, pre: Tensor, order: Tensor, ends: Tensor,
    up: Tensor, down: Tensor, down_bias: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x (N, D) and of the gates (N, K)."""
    num_tokens, top_k = experts.shape
    num_experts, f, d = up.shape
    slots = num_tokens * top_k
    plan = choose_plan(grad_y.dtype, slots, num_experts)
    sizes: dict[str, Any] = {"D": d, "F": f, "PRECISION": _precision(pre.dtype)}
    blocks = fit(plan.down_backward, f)
    tiles = _make_tiles(ends, slots, blocks.m)
    parts = ceil_div(f, blocks.n)
    grad_pre = torch.empty_like(pre)
    partial = torch.empty(slots, parts, dtype=torch.float32, device=pre.device)
    weights = _describe_stack(down, blocks.k, blocks.n)
    _launch(kernels.down_backward_kernel, blocks, f,
            grad_y, order, gates, weights, pre, grad_pre, partial, tiles=tiles, K=top_k, **sizes)  # fmt: skip
    grad_rows = grad_y.new_empty(slots, d)
    blocks = fit(plan.up_backward, d)
    tiles = tiles if blocks.m == plan.down_backward.m else _make_tiles(ends, slots, blocks.m)
    weights, source = _describe_stack(up, blocks.k, blocks.n), _describe(grad_pre, blocks.m, blocks.k)
    _launch(kernels.up_backward_kernel, blocks, d, source, order, weights, grad_rows, tiles=tiles, **sizes)
    grad_x, grad_gates = torch.empty_like(grad_y), torch.empty_like(gates)
    block, padded = _token_block(d)
    kernels.mix_backward_kernel[(ceil_div(num_tokens, block),)](
        grad_rows, partial, grad_y, experts, down_bias, grad_x, grad_gates, num_tokens,
        K=top_k, D=d, PARTS=parts, PARTS_PADDED=pad_to_power(parts), BLOCK=block, BD=padded,
    )  # fmt: skip
    return grad_x, grad_gates


class FrozenExperts(torch.autograd.Function):
    """Both passes, called directly: what a custom op checks at every call, only compiled code needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Tensor, gates: Tensor, *stacks: Tensor) -> Tensor:
        up, _, down, down_bias = stacks
        y, pre, order, ends = run_forward(x, experts, gates, *stacks)
        ctx.save_for_backward(experts, gates, pre, order, ends, up, down, down_bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_gates = run_backward(grads[0].contiguous(), *ctx.saved_tensors)
        return grad_x, None, grad_gates, None, None, None, None


# --- the same as operations that a compiler takes as they are --------------------------------------------


@torch.library.custom_op("some_moe::frozen_experts", mutates_args=())
def frozen_experts(
    x: Tensor, experts: Tensor, gates: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return run_forward(x, experts, gates, up, up_bias, down, down_bias)


@frozen_experts.register_fake
def _(x: Tensor, experts: Tensor, gates: Tensor, up: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # noqa: ARG001
    slots = experts.shape[0] * experts.shape[1]
    order = experts.new_empty(slots)
    return torch.empty_like(x), x.new_empty(slots, up.shape[1]), order, order.new_empty(up.shape[0], dtype=torch.int32)


@torch.library.custom_op("some_moe::frozen_experts_backward", mutates_args=())
def frozen_experts_backward(
    grad_y: Tensor, experts: Tensor, gates: Tensor, pre: Tensor, order: Tensor, ends: Tensor,
    up: Tensor, down: Tensor, down_bias: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return run_backward(grad_y, experts, gates, pre, order, ends, up, down, down_bias)


@frozen_experts_backward.register_fake
def _(grad_y: Tensor, experts: Tensor, gates: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(grad_y), torch.empty_like(gates)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    _, experts, gates, up, _, down, down_bias = inputs
    _, pre, order, ends = output
    ctx.mark_non_differentiable(pre, order, ends)
    ctx.save_for_backward(experts, gates, pre, order, ends, up, down, down_bias)


def _backward(ctx: Any, grad_y: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG001
    grad_x, grad_gates = frozen_experts_backward(grad_y.contiguous(), *ctx.saved_tensors)
    return grad_x, None, grad_gates, None, None, None, None


frozen_experts.register_autograd(_backward, setup_context=_save)


def can_mix(x: Tensor, weights: ExpertWeights) -> bool:
    """Whether this path computes what is asked: frozen experts with a down-projection, in the type of x."""
    plain = weights.is_frozen and weights.down is not None
    aligned = weights.up.shape[1] % 8 == 0 and weights.up.shape[2] % 8 == 0  # rows of the copy engine: 16 bytes
    return plain and aligned and x.dtype in (torch.bfloat16, torch.float32) and weights.up.dtype == x.dtype


def mix_experts(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """See `some_moe.kernels`. Takes what `can_mix` admits."""
    assert weights.down is not None
    assert weights.down_bias is not None
    stacks = weights.up, weights.up_bias, weights.down, weights.down_bias
    inputs = x.contiguous(), experts.contiguous(), gates.contiguous(), *stacks
    if torch.compiler.is_compiling():
        compiled: Tensor = frozen_experts(*inputs)[0]
        return compiled
    y: Tensor = FrozenExperts.apply(*inputs)  # type: ignore[no-untyped-call]
    return y

"""The Triton path for frozen experts on a GPU: products whose every byte the copy engine moves.

Forward: give each slot (token, choice) a row beside the others of its expert → `spread_kernel` (x to those rows) →
`up_kernel` (product, bias, GELU and its slope) → `plain_kernel` (product, bias) → `mix_kernel` (each token's weighted
sum). Backward makes dX and the gate gradient, and no gradient of a weight: `spread_backward_kernel` (gate gradient,
and the weighted gradient to the rows) → `down_backward_kernel` (product, times the slope) → `plain_kernel` →
`mix_kernel` (sum). Kept for it: the slopes (P, F) and the experts' outputs (P, D). bf16 in, fp32 sums, no atomics.

How the products are made: `products`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from some_moe.experts.weights import ExpertWeights
from some_moe.fast.ops import grouped_gemm
from some_moe.fast.ops import tma_gemm as kernels
from some_moe.fast.ops.grouped_gemm import Tiles, ceil_div, choose_plan, slope_dtype
from some_moe.fast.ops.permute import most_tiles, pad_to_power, place_slots

LARGEST_TILE = 128  # rows
PIECE = 128  # columns of a token that are taken together, where they make up a row: no thread works on padding


def count_rows(num_slots: int, num_experts: int) -> int:
    """P: room for every slot, and for each expert to begin a tile, whichever plan is chosen."""
    return most_tiles(num_slots, num_experts, LARGEST_TILE) * LARGEST_TILE


def _per_token(kernel: Any, *arguments: Any, num_tokens: int, top_k: int, d: int, pieces: bool) -> None:
    """Launch one of the kernels that go over the tokens; pieces: it can take a token's row piece by piece."""
    width = PIECE if pieces and d % PIECE == 0 else pad_to_power(d)
    block = max(1, 2048 // width)
    kernel[(ceil_div(num_tokens * ceil_div(d, width), block),)](
        *arguments, num_tokens, K=top_k, D=d, BLOCK=block, BD=width
    )


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
    sizes = grouped_gemm.size_up(up, x.dtype)
    tokens: dict[str, int] = {"num_tokens": num_tokens, "top_k": top_k, "d": d}
    spread, hidden, rows = (x.new_empty(size, width) for width in (d, f, d))
    slope = x.new_empty(size, f, dtype=slope_dtype(x.dtype, f))
    _per_token(kernels.spread_kernel, x, placed.row, spread, **tokens, pieces=False)
    grouped_gemm.multiply_up(spread, up, up_bias, hidden, slope, tiles, plan, sizes)
    grouped_gemm.multiply_down(hidden, down, down_bias, rows, tiles, plan, sizes)
    y = torch.empty_like(x)
    _per_token(kernels.mix_kernel, rows, placed.row, gates, onto, y, **tokens, pieces=True)
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
    sizes = grouped_gemm.size_up(up, rows.dtype)
    tokens: dict[str, int] = {"num_tokens": num_tokens, "top_k": top_k, "d": d}
    spread, grad_pre, grad_spread = torch.empty_like(rows), rows.new_empty(slope.shape), torch.empty_like(rows)
    grad_x, grad_gates = torch.empty_like(grad_y), torch.empty_like(gates)
    _per_token(kernels.spread_backward_kernel, grad_y, row, gates, rows, spread, grad_gates, **tokens, pieces=False)
    grouped_gemm.multiply_down_backward(spread, down, slope, grad_pre, tiles, plan, sizes)
    grouped_gemm.multiply_up_backward(grad_pre, up, grad_spread, tiles, plan, sizes)
    _per_token(kernels.mix_kernel, grad_spread, row, None, None, grad_x, **tokens, pieces=True)
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
    """See `some_moe.experts`. Takes what `can_mix` admits."""
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

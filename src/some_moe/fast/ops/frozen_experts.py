"""The Triton path for frozen experts: permute, dispatch, grouped GEMMs with TMA, combine.

Forward: `permute_slots` (a row for each slot) → `dispatch_kernel` (x to those rows) → `up_gelu_kernel` (GEMM, bias,
GELU and gelu′) → `grouped_gemm_kernel` (GEMM, bias) → `combine_kernel` (each token's gated sum). Backward makes dX and
the gate gradient, and no weight gradient: `combine_backward_kernel` (gate gradient, and the gated gradient to the
rows) → `down_dgelu_kernel` (GEMM, times gelu′) → `grouped_gemm_kernel` → `combine_kernel` (sum). Saved for backward:
gelu′ (P, F), quantized, and the experts' outputs (P, D). bf16 in, float32 accumulation, no atomics.

Which GEMM kernel runs, and how: `grouped_gemm`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from some_moe.experts.weights import ExpertWeights
from some_moe.fast.ops import grouped_gemm
from some_moe.fast.ops.dispatch_combine import combine_backward_kernel, combine_kernel, dispatch_kernel
from some_moe.fast.ops.grouped_gemm import Tiles, cdiv, choose_plan, dgelu_dtype
from some_moe.fast.ops.permute import max_tiles, next_power_of_2, permute_slots

MAX_BLOCK_M = 128  # rows
BLOCK_D = 128  # where it divides D, and a kernel can split D: no thread works on padding


def max_rows(num_slots: int, num_experts: int) -> int:
    """P: an upper bound of the permuted rows with padding, whichever plan is chosen."""
    return max_tiles(num_slots, num_experts, MAX_BLOCK_M) * MAX_BLOCK_M


def launch_per_token(kernel: Any, *arguments: Any, num_tokens: int, top_k: int, d: int, split_d: bool) -> None:
    """Launch dispatch or combine over the tokens; split_d: it can take D in blocks."""
    width = BLOCK_D if split_d and d % BLOCK_D == 0 else next_power_of_2(d)
    block = max(1, 2048 // width)
    kernel[(cdiv(num_tokens * cdiv(d, width), block),)](*arguments, num_tokens, K=top_k, D=d, BLOCK=block, BD=width)


def run_forward(
    x: Tensor, experts: Tensor, gates: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor,
    residual: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y (N, D), plus the residual if given; and saved for backward: dgelu (P, F), y_rows (P, D), each slot's row
    (N, K), and the M-tiles' experts and count."""
    num_tokens, top_k = experts.shape
    num_experts, f, d = up.shape
    plan = choose_plan(x.dtype, num_tokens * top_k, num_experts, (d, f))
    m = plan.m
    permutation = permute_slots(experts, num_experts, m)
    tiles = Tiles(m, permutation.tile_expert, permutation.num_tiles, x.device)
    num_rows = max_rows(num_tokens * top_k, num_experts)
    sizes = grouped_gemm.gemm_sizes(up, x.dtype)
    tokens: dict[str, int] = {"num_tokens": num_tokens, "top_k": top_k, "d": d}
    x_rows, hidden, y_rows = (x.new_empty(num_rows, width) for width in (d, f, d))
    dgelu = x.new_empty(num_rows, f, dtype=dgelu_dtype(x.dtype, f))
    launch_per_token(dispatch_kernel, x, permutation.row, x_rows, **tokens, split_d=False)
    grouped_gemm.gemm_up_gelu(x_rows, up, up_bias, hidden, dgelu, tiles, plan, sizes)
    grouped_gemm.gemm_down(hidden, down, down_bias, y_rows, tiles, plan, sizes)
    y = torch.empty_like(x)
    launch_per_token(combine_kernel, y_rows, permutation.row, gates, residual, y, **tokens, split_d=True)
    return y, dgelu, y_rows, permutation.row, permutation.tile_expert, permutation.num_tiles


def run_backward(
    grad_y: Tensor, gates: Tensor, dgelu: Tensor, y_rows: Tensor, row: Tensor, tile_expert: Tensor, num_tiles: Tensor,
    up: Tensor, down: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x (N, D) and of the gates (N, K)."""
    num_tokens, top_k = gates.shape
    num_experts, f, d = up.shape
    plan = choose_plan(grad_y.dtype, num_tokens * top_k, num_experts, (d, f))
    m = plan.m
    tiles = Tiles(m, tile_expert, num_tiles, grad_y.device)
    sizes = grouped_gemm.gemm_sizes(up, y_rows.dtype)
    tokens: dict[str, int] = {"num_tokens": num_tokens, "top_k": top_k, "d": d}
    grad_y_rows, grad_pre = torch.empty_like(y_rows), y_rows.new_empty(dgelu.shape)
    grad_x_rows = torch.empty_like(y_rows)
    grad_x, grad_gates = torch.empty_like(grad_y), torch.empty_like(gates)
    launch_per_token(
        combine_backward_kernel, grad_y, row, gates, y_rows, grad_y_rows, grad_gates, **tokens, split_d=False
    )
    grouped_gemm.gemm_down_dgelu(grad_y_rows, down, dgelu, grad_pre, tiles, plan, sizes)
    grouped_gemm.gemm_up_backward(grad_pre, up, grad_x_rows, tiles, plan, sizes)
    launch_per_token(combine_kernel, grad_x_rows, row, None, None, grad_x, **tokens, split_d=True)
    return grad_x, grad_gates


class FrozenExperts(torch.autograd.Function):
    """Both passes without the overhead of a custom op's dispatch, which only compiled code needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Tensor, gates: Tensor, *rest: Any) -> Tensor:
        up, _, down, _, residual = rest
        y, *saved = run_forward(x, experts, gates, *rest)
        ctx.save_for_backward(gates, *saved, up, down)
        ctx.has_residual = residual is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_gates = run_backward(grads[0].contiguous(), *ctx.saved_tensors)
        return grad_x, None, grad_gates, None, None, None, None, grads[0] if ctx.has_residual else None


# --- the same as custom ops, opaque to torch.compile ---------------------------------------------------------


@torch.library.custom_op("some_moe::frozen_experts", mutates_args=())
def frozen_experts(
    x: Tensor, experts: Tensor, gates: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return run_forward(x, experts, gates, up, up_bias, down, down_bias, residual)  # type: ignore[return-value]


@frozen_experts.register_fake
def _(x: Tensor, experts: Tensor, gates: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    num_experts, f, d = up.shape
    slots = experts.shape[0] * experts.shape[1]
    num_rows = max_rows(slots, num_experts)
    row = experts.new_empty(experts.shape, dtype=torch.int32)
    most = max_tiles(slots, num_experts, choose_plan(x.dtype, slots, num_experts, (d, f)).m)
    dgelu = x.new_empty(num_rows, f, dtype=dgelu_dtype(x.dtype, f))
    return torch.empty_like(x), dgelu, x.new_empty(num_rows, d), row, row.new_empty(most), row.new_empty(())


@torch.library.custom_op("some_moe::frozen_experts_backward", mutates_args=())
def frozen_experts_backward(
    grad_y: Tensor, gates: Tensor, dgelu: Tensor, y_rows: Tensor, row: Tensor, tile_expert: Tensor, num_tiles: Tensor,
    up: Tensor, down: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return run_backward(grad_y, gates, dgelu, y_rows, row, tile_expert, num_tiles, up, down)


@frozen_experts_backward.register_fake
def _(grad_y: Tensor, gates: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(grad_y), torch.empty_like(gates)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, gates, up, _, down, _, residual = inputs
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(gates, *saved, up, down)
    ctx.has_residual = residual is not None


def _backward(ctx: Any, grad_y: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG001
    grad_x, grad_gates = frozen_experts_backward(grad_y.contiguous(), *ctx.saved_tensors)
    return grad_x, None, grad_gates, None, None, None, None, grad_y if ctx.has_residual else None


frozen_experts.register_autograd(_backward, setup_context=_save)


def can_mix(x: Tensor, weights: ExpertWeights) -> bool:
    """Whether this path applies: frozen experts with a down-projection, in the dtype of x."""
    plain = weights.is_frozen and weights.down is not None and weights.up.shape[1] == weights.down.shape[2]
    aligned = weights.up.shape[1] % 8 == 0 and weights.up.shape[2] % 8 == 0  # TMA: rows of a multiple of 16 bytes
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

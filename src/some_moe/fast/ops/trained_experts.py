"""The Triton path for experts that learn, and for gated ones: `frozen_experts` with weight gradients and SwiGLU.

Forward: as the frozen path, or for gated experts a GEMM to gate and linear half side by side (P, 2F), then one pass of
SwiGLU. Backward: the same dX and gate gradient, and `weight_gradient` for both matrices and biases: sums over all of an
expert's rows in float32, rounded once to the parameter's type. Parameters may be float32 beside x in bf16: they are
cast here, once a pass, and their gradients are never rounded to bf16.

A low-rank update or a gain is made part of its matrix first (`fold`), and gets its gradient from the matrix's.

Shapes: N tokens, K experts each, P permuted rows, D model width, F hidden width, E experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from some_moe.experts.weights import ExpertWeights
from some_moe.fast.ops import grouped_gemm
from some_moe.fast.ops.dispatch_combine import combine_backward_kernel, combine_kernel, dispatch_kernel
from some_moe.fast.ops.frozen_experts import launch_per_token, max_rows
from some_moe.fast.ops.grouped_gemm import Tiles, choose_plan, dgelu_dtype
from some_moe.fast.ops.permute import max_tiles, permute_slots
from some_moe.fast.ops.swiglu import swiglu, swiglu_backward
from some_moe.fast.ops.weight_gradient import bias_gradient, sum_tiles, weight_gradient, zero_padding

# --- both passes ----------------------------------------------------------------------------------------------


def run_forward(
    x: Tensor, experts: Tensor, gates: Tensor, stacks: Sequence[Tensor], residual: Tensor | None
) -> tuple[Tensor, ...]:
    """y (N, D), plus the residual if given. stacks: up, up_bias, down and down_bias, in the type of x.

    Saved for backward: x_rows (P, D); gelu′ (P, F), or for gated experts pre (P, 2F); hidden (P, F), of gated ones
    empty; y_rows (P, D); each slot's row (N, K); the M-tiles' experts and count; spans (2, E).
    """
    up, up_bias, down, down_bias = stacks
    num_tokens, top_k = experts.shape
    num_experts, d, f = down.shape
    gated = up.shape[1] == 2 * f
    plan = choose_plan(x.dtype, num_tokens * top_k, num_experts, (d, f))
    permutation = permute_slots(experts, num_experts, plan.m)
    tiles = Tiles(plan.m, permutation.tile_expert, permutation.num_tiles, x.device)
    num_rows = max_rows(num_tokens * top_k, num_experts)
    sizes = grouped_gemm.gemm_sizes(up, x.dtype)
    tokens: dict[str, int] = {"num_tokens": num_tokens, "top_k": top_k, "d": d}
    x_rows, hidden, y_rows = (x.new_empty(num_rows, width) for width in (d, f, d))
    zero_padding(x_rows, permutation.spans, plan.m)
    launch_per_token(dispatch_kernel, x, permutation.row, x_rows, **tokens, split_d=False)
    if gated:
        kept = x.new_empty(num_rows, 2 * f)
        grouped_gemm.gemm_rows(x_rows, up, up_bias, kept, tiles, plan.down, sizes, transposed=True)
        swiglu(kept, hidden, tiles)
    else:
        kept = x.new_empty(num_rows, f, dtype=dgelu_dtype(x.dtype, f))
        grouped_gemm.gemm_up_gelu(x_rows, up, up_bias, hidden, kept, tiles, plan, sizes)
    grouped_gemm.gemm_down(hidden, down, down_bias, y_rows, tiles, plan, sizes)
    y = torch.empty_like(x)
    launch_per_token(combine_kernel, y_rows, permutation.row, gates, residual, y, **tokens, split_d=True)
    saved = x_rows, kept, hidden.new_empty(0, f) if gated else hidden, y_rows
    return y, *saved, permutation.row, permutation.tile_expert, permutation.num_tiles, permutation.spans


def run_backward(
    grad_y: Tensor, gates: Tensor, saved: Sequence[Tensor], up: Tensor, down: Tensor, trained: str, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Gradients of x (N, D) and of the gates (N, K); then of up, up_bias, down and down_bias in dtype, those that are
    trained: "matrices", "all" or "none". What is not trained is empty."""
    x_rows, kept, hidden, y_rows, row, tile_expert, num_tiles, spans = saved
    num_tokens, top_k = gates.shape
    num_experts, d, f = down.shape
    gated = up.shape[1] == 2 * f
    plan = choose_plan(grad_y.dtype, num_tokens * top_k, num_experts, (d, f))
    tiles = Tiles(plan.m, tile_expert, num_tiles, grad_y.device)
    sizes = grouped_gemm.gemm_sizes(up, y_rows.dtype)
    tokens: dict[str, int] = {"num_tokens": num_tokens, "top_k": top_k, "d": d}
    grad_y_rows, grad_x_rows, num_rows = torch.empty_like(y_rows), torch.empty_like(y_rows), len(y_rows)
    grad_pre = y_rows.new_empty(num_rows, up.shape[1])
    grad_x, grad_gates = torch.empty_like(grad_y), torch.empty_like(gates)
    if trained != "none":
        zero_padding(grad_y_rows, spans, plan.m)
    launch_per_token(
        combine_backward_kernel, grad_y, row, gates, y_rows, grad_y_rows, grad_gates, **tokens, split_d=False
    )
    partial = grad_y.new_empty(tiles.max_tiles, f, dtype=torch.float32) if trained == "all" and not gated else None
    summed = False
    if gated:
        grad_hidden = y_rows.new_empty(num_rows, f)
        grouped_gemm.gemm_rows(
            grad_y_rows, down, None, grad_hidden, tiles, plan.up_backward, sizes, transposed=False
        )  # fmt: skip
        if trained != "none":
            hidden = torch.empty_like(grad_hidden)
        again = hidden if trained != "none" else None
        swiglu_backward(kept, grad_hidden, grad_pre, again, tiles)
    else:
        summed = grouped_gemm.gemm_down_dgelu(grad_y_rows, down, kept, grad_pre, tiles, plan, sizes, partial)
    grouped_gemm.gemm_up_backward(grad_pre, up, grad_x_rows, tiles, plan, sizes)
    launch_per_token(combine_kernel, grad_x_rows, row, None, None, grad_x, **tokens, split_d=True)
    grads = [grad_y.new_empty(0, dtype=dtype) for _ in range(4)]
    if trained != "none":
        grads[0] = weight_gradient(grad_pre, x_rows, spans, dtype)
        grads[2] = weight_gradient(grad_y_rows, hidden, spans, dtype)
    if trained == "all":
        if partial is None or not summed:
            partial = sum_tiles(grad_pre, tiles)
        grads[1] = bias_gradient(partial, spans, plan.m, dtype)
        grads[3] = bias_gradient(sum_tiles(grad_y_rows, tiles), spans, plan.m, dtype)
    return grad_x, grad_gates, *grads


# --- for autograd, in eager mode and as custom ops, opaque to torch.compile -----------------------------------


class TrainedExperts(torch.autograd.Function):
    """Both passes without the overhead of a custom op's dispatch, which only compiled code needs."""

    @staticmethod
    def forward(ctx: Any, trained: str, x: Tensor, experts: Tensor, gates: Tensor, *rest: Any) -> Tensor:
        *stacks, residual = rest
        casts = [stack.to(x.dtype) for stack in stacks]
        y, *saved = run_forward(x, experts, gates, casts, residual)
        ctx.save_for_backward(gates, *saved, casts[0], casts[2])
        ctx.has_residual, ctx.trained, ctx.dtype = residual is not None, trained, stacks[0].dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_y = grads[0].contiguous()
        gates, *saved, up, down = ctx.saved_tensors
        grad_x, grad_gates, *found = run_backward(grad_y, gates, saved, up, down, ctx.trained, ctx.dtype)
        return None, grad_x, None, grad_gates, *pick(found, ctx.trained), grads[0] if ctx.has_residual else None


def pick(grads: list[Tensor], trained: str) -> list[Tensor | None]:
    """The gradients of what is trained, None for the others."""
    return [
        grad if trained == "all" or (trained == "matrices" and i % 2 == 0) else None for i, grad in enumerate(grads)
    ]


@torch.library.custom_op("some_moe::trained_experts", mutates_args=())
def trained_experts(
    trained: str,  # noqa: ARG001 - for the formula of the gradients
    x: Tensor, experts: Tensor, gates: Tensor, up: Tensor, up_bias: Tensor, down: Tensor,
    down_bias: Tensor, residual: Tensor | None,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """As `run_forward`; and the casts of up and down, or nothing where they are of the type of x already."""
    stacks = up, up_bias, down, down_bias
    casts = [stack.to(x.dtype) for stack in stacks]
    kept = [cast if cast is not stack else cast.new_empty(0) for cast, stack in zip(casts, stacks, strict=True)]
    return *run_forward(x, experts, gates, casts, residual), kept[0], kept[2]  # type: ignore[return-value]


@trained_experts.register_fake
def _(trained: str, x: Tensor, experts: Tensor, gates: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    down = rest[1]
    num_experts, d, f = down.shape
    slots = experts.shape[0] * experts.shape[1]
    num_rows = max_rows(slots, num_experts)
    row = experts.new_empty(experts.shape, dtype=torch.int32)
    most = max_tiles(slots, num_experts, choose_plan(x.dtype, slots, num_experts, (d, f)).m)
    gated = up.shape[1] == 2 * f
    kept = x.new_empty(num_rows, 2 * f if gated else f, dtype=x.dtype if gated else dgelu_dtype(x.dtype, f))
    hidden = x.new_empty(0 if gated else num_rows, f)
    rows = x.new_empty(num_rows, d), kept, hidden, x.new_empty(num_rows, d)
    table = row, row.new_empty(most), row.new_empty(()), row.new_empty(2, num_experts)
    casts = (x.new_empty(stack.shape if stack.dtype != x.dtype else (0,)) for stack in (up, down))
    return torch.empty_like(x), *rows, *table, *casts


@torch.library.custom_op("some_moe::trained_experts_backward", mutates_args=())
def trained_experts_backward(
    grad_y: Tensor, gates: Tensor, saved: list[Tensor], up: Tensor, down: Tensor, trained: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return run_backward(grad_y, gates, saved, up, down, trained, dtype)  # type: ignore[return-value]


@trained_experts_backward.register_fake
def _(
    grad_y: Tensor, gates: Tensor, saved: list[Tensor], up: Tensor, down: Tensor, trained: str, dtype: torch.dtype  # noqa: ARG001
) -> tuple[Tensor, ...]:  # fmt: skip
    def make(*shape: int, made: bool) -> Tensor:
        return grad_y.new_empty(shape if made else (0,), dtype=dtype)

    matrices, biases = trained != "none", trained == "all"
    grads = make(*up.shape, made=matrices), make(*up.shape[:2], made=biases)
    more = make(*down.shape, made=matrices), make(*down.shape[:2], made=biases)
    return torch.empty_like(grad_y), torch.empty_like(gates), *grads, *more


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    trained, _, _, gates, up, _, down, _, residual = inputs
    _, *saved, up_cast, down_cast = output
    ctx.mark_non_differentiable(*output[1:])
    casts = (cast if cast.numel() else stack for cast, stack in ((up_cast, up), (down_cast, down)))
    ctx.save_for_backward(gates, *saved, *casts)
    ctx.has_residual, ctx.trained, ctx.dtype = residual is not None, trained, up.dtype


def _backward(ctx: Any, grad_y: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG001
    gates, *saved, up, down = ctx.saved_tensors
    grad_x, grad_gates, *found = trained_experts_backward(
        grad_y.contiguous(), gates, saved, up, down, ctx.trained, ctx.dtype
    )
    return None, grad_x, None, grad_gates, *pick(found, ctx.trained), grad_y if ctx.has_residual else None


trained_experts.register_autograd(_backward, setup_context=_save)


# --- who may come here -----------------------------------------------------------------------------------------


def can_mix(x: Tensor, weights: ExpertWeights) -> bool:
    """Whether this path applies: experts with a down-projection, of widths that TMA takes. Frozen stacks of another
    type are left to those that cast one expert at a time."""
    if weights.down is None or (weights.is_frozen and weights.up.dtype != x.dtype):
        return False
    aligned = all(size % 8 == 0 for size in weights.down.shape[1:])  # rows of a multiple of 16 bytes
    return aligned and x.dtype in (torch.bfloat16, torch.float32)


def fold(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """Low-rank updates and gains become part of the matrices, in dtype."""
    if weights.lora is not None:
        lora, down = weights.lora.to(dtype), weights.down
        assert down is not None
        up = torch.baddbmm(weights.up.to(dtype), lora.up_out, lora.up_in)
        down = torch.baddbmm(down.to(dtype), lora.down_out, lora.down_in)
        weights = replace(weights, up=up, down=down, lora=None)
    if weights.gain is not None:
        assert weights.down is not None
        weights = replace(weights, down=weights.down * weights.gain.to(weights.down.dtype)[:, None], gain=None)
    return weights


def mix_experts(
    x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights, onto: Tensor | None = None
) -> Tensor:
    """See `some_moe.experts`. Takes what `can_mix` admits."""
    if onto is not None and onto.dtype != x.dtype:
        return onto + mix_experts(x, experts, gates, weights)
    weights = fold(weights, x.dtype)
    assert weights.down is not None
    assert weights.down_bias is not None
    trained = "all" if weights.up_bias.requires_grad else "matrices" if has_gradient(weights) else "none"
    stacks = weights.up, weights.up_bias, weights.down, weights.down_bias
    inputs = x.contiguous(), experts.contiguous(), gates.contiguous(), *(stack.contiguous() for stack in stacks)
    if onto is not None:
        onto = onto.contiguous()
    if torch.compiler.is_compiling():
        compiled: Tensor = trained_experts(trained, *inputs, onto)[0]
        return compiled
    y: Tensor = TrainedExperts.apply(trained, *inputs, onto)  # type: ignore[no-untyped-call]
    return y


def has_gradient(weights: ExpertWeights) -> bool:
    """Whether a matrix wants a gradient."""
    return weights.up.requires_grad or (weights.down is not None and weights.down.requires_grad)

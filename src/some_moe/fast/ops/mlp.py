"""A trained MLP d → hidden → d with GELU fused into the GEMMs beside it: the frozen experts' kernels, with one expert.

So GELU costs no pass of its own either way. Saved for backward: gelu′, quantized to uint8, instead of the
pre-activations.
Shapes: N rows, D width, F hidden width, P = N rounded up to whole tiles.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from some_moe.fast.ops import grouped_gemm
from some_moe.fast.ops.column_sum import sum_columns, sum_rows
from some_moe.fast.ops.opaque import opaque

MIN_ROWS = 1024  # eight M-tiles: fewer would leave most SMs idle with any GEMM


def can_run(x: Tensor, up: Tensor) -> bool:
    """Whether rows are enough, and whether TMA takes them: in multiples of 16 bytes."""
    return x.shape[:-1].numel() >= MIN_ROWS and up.shape[0] % 16 == 0 and up.shape[1] % 8 == 0


def _tiles(x: Tensor) -> tuple[grouped_gemm.Tiles, grouped_gemm.Plan]:
    plan = grouped_gemm.choose_plan(x.dtype, len(x), 1)
    return grouped_gemm.Tiles(plan.m, None, grouped_gemm.cdiv(len(x), plan.m), x.device), plan


@opaque("some_moe::gemm_gelu")
def gemm_gelu(x: Tensor, up: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """GELU (N, F) of x (N, D) @ upᵀ + bias, in bf16, and gelu′ (P, F) in uint8."""
    tiles, plan = _tiles(x)
    hidden = x.new_empty(len(x), len(up))
    dgelu = x.new_empty(tiles.max_tiles * tiles.m, len(up), dtype=torch.uint8)
    grouped_gemm.gemm_up_gelu(
        x.contiguous(), up.contiguous(), bias, hidden, dgelu, tiles, plan, grouped_gemm.gemm_sizes(up, x.dtype)
    )
    return hidden, dgelu


@gemm_gelu.register_fake
def _(x: Tensor, up: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    tile = grouped_gemm.choose_plan(x.dtype, x.shape[0], 1).m
    rows = grouped_gemm.cdiv(x.shape[0], tile) * tile
    return x.new_empty(x.shape[0], up.shape[0]), x.new_empty(rows, up.shape[0], dtype=torch.uint8)


@opaque("some_moe::gemm_dgelu")
def gemm_dgelu(grad: Tensor, down: Tensor, dgelu: Tensor) -> tuple[Tensor, Tensor]:
    """grad_pre (N, F) = (grad (N, D) @ down (D, F)) · gelu′: the gradient of the pre-activations; and dbias (F,), its
    column sums, in float32."""
    tiles, plan = _tiles(grad)
    grad_pre = grad.new_empty(len(grad), down.shape[1])
    partial = grad.new_empty(tiles.max_tiles, down.shape[1], dtype=torch.float32)
    sizes = grouped_gemm.gemm_sizes(down.T, grad.dtype)
    grad, down = grad.contiguous(), down.contiguous()
    if grouped_gemm.gemm_down_dgelu(grad, down, dgelu, grad_pre, tiles, plan, sizes, partial):
        return grad_pre, sum_rows(partial)
    return grad_pre, grad_pre.sum(0, dtype=torch.float32)


@gemm_dgelu.register_fake
def _(grad: Tensor, down: Tensor, dgelu: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    width = down.shape[1]
    return grad.new_empty(grad.shape[0], width), grad.new_empty(width, dtype=torch.float32)


class GeluMlp(torch.autograd.Function):
    """gelu(x @ upᵀ + up_bias) @ downᵀ + down_bias, all in bf16. The biases are detached casts; their gradients, in
    float32, go to up_bias_param and down_bias_param."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, up_bias_param: Tensor,
        down_bias_param: Tensor,
    ) -> Tensor:  # fmt: skip
        hidden, dgelu = gemm_gelu(x, up, up_bias)
        ctx.save_for_backward(x, hidden, dgelu, up, down)
        ctx.dtypes = up_bias_param.dtype, down_bias_param.dtype
        return F.linear(hidden, down, down_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, dgelu, up, down = ctx.saved_tensors
        grad = grads[0]
        grad_pre, dbias = gemm_dgelu(grad, down, dgelu)
        up_dbias, down_dbias = dbias.to(ctx.dtypes[0]), sum_columns(grad).to(ctx.dtypes[1])
        return grad_pre @ up, grad_pre.T @ x, None, grad.T @ hidden, None, up_dbias, down_dbias

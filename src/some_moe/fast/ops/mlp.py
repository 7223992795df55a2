"""A trained network d → hidden → d with GELU on a GPU: the products beside GELU are those of the frozen experts.

So GELU costs no pass of its own either way. Forward keeps its slopes, in bytes, instead of the product's sums.
Shapes: N rows, D width, F hidden width, P = N rounded up to whole tiles.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.fast.ops import grouped_gemm
from some_moe.fast.ops.column_sum import sum_rows
from some_moe.fast.ops.linear import cut_bias

FEWEST_ROWS = 1024  # eight tiles: fewer would leave most of a GPU idle, whoever multiplies


def can_run(x: Tensor, up: Tensor) -> bool:
    """Whether rows are enough, and whether the copy engine takes them: in multiples of 16 bytes."""
    return x.shape[:-1].numel() >= FEWEST_ROWS and up.shape[0] % 16 == 0 and up.shape[1] % 8 == 0


def _tiles(x: Tensor) -> tuple[grouped_gemm.Tiles, grouped_gemm.Plan]:
    plan = grouped_gemm.choose_plan(x.dtype, len(x), 1)
    return grouped_gemm.Tiles(plan.m, None, grouped_gemm.ceil_div(len(x), plan.m), x.device), plan


@torch.library.custom_op("some_moe::gelu_product", mutates_args=())
def gelu_product(x: Tensor, up: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """GELU (N, F) of x (N, D) @ upᵀ + bias, and its slopes (P, F), all in bf16 but the slopes."""
    tiles, plan = _tiles(x)
    hidden = x.new_empty(len(x), len(up))
    slope = x.new_empty(tiles.most * tiles.m, len(up), dtype=torch.uint8)
    grouped_gemm.multiply_up(
        x.contiguous(), up.contiguous(), bias, hidden, slope, tiles, plan, grouped_gemm.size_up(up, x.dtype)
    )
    return hidden, slope


@gelu_product.register_fake
def _(x: Tensor, up: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    tile = grouped_gemm.choose_plan(x.dtype, x.shape[0], 1).m
    rows = grouped_gemm.ceil_div(x.shape[0], tile) * tile
    return x.new_empty(x.shape[0], up.shape[0]), x.new_empty(rows, up.shape[0], dtype=torch.uint8)


@torch.library.custom_op("some_moe::gelu_product_backward", mutates_args=())
def gelu_product_backward(grad: Tensor, down: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (N, F) of what GELU was taken of, from grad (N, D) of its product with downᵀ, down (D, F); and the
    sum (F,) of its rows, in float32."""
    tiles, plan = _tiles(grad)
    grad_pre = grad.new_empty(len(grad), down.shape[1])
    table = grad.new_empty(tiles.most, down.shape[1], dtype=torch.float32)
    sizes = grouped_gemm.size_up(down.T, grad.dtype)
    grad, down = grad.contiguous(), down.contiguous()
    if grouped_gemm.multiply_down_backward(grad, down, slope, grad_pre, tiles, plan, sizes, table):
        return grad_pre, sum_rows(table)
    return grad_pre, grad_pre.sum(0, dtype=torch.float32)


@gelu_product_backward.register_fake
def _(grad: Tensor, down: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    width = down.shape[1]
    return grad.new_empty(grad.shape[0], width), grad.new_empty(width, dtype=torch.float32)


class Network(torch.autograd.Function):
    """gelu(x @ upᵀ + up_bias) @ downᵀ + down_bias, all in bf16. Autograd learns of the biases by up_own and down_own;
    their gradients are added up in float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, up_own: Tensor,
        down_own: Tensor,
    ) -> Tensor:  # fmt: skip
        hidden, slope = gelu_product(x, up, up_bias)
        ctx.save_for_backward(x, hidden, slope, up, down)
        ctx.dtypes = up_own.dtype, down_own.dtype
        return F.linear(hidden, down, down_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, slope, up, down = ctx.saved_tensors
        grad = grads[0]
        grad_pre, sums = gelu_product_backward(grad, down, slope)
        up_own, down_own = sums.to(ctx.dtypes[0]), grad.sum(0, dtype=torch.float32).to(ctx.dtypes[1])
        return grad_pre @ up, grad_pre.T @ x, None, grad.T @ hidden, None, up_own, down_own


def run(x: Tensor, expand: nn.Linear, project: nn.Linear) -> Tensor:
    """The network of x (…, D), in bf16 whatever x and the weights come in."""
    given = x.reshape(-1, x.shape[-1]), *cut_bias(expand), *cut_bias(project)
    y: Tensor = Network.apply(*(part.to(torch.bfloat16) for part in given), expand.bias, project.bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1])

"""LayerNorm beside a residual stream on a GPU: the sum, the norm and their gradients in one kernel each way.

Shapes: N rows (tokens) of width D. Sums and statistics are in float32, whatever the rows are in.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from some_moe.kernels.columns import sum_rows

PROGRAMS = 512  # of the backward kernel at most: each adds up the gradients of weight and bias over its own rows


@triton.jit
def norm_kernel(
    x, addend, weight, bias, total, y, mean, scale, num_rows, eps, D: tl.constexpr, BLOCK: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """y = LayerNorm(total), total = x + addend; without an addend total is x, and is not stored."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BD)
    exists = row < num_rows
    keep = exists[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    value = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    if addend is not None:
        added = (value + tl.load(addend + at, mask=keep, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, added, mask=keep)
        value = added.to(tl.float32)
    middle = tl.sum(value, 1) / D
    value = tl.where(keep, value - middle[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
    w = tl.load(weight + column, mask=column < D, other=0.0)
    b = tl.load(bias + column, mask=column < D, other=0.0)
    out = value * factor[:, None] * w[None, :] + b[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=keep)
    tl.store(mean + row, middle, mask=exists)
    tl.store(scale + row, factor, mask=exists)


@triton.jit
def norm_backward_kernel(
    grad_total, grad_y, grad_again, total, mean, scale, weight, grad_x, partial, num_rows, per_program, D: tl.constexpr,
    BLOCK: tl.constexpr, BD: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """grad_x = grad_total + the norm's share; partial (programs, 2·D): this program's gradients of weight and bias.

    SUMS: 3·D, the last D being the sums of grad_x before it is rounded.
    """
    column = tl.arange(0, BD)
    w = tl.load(weight + column, mask=column < D, other=0.0)
    grad_weight = tl.zeros((BLOCK, BD), dtype=tl.float32)
    grad_bias = tl.zeros((BLOCK, BD), dtype=tl.float32)
    sums = tl.zeros((BLOCK, BD), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * per_program
    for start in range(0, per_program, BLOCK):
        row = first + start + tl.arange(0, BLOCK)
        exists = row < num_rows
        keep = exists[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        grad = tl.load(grad_y + at, mask=keep, other=0.0).to(tl.float32)
        if grad_again is not None:
            grad += tl.load(grad_again + at, mask=keep, other=0.0).to(tl.float32)
        value = tl.load(total + at, mask=keep, other=0.0).to(tl.float32)
        beside = tl.load(grad_total + at, mask=keep, other=0.0).to(tl.float32)
        middle = tl.load(mean + row, mask=exists, other=0.0)[:, None]
        factor = tl.load(scale + row, mask=exists, other=0.0)[:, None]
        unit = tl.where(keep, (value - middle) * factor, 0.0)
        grad_weight += grad * unit
        grad_bias += grad
        grad *= w[None, :]
        along = tl.sum(grad * unit, 1)[:, None] / D
        level = tl.sum(grad, 1)[:, None] / D
        out = beside + factor * (grad - level - unit * along)
        tl.store(grad_x + at, out.to(grad_x.dtype.element_ty), mask=keep)
        if SUMS:
            sums += out
    here = partial + tl.program_id(0) * (2 + SUMS) * D + column
    tl.store(here, tl.sum(grad_weight, 0), mask=column < D)
    tl.store(here + D, tl.sum(grad_bias, 0), mask=column < D)
    if SUMS:
        tl.store(here + 2 * D, tl.sum(sums, 0), mask=column < D)


def _blocks(d: int) -> tuple[int, int]:
    """(rows a program takes at a time, padded width)."""
    padded = triton.next_power_of_2(d)
    return max(1, 2048 // padded), padded


def _run_norm(
    x: Tensor, addend: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    d = x.shape[-1]
    x, addend = x.contiguous(), None if addend is None else addend.contiguous()
    y, total = torch.empty_like(x), None if addend is None else torch.empty_like(x)
    mean = torch.empty(x.numel() // d, dtype=torch.float32, device=x.device)
    scale = torch.empty_like(mean)
    block, padded = _blocks(d)
    norm_kernel[(triton.cdiv(len(mean), block),)](
        x, addend, weight, bias, total, y, mean, scale, len(mean), eps, D=d, BLOCK=block, BD=padded
    )
    return total, y, mean, scale


@torch.library.custom_op("some_moe::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm of x (…, D), in its type; and each row's mean and the factor that it was scaled by."""
    _, y, mean, scale = _run_norm(x, None, weight, bias, eps)
    return y, mean, scale


@norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    mean = weight.new_empty(x.numel() // x.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), mean, torch.empty_like(mean)


@torch.library.custom_op("some_moe::add_norm", mutates_args=())
def add_norm(
    x: Tensor, addend: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + addend, and `norm` of it."""
    total, y, mean, scale = _run_norm(x, addend, weight, bias, eps)
    assert total is not None
    return total, y, mean, scale


@add_norm.register_fake
def _(
    x: Tensor,
    addend: Tensor,  # noqa: ARG001
    weight: Tensor,
    bias: Tensor,  # noqa: ARG001
    eps: float,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, mean = torch.empty_like(x, memory_format=torch.contiguous_format), weight.new_empty(x.numel() // x.shape[-1])
    return total, torch.empty_like(total), mean, torch.empty_like(mean)


@torch.library.custom_op("some_moe::norm_backward", mutates_args=())
def norm_backward(
    grad_total: Tensor, grad_y: Tensor, grad_again: Tensor | None, total: Tensor, mean: Tensor, scale: Tensor,
    weight: Tensor, with_sums: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of total (grad_total included), and those of the weight and the bias, one after the other (2·D).

    grad_again: of y in its second use, where it has one. with_sums: behind these two, the sums of the first (3·D).
    """
    d = total.shape[-1]
    block, padded = _blocks(d)
    per_program = triton.cdiv(triton.cdiv(len(mean), PROGRAMS), block) * block
    programs = triton.cdiv(len(mean), per_program)
    grad_x = torch.empty_like(total)
    partial = torch.empty(programs, (2 + with_sums) * d, dtype=torch.float32, device=total.device)
    norm_backward_kernel[(programs,)](
        grad_total.contiguous(), grad_y.contiguous(), None if grad_again is None else grad_again.contiguous(), total,
        mean, scale, weight, grad_x, partial, len(mean), per_program, D=d, BLOCK=block, BD=padded,
        SUMS=with_sums,
    )  # fmt: skip
    return grad_x, sum_rows(partial)


@norm_backward.register_fake
def _(
    grad_total: Tensor,  # noqa: ARG001
    grad_y: Tensor,  # noqa: ARG001
    grad_again: Tensor | None,  # noqa: ARG001
    total: Tensor,
    mean: Tensor,  # noqa: ARG001
    scale: Tensor,  # noqa: ARG001
    weight: Tensor,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total), weight.new_empty((2 + with_sums) * len(weight))


class NormBeside(torch.autograd.Function):
    """x and its norm. One node of autograd for both uses of x, so that their gradients are summed on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        y, mean, scale = norm(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, scale, weight)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, of_norm = norm_backward(*grads, None, *ctx.saved_tensors, False)
        return grad_x, *of_norm.chunk(2), None


class AddNorm(torch.autograd.Function):
    """x + addend, and its norm twice, for two readers: their gradients are summed on the way.

    addend_bias (D,): one that is part of the addend (…, D) already, and cut off from it for autograd. Backward it gets
    its gradient from the kernel that makes that of the addend, which nobody then has to read and sum.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, addend: Tensor, weight: Tensor, bias: Tensor, eps: float, addend_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        total, y, mean, scale = add_norm(x, addend, weight, bias, eps)
        ctx.save_for_backward(total, mean, scale, weight)
        ctx.addend_bias_dtype = None if addend_bias is None else addend_bias.dtype
        return total, y, y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.addend_bias_dtype is None:
            grad_x, of_norm = norm_backward(*grads, *ctx.saved_tensors, False)
            return grad_x, grad_x, *of_norm.chunk(2), None, None
        grad_x, of_norm = norm_backward(*grads, *ctx.saved_tensors, True)
        grad_weight, grad_bias, sums = of_norm.chunk(3)
        return grad_x, grad_x, grad_weight, grad_bias, None, sums.to(ctx.addend_bias_dtype)

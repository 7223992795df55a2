"""Fused residual add and LayerNorm: the sum, the norm and their gradients in one kernel each way.

Rows are held in parts, tuples of blocks that are narrower than a row and together hardly wider: a block's width is a
power of two. Statistics are in float32, whatever the dtype of the rows.

Shapes: N rows (tokens) of width D.
"""
# mypy: disable-error-code=assignment
# (The tuples grow, part by part.)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from some_moe.fast.ops.column_sum import sum_rows
from some_moe.fast.ops.opaque import opaque

PROGRAMS = 528  # of the backward kernel at most: each has partial sums of the gradients of weight and bias
STAGES = 3  # of its software pipeline: with three, the next rows are in flight while these are worked on


@triton.jit
def load_parts(rows, row, num_rows, D: tl.constexpr, WIDTH: tl.constexpr):
    """These rows of `rows` (num_rows, D) in float32: a tuple of parts, each (BLOCK, WIDTH)."""
    parts = ()
    for first in tl.static_range(0, D, WIDTH):
        column = first + tl.arange(0, WIDTH)
        mask = (row < num_rows)[:, None] & (column < D)[None, :]
        part = tl.load(rows + row[:, None] * D + column[None, :], mask=mask, other=0.0)
        parts += (part.to(tl.float32),)
    return parts


@triton.jit
def load_vector(vector, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """A vector (D,), broadcast to all rows: a tuple of parts, each (BLOCK, WIDTH), in the layout of the rows."""
    parts = ()
    for first in tl.static_range(0, D, WIDTH):
        column = first + tl.arange(0, WIDTH)[None, :] + tl.zeros((BLOCK, 1), dtype=tl.int32)
        parts += (tl.load(vector + column, mask=column < D, other=0.0),)
    return parts


@triton.jit
def add_each(a, b, c, more_a, more_b, more_c):
    """The combine function of a reduction over three tensors."""
    return a + more_a, b + more_b, c + more_c


@triton.jit
def store_part(rows, row, num_rows, part, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Columns first to first + WIDTH of these rows."""
    column = first + tl.arange(0, WIDTH)
    mask = (row < num_rows)[:, None] & (column < D)[None, :]
    tl.store(rows + row[:, None] * D + column[None, :], part.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_kernel(
    x, x2, weight, bias, residual, y, mean, rstd, num_rows, eps, D: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """y = LayerNorm(residual), residual = x + x2; without x2 the residual is x, and is not stored."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # All loads come before the stores, so that their latencies overlap.
    values = load_parts(x, row, num_rows, D, WIDTH)
    if x2 is not None:
        x2_parts = load_parts(x2, row, num_rows, D, WIDTH)
    w, b = load_vector(weight, D, BLOCK, WIDTH), load_vector(bias, D, BLOCK, WIDTH)
    if x2 is not None:
        rounded_parts = ()
        for part in tl.static_range(len(values)):
            # As it is stored: rounded.
            rounded = (values[part] + x2_parts[part]).to(residual.dtype.element_ty)
            store_part(residual, row, num_rows, rounded, part * WIDTH, D, WIDTH)
            rounded_parts += (rounded.to(tl.float32),)
        values = rounded_parts
    row_sum = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    for part in tl.static_range(len(values)):
        row_sum += values[part]
    row_mean = tl.sum(row_sum, 1) / D
    square = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    for part in tl.static_range(len(values)):
        column = part * WIDTH + tl.arange(0, WIDTH)
        centered = tl.where((column < D)[None, :], values[part] - row_mean[:, None], 0.0)
        square += centered * centered
    row_rstd = tl.rsqrt(tl.sum(square, 1) / D + eps)
    for part in tl.static_range(len(values)):
        out = (values[part] - row_mean[:, None]) * row_rstd[:, None] * w[part] + b[part]
        store_part(y, row, num_rows, out, part * WIDTH, D, WIDTH)
    tl.store(mean + row, row_mean, mask=row < num_rows)
    tl.store(rstd + row, row_rstd, mask=row < num_rows)


@triton.jit
def layer_norm_backward_kernel(
    grad_residual, grad_y, grad_y2, residual, mean, rstd, weight, grad_x, partial, num_rows, per_program,
    D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WITH_DBIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad_x = grad_residual + the norm's dx; partial (programs, 2·D): this program's gradients of weight and bias.

    WITH_DBIAS: 3·D, the last D being the column sums of grad_x before rounding.
    """
    w = load_vector(weight, D, BLOCK, WIDTH)
    grad_weight = ()
    for _ in tl.static_range(0, D, WIDTH):
        grad_weight += (tl.zeros((BLOCK, WIDTH), dtype=tl.float32),)
    grad_bias, dbias = grad_weight, grad_weight
    first = tl.program_id(0).to(tl.int64) * per_program
    for start in tl.range(0, per_program, BLOCK, num_stages=STAGES):
        row = first + start + tl.arange(0, BLOCK)
        exists = row < num_rows
        grads = load_parts(grad_y, row, num_rows, D, WIDTH)
        if grad_y2 is not None:
            grads_2 = load_parts(grad_y2, row, num_rows, D, WIDTH)
        values = load_parts(residual, row, num_rows, D, WIDTH)
        residual_grads = load_parts(grad_residual, row, num_rows, D, WIDTH)
        row_mean = tl.load(mean + row, mask=exists, other=0.0)[:, None]
        row_rstd = tl.load(rstd + row, mask=exists, other=0.0)[:, None]
        dot = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
        row_sum = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
        x_hats, wdys, new_weight, new_bias, new_dbias = (), (), (), (), ()
        for part in tl.static_range(len(w)):
            grad = grads[part] + grads_2[part] if grad_y2 is not None else grads[part]
            # Beyond D this is padding, but grad and w are 0 there.
            x_hat = (values[part] - row_mean) * row_rstd
            wdy = grad * w[part]
            dot += wdy * x_hat
            row_sum += wdy
            new_weight += (grad_weight[part] + grad * x_hat,)
            new_bias += (grad_bias[part] + grad,)
            x_hats += (x_hat,)
            wdys += (wdy,)
        dot, row_sum = (tl.sum(dot, 1) / D)[:, None], (tl.sum(row_sum, 1) / D)[:, None]
        for part in tl.static_range(len(w)):
            out = residual_grads[part] + row_rstd * (wdys[part] - row_sum - x_hats[part] * dot)
            store_part(grad_x, row, num_rows, out, part * WIDTH, D, WIDTH)
            new_dbias += (dbias[part] + out if WITH_DBIAS else dbias[part],)
        grad_weight, grad_bias, dbias = new_weight, new_bias, new_dbias
    for part in tl.static_range(len(w)):
        column = part * WIDTH + tl.arange(0, WIDTH)
        here = partial + tl.program_id(0) * (2 + WITH_DBIAS) * D + column
        # One reduction for all three: warps synchronize as often as for one.
        weight_sum, bias_sum, dbias_sum = tl.reduce((grad_weight[part], grad_bias[part], dbias[part]), 0, add_each)
        tl.store(here, weight_sum, mask=column < D)
        tl.store(here + D, bias_sum, mask=column < D)
        if WITH_DBIAS:
            tl.store(here + 2 * D, dbias_sum, mask=column < D)


def _blocks(d: int) -> tuple[int, int, int]:
    """(rows a program takes at a time, width of a part, warps): of each part a thread has four elements.

    Parts are quarters of the padded width, and the last is left out where it would be all padding. Up to a width of 512
    a warp has whole rows, and reduces them without cross-warp synchronization.
    """
    padded = max(32, triton.next_power_of_2(d))
    return max(1, 2048 // padded), padded // 4, max(4, padded // 512)


def _backward_blocks(d: int) -> tuple[int, int, int]:
    """The same for the backward kernel: one warp up to a width of 1,024, which then waits for memory alone."""
    padded = max(32, triton.next_power_of_2(d))
    return max(1, 1024 // padded), padded // 4, max(1, padded // 1024)


def _run_layer_norm(
    x: Tensor, x2: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    d = x.shape[-1]
    x, x2 = x.contiguous(), None if x2 is None else x2.contiguous()
    y, residual = torch.empty_like(x), None if x2 is None else torch.empty_like(x)
    mean = torch.empty(x.numel() // d, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    block, width, num_warps = _blocks(d)
    layer_norm_kernel[(triton.cdiv(len(mean), block),)](
        x, x2, weight, bias, residual, y, mean, rstd, len(mean), eps, D=d, BLOCK=block, WIDTH=width,
        num_warps=num_warps,
    )  # fmt: skip
    return residual, y, mean, rstd


@opaque("some_moe::layer_norm")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm of x (…, D), in its dtype; and each row's mean and rstd."""
    _, y, mean, rstd = _run_layer_norm(x, None, weight, bias, eps)
    return y, mean, rstd


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    mean = weight.new_empty(x.numel() // x.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format), mean, torch.empty_like(mean)


@opaque("some_moe::add_layer_norm")
def add_layer_norm(
    x: Tensor, x2: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """residual = x + x2, and `layer_norm` of it."""
    residual, y, mean, rstd = _run_layer_norm(x, x2, weight, bias, eps)
    assert residual is not None
    return residual, y, mean, rstd


@add_layer_norm.register_fake
def _(
    x: Tensor,
    x2: Tensor,  # noqa: ARG001
    weight: Tensor,
    bias: Tensor,  # noqa: ARG001
    eps: float,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    residual = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean = weight.new_empty(x.numel() // x.shape[-1])
    return residual, torch.empty_like(residual), mean, torch.empty_like(mean)


@opaque("some_moe::layer_norm_backward")
def layer_norm_backward(
    grad_residual: Tensor, grad_y: Tensor, grad_y2: Tensor | None, residual: Tensor, mean: Tensor, rstd: Tensor,
    weight: Tensor, with_dbias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the residual (grad_residual included), and those of weight and bias, one after the other (2·D).

    grad_y2: of y in its second use, where it has one. with_dbias: behind these two, the first's column sums (3·D).
    """
    d = residual.shape[-1]
    block, width, num_warps = _backward_blocks(d)
    per_program = max(1, triton.cdiv(triton.cdiv(len(mean), PROGRAMS), block)) * block
    programs = triton.cdiv(len(mean), per_program)
    grad_x = torch.empty_like(residual)
    partial = torch.empty(programs, (2 + with_dbias) * d, dtype=torch.float32, device=residual.device)
    layer_norm_backward_kernel[(programs,)](
        grad_residual.contiguous(), grad_y.contiguous(), None if grad_y2 is None else grad_y2.contiguous(), residual,
        mean, rstd, weight, grad_x, partial, len(mean), per_program, D=d, BLOCK=block, WIDTH=width,
        WITH_DBIAS=with_dbias, STAGES=STAGES, num_warps=num_warps,
    )  # fmt: skip
    return grad_x, sum_rows(partial)


@layer_norm_backward.register_fake
def _(
    grad_residual: Tensor,  # noqa: ARG001
    grad_y: Tensor,  # noqa: ARG001
    grad_y2: Tensor | None,  # noqa: ARG001
    residual: Tensor,
    mean: Tensor,  # noqa: ARG001
    rstd: Tensor,  # noqa: ARG001
    weight: Tensor,
    with_dbias: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), weight.new_empty((2 + with_dbias) * len(weight))


class ResidualNorm(torch.autograd.Function):
    """Residual and normed: x and its LayerNorm as one autograd node, so that the kernel sums their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        y, mean, rstd = layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_params = layer_norm_backward(*grads, None, *ctx.saved_tensors, False)
        return grad_x, *grad_params.chunk(2), None


class AddNorm(torch.autograd.Function):
    """residual = x + x2, and its LayerNorm twice, for two uses whose gradients then stay apart and are summed in the
    kernel.

    x2_bias (D,): the detached bias of the linear layer that made x2 (…, D); its dbias is fused into the dx kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, x2: Tensor, weight: Tensor, bias: Tensor, eps: float, x2_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        residual, y, mean, rstd = add_layer_norm(x, x2, weight, bias, eps)
        ctx.save_for_backward(residual, mean, rstd, weight)
        ctx.x2_bias_dtype = None if x2_bias is None else x2_bias.dtype
        return residual, y, y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.x2_bias_dtype is None:
            grad_x, grad_params = layer_norm_backward(*grads, *ctx.saved_tensors, False)
            return grad_x, grad_x, *grad_params.chunk(2), None, None
        grad_x, grad_params = layer_norm_backward(*grads, *ctx.saved_tensors, True)
        grad_weight, grad_bias, dbias = grad_params.chunk(3)
        return grad_x, grad_x, grad_weight, grad_bias, None, dbias.to(ctx.x2_bias_dtype)

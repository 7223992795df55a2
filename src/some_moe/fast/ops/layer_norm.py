"""LayerNorm beside a residual stream on a GPU: the sum, the norm and their gradients in one kernel each way.

Rows are held in parts, tuples of blocks that are narrower than a row and together hardly wider: a block's width is a
power of two. Sums and statistics are in float32, whatever the rows are in.

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

PROGRAMS = 528  # of the backward kernel at most: each adds up the gradients of weight and bias over its own rows
STAGES = 3  # of its loop: with three, the next rows are on their way while these are worked on


@triton.jit
def load_parts(rows, row, num_rows, D: tl.constexpr, WIDTH: tl.constexpr):
    """These rows of `rows` (num_rows, D) in float32: a tuple of parts, each (BLOCK, WIDTH)."""
    parts = ()
    for first in tl.static_range(0, D, WIDTH):
        column = first + tl.arange(0, WIDTH)
        keep = (row < num_rows)[:, None] & (column < D)[None, :]
        part = tl.load(rows + row[:, None] * D + column[None, :], mask=keep, other=0.0)
        parts += (part.to(tl.float32),)
    return parts


@triton.jit
def load_vector(vector, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """A vector (D,), the same for all rows: a tuple of parts, each (BLOCK, WIDTH), where the threads need them."""
    parts = ()
    for first in tl.static_range(0, D, WIDTH):
        column = first + tl.arange(0, WIDTH)[None, :] + tl.zeros((BLOCK, 1), dtype=tl.int32)
        parts += (tl.load(vector + column, mask=column < D, other=0.0),)
    return parts


@triton.jit
def add_each(a, b, c, more_a, more_b, more_c):
    """Three sums, each its own."""
    return a + more_a, b + more_b, c + more_c


@triton.jit
def store_part(rows, row, num_rows, part, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Columns first to first + WIDTH of these rows."""
    column = first + tl.arange(0, WIDTH)
    keep = (row < num_rows)[:, None] & (column < D)[None, :]
    tl.store(rows + row[:, None] * D + column[None, :], part.to(rows.dtype.element_ty), mask=keep)


@triton.jit
def norm_kernel(
    x, addend, weight, bias, total, y, mean, scale, num_rows, eps, D: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """y = LayerNorm(total), total = x + addend; without an addend total is x, and is not stored."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # All that is read comes before what is written: nobody waits twice.
    values = load_parts(x, row, num_rows, D, WIDTH)
    if addend is not None:
        addends = load_parts(addend, row, num_rows, D, WIDTH)
    w, b = load_vector(weight, D, BLOCK, WIDTH), load_vector(bias, D, BLOCK, WIDTH)
    if addend is not None:
        added = ()
        for part in tl.static_range(len(values)):
            # As it is stored: rounded.
            rounded = (values[part] + addends[part]).to(total.dtype.element_ty)
            store_part(total, row, num_rows, rounded, part * WIDTH, D, WIDTH)
            added += (rounded.to(tl.float32),)
        values = added
    level = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    for part in tl.static_range(len(values)):
        level += values[part]
    middle = tl.sum(level, 1) / D
    square = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    for part in tl.static_range(len(values)):
        column = part * WIDTH + tl.arange(0, WIDTH)
        away = tl.where((column < D)[None, :], values[part] - middle[:, None], 0.0)
        square += away * away
    factor = tl.rsqrt(tl.sum(square, 1) / D + eps)
    for part in tl.static_range(len(values)):
        out = (values[part] - middle[:, None]) * factor[:, None] * w[part] + b[part]
        store_part(y, row, num_rows, out, part * WIDTH, D, WIDTH)
    tl.store(mean + row, middle, mask=row < num_rows)
    tl.store(scale + row, factor, mask=row < num_rows)


@triton.jit
def norm_backward_kernel(
    grad_total, grad_y, grad_again, total, mean, scale, weight, grad_x, partial, num_rows, per_program, D: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad_x = grad_total + the norm's share; partial (programs, 2·D): this program's gradients of weight and bias.

    SUMS: 3·D, the last D being the sums of grad_x before it is rounded.
    """
    w = load_vector(weight, D, BLOCK, WIDTH)
    grad_weight = ()
    for _ in tl.static_range(0, D, WIDTH):
        grad_weight += (tl.zeros((BLOCK, WIDTH), dtype=tl.float32),)
    grad_bias, sums = grad_weight, grad_weight
    first = tl.program_id(0).to(tl.int64) * per_program
    for start in tl.range(0, per_program, BLOCK, num_stages=STAGES):
        row = first + start + tl.arange(0, BLOCK)
        exists = row < num_rows
        grads = load_parts(grad_y, row, num_rows, D, WIDTH)
        if grad_again is not None:
            more = load_parts(grad_again, row, num_rows, D, WIDTH)
        values = load_parts(total, row, num_rows, D, WIDTH)
        besides = load_parts(grad_total, row, num_rows, D, WIDTH)
        middle = tl.load(mean + row, mask=exists, other=0.0)[:, None]
        factor = tl.load(scale + row, mask=exists, other=0.0)[:, None]
        along = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
        level = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
        units, shares, new_weight, new_bias, new_sums = (), (), (), (), ()
        for part in tl.static_range(len(w)):
            grad = grads[part] + more[part] if grad_again is not None else grads[part]
            # Beyond D this is no number of x, but grad and w are 0 there.
            unit = (values[part] - middle) * factor
            share = grad * w[part]
            along += share * unit
            level += share
            new_weight += (grad_weight[part] + grad * unit,)
            new_bias += (grad_bias[part] + grad,)
            units += (unit,)
            shares += (share,)
        along, level = (tl.sum(along, 1) / D)[:, None], (tl.sum(level, 1) / D)[:, None]
        for part in tl.static_range(len(w)):
            out = besides[part] + factor * (shares[part] - level - units[part] * along)
            store_part(grad_x, row, num_rows, out, part * WIDTH, D, WIDTH)
            new_sums += (sums[part] + out if SUMS else sums[part],)
        grad_weight, grad_bias, sums = new_weight, new_bias, new_sums
    for part in tl.static_range(len(w)):
        column = part * WIDTH + tl.arange(0, WIDTH)
        here = partial + tl.program_id(0) * (2 + SUMS) * D + column
        # All at once: where there are several warps, they wait for each other no more often than for one of them.
        of_weight, of_bias, of_x = tl.reduce((grad_weight[part], grad_bias[part], sums[part]), 0, add_each)
        tl.store(here, of_weight, mask=column < D)
        tl.store(here + D, of_bias, mask=column < D)
        if SUMS:
            tl.store(here + 2 * D, of_x, mask=column < D)


def _blocks(d: int) -> tuple[int, int, int]:
    """(rows a program takes at a time, width of a part, warps): of each part a thread has four elements.

    Parts are quarters of the padded width, and the last is left out where it would be all padding. Up to a width of 512
    a warp has whole rows, and sums along them without waiting for others.
    """
    padded = max(32, triton.next_power_of_2(d))
    return max(1, 2048 // padded), padded // 4, max(4, padded // 512)


def _backward_blocks(d: int) -> tuple[int, int, int]:
    """The same for the backward kernel: one warp up to a width of 1,024, which then waits for nobody but the memory."""
    padded = max(32, triton.next_power_of_2(d))
    return max(1, 1024 // padded), padded // 4, max(1, padded // 1024)


def _run_norm(
    x: Tensor, addend: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    d = x.shape[-1]
    x, addend = x.contiguous(), None if addend is None else addend.contiguous()
    y, total = torch.empty_like(x), None if addend is None else torch.empty_like(x)
    mean = torch.empty(x.numel() // d, dtype=torch.float32, device=x.device)
    scale = torch.empty_like(mean)
    block, width, num_warps = _blocks(d)
    norm_kernel[(triton.cdiv(len(mean), block),)](
        x, addend, weight, bias, total, y, mean, scale, len(mean), eps, D=d, BLOCK=block, WIDTH=width,
        num_warps=num_warps,
    )  # fmt: skip
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
    block, width, num_warps = _backward_blocks(d)
    per_program = max(1, triton.cdiv(triton.cdiv(len(mean), PROGRAMS), block)) * block
    programs = triton.cdiv(len(mean), per_program)
    grad_x = torch.empty_like(total)
    partial = torch.empty(programs, (2 + with_sums) * d, dtype=torch.float32, device=total.device)
    norm_backward_kernel[(programs,)](
        grad_total.contiguous(), grad_y.contiguous(), None if grad_again is None else grad_again.contiguous(), total,
        mean, scale, weight, grad_x, partial, len(mean), per_program, D=d, BLOCK=block, WIDTH=width,
        SUMS=with_sums, STAGES=STAGES, num_warps=num_warps,
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

"""GELU on a GPU at the speed of memory: in bf16 one hardware tanh an element, finer than bf16 rounds."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from some_moe.fast.ops.column_sum import sum_rows
from some_moe.fast.ops.tma_gemm import gelu_parts

BLOCK = 2048  # elements a program: with four warps a thread moves two times 16 bytes of bf16
# Where columns are summed, elements at a time (half as many: sums take registers too), and how often a program does
# that: seldom enough that programs fill a GPU, often enough that their sums are little to write.
ROWS, COLUMNS, STEPS = 8, 128, 16
AHEAD = 2  # steps that are under way at a time


@triton.jit
def gelu_kernel(x, y, size, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """y = x·Φ(x), element by element."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    cdf, _ = gelu_parts(value, EXACT)
    tl.store(y + place, (value * cdf).to(y.dtype.element_ty), mask=place < size)


@triton.jit
def gelu_backward_kernel(grad_y, x, grad_x, size, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """grad_x = grad_y·(Φ(x) + x·φ(x)), element by element."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_y + place, mask=place < size, other=0.0).to(tl.float32)
    value = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    cdf, pdf = gelu_parts(value, EXACT)
    tl.store(grad_x + place, (grad * (cdf + value * pdf)).to(grad_x.dtype.element_ty), mask=place < size)


@triton.jit
def gelu_backward_sums_kernel(
    grad_y, x, grad_x, table, num_rows, width,
    STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The same for x (num_rows, width), and table (P, width): the sums of grad_x over every STEPS·ROWS rows."""
    group = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in tl.range(STEPS, loop_unroll_factor=AHEAD):
        row = (group * STEPS + step) * ROWS + tl.arange(0, ROWS)
        keep = (row < num_rows)[:, None] & (column < width)[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        grad = tl.load(grad_y + place, mask=keep, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=keep, other=0.0).to(tl.float32)
        cdf, pdf = gelu_parts(value, EXACT)
        grad *= cdf + value * pdf
        tl.store(grad_x + place, grad.to(grad_x.dtype.element_ty), mask=keep)
        total += grad
    tl.store(table + group.to(tl.int64) * width + column, tl.sum(total, 0), mask=column < width)


@torch.library.custom_op("some_moe::gelu", mutates_args=())
def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: ARG001
    """x·Φ(x) in the shape and type of x, bf16 or float32.

    bias (width,): one that is part of x (…, width) already, and cut off from it for autograd. It changes nothing
    here; backward it gets its gradient from the kernel that makes that of x, which nobody then has to read and sum.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel() > 0:
        gelu_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, y, x.numel(), BLOCK=BLOCK, EXACT=x.dtype == torch.float32, num_warps=4
        )
    return y


@gelu.register_fake
def _(x: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("some_moe::gelu_backward", mutates_args=())
def gelu_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from that of y."""
    x = x.contiguous()
    grad_x = torch.empty_like(x)
    if x.numel() > 0:
        gelu_backward_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            grad_y.contiguous(), x, grad_x, x.numel(), BLOCK=BLOCK, EXACT=x.dtype == torch.float32, num_warps=4
        )
    return grad_x


@gelu_backward.register_fake
def _(grad_y: Tensor, x: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("some_moe::gelu_backward_sums", mutates_args=())
def gelu_backward_sums(grad_y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x (…, width) from that of y, and its sums (width,) before it is rounded, in float32."""
    x = x.contiguous()
    grad_x = torch.empty_like(x)
    num_rows, width = x.shape[:-1].numel(), x.shape[-1]
    table = x.new_empty(triton.cdiv(num_rows, STEPS * ROWS), width, dtype=torch.float32)
    if x.numel() > 0:
        gelu_backward_sums_kernel[(len(table), triton.cdiv(width, COLUMNS))](
            grad_y.contiguous(), x, grad_x, table, num_rows, width,
            STEPS=STEPS, ROWS=ROWS, COLUMNS=COLUMNS, EXACT=x.dtype == torch.float32, AHEAD=AHEAD, num_warps=4,
        )  # fmt: skip
    return grad_x, sum_rows(table)


@gelu_backward_sums.register_fake
def _(grad_y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, x.new_empty(x.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, bias = inputs
    ctx.save_for_backward(x)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None]:
    (x,) = ctx.saved_tensors
    if ctx.bias_dtype is None:
        return gelu_backward(grad_y, x), None
    grad_x, sums = gelu_backward_sums(grad_y, x)
    return grad_x, sums.to(ctx.bias_dtype)


gelu.register_autograd(_backward, setup_context=_save)

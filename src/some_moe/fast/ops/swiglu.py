"""SwiGLU and its gradient over permuted rows. Shapes: P rows, F hidden width; gate and linear half are (P, 2F)."""

import triton
import triton.language as tl
from torch import Tensor

from some_moe.fast.ops.grouped_gemm import Tiles, cdiv

BLOCK = 1024  # hidden units a program takes


@triton.jit
def locate(num_tiles, M: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    """This program's hidden units: the offset of each in (P, F), that of its gate in (P, 2F), and which are in use."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.load(num_tiles).to(tl.int64) * M * F
    return at, at // F * (2 * F) + at % F, mask


@triton.jit
def swiglu_kernel(pre, hidden, num_tiles, M: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    """hidden (P, F) = silu(gate) · linear of pre (P, 2F)."""
    at, gate_at, mask = locate(num_tiles, M, F, BLOCK)
    gate = tl.load(pre + gate_at, mask=mask, other=0.0).to(tl.float32)
    linear = tl.load(pre + gate_at + F, mask=mask, other=0.0).to(tl.float32)
    tl.store(hidden + at, (gate * tl.sigmoid(gate) * linear).to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    pre, grad_hidden, grad_pre, hidden, num_tiles, M: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr
):
    """grad_pre (P, 2F) of grad_hidden (P, F); and hidden (P, F) once more, where it is not None."""
    at, gate_at, mask = locate(num_tiles, M, F, BLOCK)
    gate = tl.load(pre + gate_at, mask=mask, other=0.0).to(tl.float32)
    linear = tl.load(pre + gate_at + F, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_hidden + at, mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    grad_gate = grad * linear * (share + silu * (1.0 - share))
    tl.store(grad_pre + gate_at, grad_gate.to(grad_pre.dtype.element_ty), mask=mask)
    tl.store(grad_pre + gate_at + F, (grad * silu).to(grad_pre.dtype.element_ty), mask=mask)
    if hidden is not None:
        tl.store(hidden + at, (silu * linear).to(hidden.dtype.element_ty), mask=mask)


def swiglu(pre: Tensor, hidden: Tensor, tiles: Tiles) -> None:
    """Fill hidden (P, F) from pre (P, 2F), as far as M-tiles are in use."""
    width = hidden.shape[1]
    swiglu_kernel[(cdiv(hidden.numel(), BLOCK),)](pre, hidden, tiles.num_tiles, M=tiles.m, F=width, BLOCK=BLOCK)


def swiglu_backward(pre: Tensor, grad_hidden: Tensor, grad_pre: Tensor, hidden: Tensor | None, tiles: Tiles) -> None:
    """Fill grad_pre (P, 2F) from grad_hidden (P, F), and hidden once more, where it is given."""
    width = grad_hidden.shape[1]
    swiglu_backward_kernel[(cdiv(grad_hidden.numel(), BLOCK),)](
        pre, grad_hidden, grad_pre, hidden, tiles.num_tiles, M=tiles.m, F=width, BLOCK=BLOCK
    )

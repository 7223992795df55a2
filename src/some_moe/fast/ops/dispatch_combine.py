"""Dispatch and combine of the frozen experts: tokens to permuted rows and back. Called by `frozen_experts`.

Shapes: N tokens, K experts each (top_k), D model width, P permuted rows, of which padding rows are never read. A slot
is a (token, choice).
"""

import triton
import triton.language as tl


@triton.jit
def dispatch_kernel(
    x, row, x_rows, num_tokens, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr
):
    """x_rows (P, D): x (N, D) scattered to the rows (N, K) of each token's slots."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = token < num_tokens
    column = tl.arange(0, BD)
    mask = in_bounds[:, None] & (column < D)[None, :]
    x_row = tl.load(x + token[:, None] * D + column[None, :], mask=mask, other=0.0)
    for k in tl.range(K, loop_unroll_factor=4):
        at = tl.load(row + token * K + k, mask=in_bounds, other=0).to(tl.int64)
        tl.store(x_rows + at[:, None] * D + column[None, :], x_row, mask=mask)


@triton.jit
def token_column_blocks(num_tokens, D: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr):
    """BLOCK blocks of at most BD columns of a token: token, whether it is in bounds, columns, and their mask."""
    NUM_D: tl.constexpr = (D + BD - 1) // BD
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = (block // NUM_D).to(tl.int64)
    column = (block % NUM_D)[:, None] * BD + tl.arange(0, BD)[None, :]
    in_bounds = token < num_tokens
    return token, in_bounds, column, in_bounds[:, None] & (column < D)


@triton.jit
def combine_kernel(
    y_rows, row, gates, residual, y, num_tokens, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr
):
    """y (N, D) = residual + Σ_k gate · y_rows[row]: a gather, so no atomics, and deterministic.

    gates None: all are 1. residual None: nothing is added.
    """
    token, in_bounds, column, mask = token_column_blocks(num_tokens, D, BLOCK, BD)
    acc = tl.zeros((BLOCK, BD), dtype=tl.float32)
    if residual is not None:
        acc += tl.load(residual + token[:, None] * D + column, mask=mask, other=0.0).to(tl.float32)
    for k in tl.range(K, loop_unroll_factor=4):
        at = tl.load(row + token * K + k, mask=in_bounds, other=0).to(tl.int64)
        y_row = tl.load(y_rows + at[:, None] * D + column, mask=mask, other=0.0).to(tl.float32)
        if gates is not None:
            y_row *= tl.load(gates + token * K + k, mask=in_bounds, other=0.0).to(tl.float32)[:, None]
        acc += y_row
    tl.store(y + token[:, None] * D + column, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def combine_backward_kernel(
    grad_y, row, gates, y_rows, grad_rows, grad_gates, num_tokens, K: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """grad_rows (P, D) = gate · grad_y scattered to the rows of each slot; grad_gates (N, K) = ⟨y_rows, grad_y⟩."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = token < num_tokens
    column = tl.arange(0, BD)
    mask = in_bounds[:, None] & (column < D)[None, :]
    grad = tl.load(grad_y + token[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
    for k in tl.range(K, loop_unroll_factor=4):
        at = tl.load(row + token * K + k, mask=in_bounds, other=0).to(tl.int64)[:, None] * D + column[None, :]
        gate = tl.load(gates + token * K + k, mask=in_bounds, other=0.0).to(tl.float32)
        y_row = tl.load(y_rows + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_rows + at, (gate[:, None] * grad).to(grad_rows.dtype.element_ty), mask=mask)
        grad_gate = tl.sum(y_row * grad, 1)
        tl.store(grad_gates + token * K + k, grad_gate.to(grad_gates.dtype.element_ty), mask=in_bounds)

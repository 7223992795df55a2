"""Column sums, in a fixed order and without atomics: dbias.

Mostly the second stage of it: the kernel that makes a gradient leaves one row of partial column sums a program (dbias
fused into the dx kernel), and these few rows are reduced here. `sum_columns` has both stages.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from some_moe.fast.ops.opaque import opaque

ROWS = 64  # a program of the first stage takes at a time
PROGRAMS = 256  # of the first stage, and as many rows of the second


@triton.jit
def column_sum_kernel(table, sums, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """sums (width,): the column sums of table (num_rows, width)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (column < width)[None, :]
        total += tl.load(table + row[:, None] * width + column[None, :], mask=mask, other=0.0)
    tl.store(sums + column, tl.sum(total, 0), mask=column < width)


def sum_rows(table: Tensor) -> Tensor:
    """The column sums (width,) of a float32 table (rows, width), contiguous."""
    num_rows, width = table.shape
    sums = table.new_empty(width)
    if width > 0:
        # Narrow programs, for a short table: there are enough of them, and each has most of its loads in flight.
        columns = 16
        column_sum_kernel[(triton.cdiv(width, columns),)](
            table, sums, num_rows, width, ROWS=256, COLUMNS=columns, num_warps=8
        )
    return sums


@triton.jit
def partial_sum_kernel(
    table, partial, num_rows, per_program, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """partial (programs, WIDTH): the column sums of each program's rows of table (num_rows, WIDTH)."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(0) * per_program
    end = tl.minimum(begin + per_program, num_rows)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(table + row[:, None].to(tl.int64) * WIDTH + column[None, :], mask=mask, other=0.0)
    tl.store(partial + tl.program_id(0) * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


@opaque("some_moe::sum_columns")
def sum_columns(table: Tensor) -> Tensor:
    """The column sums (width,) float32 of a table (rows, width) of any type."""
    table = table.contiguous()
    num_rows, width = table.shape
    per_program = triton.cdiv(triton.cdiv(num_rows, PROGRAMS), ROWS) * ROWS
    programs = triton.cdiv(num_rows, max(1, per_program))
    partial = table.new_empty(programs, width, dtype=torch.float32)
    partial_sum_kernel[(programs, triton.cdiv(width, 128))](
        table, partial, num_rows, per_program, WIDTH=width, ROWS=ROWS, COLUMNS=128, num_warps=8
    )
    return sum_rows(partial)


@sum_columns.register_fake
def _(table: Tensor) -> Tensor:
    return table.new_empty(table.shape[1], dtype=torch.float32)

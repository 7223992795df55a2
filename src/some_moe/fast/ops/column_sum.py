"""The second stage of dbias: column sums of partial sums, in a fixed order.

The kernel that makes a gradient leaves one row of partial column sums a program (dbias fused into the dx kernel); these
few rows are reduced here, without atomics.
"""

import triton
import triton.language as tl
from torch import Tensor


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

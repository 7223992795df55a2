"""The gradient of a bias: the sum of a gradient's rows, added up in the same order every time.

The kernel that makes the gradient leaves one row of sums a program; these few rows are added up here.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def sum_rows_kernel(table, sums, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """sums (width,) of table (num_rows, width)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        keep = (row < num_rows)[:, None] & (column < width)[None, :]
        total += tl.load(table + row[:, None] * width + column[None, :], mask=keep, other=0.0)
    tl.store(sums + column, tl.sum(total, 0), mask=column < width)


def sum_rows(table: Tensor) -> Tensor:
    """The sums (width,) over the rows of a float32 table (rows, width), contiguous."""
    num_rows, width = table.shape
    sums = table.new_empty(width)
    if width > 0:
        # Narrow programs, for a short table: there are enough of them, and each has most of its rows in flight.
        columns = 16
        sum_rows_kernel[(triton.cdiv(width, columns),)](
            table, sums, num_rows, width, ROWS=256, COLUMNS=columns, num_warps=8
        )
    return sums

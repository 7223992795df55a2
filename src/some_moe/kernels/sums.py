"""What `nearest.sum_by_expert` adds up, for few experts: the queries are read once, and no marks are stored.

Each program adds up its own tokens and leaves one row of a table; these few rows are added up in the same order every
time. Shapes: N tokens, E experts, K chosen, D model width.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_EXPERTS = 64  # one program holds the sums of all experts, (512, 64) at most, in its registers
MAX_WIDTH = 512
PROGRAMS = 128  # at most: about one a multiprocessor, and each leaves a row of E · D sums
TOKENS = 64  # that a program takes at a time
WARPS, STAGES = 16, 3


@triton.jit
def partial_sums_kernel(
    query, experts, counted, table, num_tokens, per_program, width, E: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One row of table (programs, width): the sums of unit queries (E, D), co-selections (E, E), and how many tokens
    are counted.

    Queries are taken in two halves, HALF columns each: a row of one is what one warp loads at a time, so that lengths
    are added up within a warp. Products have the columns first: their rows are shared out among the warps.
    """
    first = tl.program_id(0).to(tl.int64) * per_program
    num_left = tl.minimum(num_tokens - first, per_program).to(tl.int32)
    query += first * D
    experts += first * K
    left = tl.arange(0, HALF)
    right = HALF + left
    expert = tl.arange(0, BE)
    left_sum = tl.zeros((HALF, BE), dtype=tl.float32)
    right_sum = tl.zeros((HALF, BE), dtype=tl.float32)
    pairs = tl.zeros((BE, BE), dtype=tl.float32)
    number = tl.zeros((TOKENS,), dtype=tl.float32)
    for start in range(0, per_program, TOKENS):
        token = start + tl.arange(0, TOKENS)
        exists = token < num_left
        row = query + token[:, None] * D
        a = tl.load(row + left[None, :], mask=exists[:, None] & (left < D)[None, :], other=0.0)
        b = tl.load(row + right[None, :], mask=exists[:, None] & (right < D)[None, :], other=0.0)
        enters = exists & (tl.load(counted + first + token, mask=exists, other=0) != 0)
        chosen = tl.zeros((BE, TOKENS), dtype=tl.int1)
        for k in tl.static_range(K):
            chosen |= expert[:, None] == tl.load(experts + token * K + k, mask=exists, other=0).to(tl.int32)[None, :]
        chosen &= enters[None, :]

        x = a.to(tl.float32)
        y = b.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(x), tl.abs(y)), 1)
        # A power of two, so that squares neither overflow nor vanish.
        factor = tl.where(largest > 2.0**50, 2.0**-80, tl.where(largest < 2.0**-50, 2.0**80, 1.0))
        u = x * factor[:, None]
        v = y * factor[:, None]
        norm = tl.sqrt(tl.sum(u * u + v * v, 1)) / factor
        number += enters.to(tl.float32)

        scale = tl.where(norm > 0, 1.0 / norm, 0.0)
        high = scale.to(a.dtype)
        low = (scale - high.to(tl.float32)).to(a.dtype)
        nothing = tl.zeros((BE, TOKENS), dtype=a.dtype)
        ones = chosen.to(tl.float32).to(a.dtype)
        highs = tl.trans(tl.where(chosen, high[None, :], nothing))
        lows = tl.trans(tl.where(chosen, low[None, :], nothing))
        pairs = tl.dot(ones, tl.trans(ones), pairs)
        left_sum = tl.dot(tl.trans(a), highs, left_sum)
        right_sum = tl.dot(tl.trans(b), highs, right_sum)
        left_sum = tl.dot(tl.trans(a), lows, left_sum)
        right_sum = tl.dot(tl.trans(b), lows, right_sum)

    known = (expert < E)[None, :]
    out = table + tl.program_id(0) * width
    sums = out + expert[None, :] * D
    tl.store(sums + left[:, None], left_sum, mask=(left < D)[:, None] & known)
    tl.store(sums + right[:, None], right_sum, mask=(right < D)[:, None] & known)
    out += E * D
    tl.store(out + expert[:, None] * E + expert[None, :], pairs, mask=(expert < E)[:, None] & known)
    tl.store(out + E * E, tl.sum(number, 0))


@triton.jit
def total_sums_kernel(
    table, counts, pairs, query_sum, num_counted, num_rows, width, E: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the at most ROWS rows of table, and store each column's sum where it belongs."""
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * width + column[None, :]
    total = tl.sum(tl.load(table + at, mask=(row < num_rows)[:, None], other=0.0), 0)
    whole = total.to(tl.int64)
    tl.store(query_sum + column, total, mask=column < E * D)
    column -= E * D
    is_pair = (column >= 0) & (column < E * E)
    tl.store(pairs + column, whole, mask=is_pair)
    tl.store(counts + column // (E + 1), whole, mask=is_pair & (column % (E + 1) == 0))  # the diagonal
    column -= E * E
    tl.store(num_counted + column, whole, mask=column == 0)


def can_sum(query: Tensor, num_experts: int) -> bool:
    """Whether one program can hold the sums of all experts."""
    return num_experts <= MAX_EXPERTS and query.shape[1] <= MAX_WIDTH


def sum_in_one_pass(experts: Tensor, counted: Tensor, query: Tensor, totals: Sequence[Tensor]) -> None:
    """Fill totals with what `nearest.sum_by_expert` returns, where `can_sum` admits."""
    num_tokens, top_k = experts.shape
    num_experts, d = len(totals[0]), query.shape[1]
    per_program = TOKENS * max(1, triton.cdiv(num_tokens, TOKENS * PROGRAMS))
    programs = triton.cdiv(num_tokens, per_program)
    columns = 32
    width = columns * triton.cdiv(num_experts * (d + num_experts) + 1, columns)  # padded: each row is aligned
    table = torch.empty(programs, width, dtype=torch.float32, device=query.device)
    partial_sums_kernel[(programs,)](
        query, experts, counted, table, num_tokens, per_program, width, E=num_experts, BE=MAX_EXPERTS, K=top_k,
        D=d, HALF=max(64, triton.next_power_of_2(d) // 2), TOKENS=TOKENS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    total_sums_kernel[(width // columns,)](
        table, *totals, programs, width, E=num_experts, D=d, ROWS=PROGRAMS, COLUMNS=columns
    )

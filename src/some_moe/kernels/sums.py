"""What `nearest.sum_by_expert` adds up, for few experts: no marks are stored.

Lengths come first. Then each program adds up its own tokens and columns and leaves its part of a table; the table's
few rows are added up in the same order every time. Shapes: N tokens, E experts, K chosen, D model width.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_EXPERTS = 64  # one program holds the sums of all experts, (64, COLUMNS), in its registers
COLUMNS = 128  # of the queries, that a program multiplies at most
TOKENS = 64  # that it takes at a time, and that are measured together
PROGRAMS = 352  # about so many run beside each other; the fewer, the shorter the table
WARPS, STAGES = 4, 3


@triton.jit
def measure_rows(query, row, exists, D: tl.constexpr):
    """The lengths of these rows of query (N, D), however long or short; slowly."""
    column = tl.arange(0, 64)[None, :]
    largest = tl.zeros(row.shape, dtype=tl.float32)
    for first in range(0, D, 64):
        keep = exists[:, None] & (first + column < D)
        x = tl.load(query + row[:, None] * D + first + column, mask=keep, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    # A power of two, so that squares neither overflow nor vanish, and no digit is lost.
    factor = tl.where(largest > 2.0**50, 2.0**-80, tl.where(largest < 2.0**-50, 2.0**80, 1.0))
    squares = tl.zeros(row.shape, dtype=tl.float32)
    for first in range(0, D, 64):
        keep = exists[:, None] & (first + column < D)
        x = tl.load(query + row[:, None] * D + first + column, mask=keep, other=0.0).to(tl.float32) * factor[:, None]
        squares += tl.sum(x * x, 1)
    return tl.sqrt(squares) / factor


@triton.jit
def measure_kernel(
    query, counted, lengths, raw_sums, num_tokens, D: tl.constexpr, BD: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """lengths (N,) of all queries, and of each TOKENS of them the sum of the counted ones: raw_sums (tiles, D)."""
    column = tl.arange(0, BD)
    inside = column < D
    raw_sum = tl.zeros((BD,), dtype=tl.float32)
    for start in range(0, TOKENS, ROWS):
        row = tl.program_id(0).to(tl.int64) * TOKENS + start + tl.arange(0, ROWS)
        exists = row < num_tokens
        x = tl.load(query + row[:, None] * D + column[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
        enters = exists & (tl.load(counted + row, mask=exists, other=0) != 0)
        x = x.to(tl.float32)
        raw_sum += tl.sum(x * enters.to(tl.float32)[:, None], 0)
        length = tl.sqrt(tl.sum(x * x, 1))
        extreme = exists & ((length < 2.0**-50) | (length > 2.0**50))
        if tl.max(extreme.to(tl.int32), 0) > 0:
            length = tl.where(extreme, measure_rows(query, row, exists, D), length)
        tl.store(lengths + row, length, mask=exists)
    tl.store(raw_sums + tl.program_id(0) * D + column, raw_sum, mask=inside)


@triton.jit
def mark_chosen(experts, token, exists, BE: tl.constexpr, K: tl.constexpr):
    """(BE, tokens): whether a token chose an expert."""
    expert = tl.arange(0, BE)[:, None]
    chosen = tl.zeros((BE, token.shape[0]), dtype=tl.int1)
    for k in tl.static_range(K):
        chosen |= expert == tl.load(experts + token * K + k, mask=exists, other=-1).to(tl.int32)[None, :]
    return chosen


@triton.jit
def split_inverse(length, enters, TYPE: tl.constexpr):
    """1 / length in two parts that add up to it; 0 where a token does not enter, or has no direction."""
    scale = tl.where(enters & (length > 0), 1.0 / length, 0.0)
    high = scale.to(TYPE)
    return high, (scale - high.to(tl.float32)).to(TYPE)


@triton.jit
def partial_sums_kernel(
    query, experts, counted, lengths, raw_sums, table, num_tokens, tiles, width, E: tl.constexpr, BE: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row of table (rows, width), of `tiles` tiles of TOKENS tokens: the sums of unit queries (E, D),
    co-selections (E, E), the sum of the queries (D,), the sum of their lengths and how many are counted.

    Programs (row, part): the last part makes what needs no query, the others COLUMNS columns each of what does.
    """
    TYPE: tl.constexpr = query.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * tiles * TOKENS
    num_left = tl.minimum(num_tokens - first, tiles * TOKENS).to(tl.int32)
    query += first * D
    experts += first * K
    counted += first
    lengths += first
    out = table + tl.program_id(0) * width
    expert = tl.arange(0, BE)
    known = (expert < E)[:, None]
    if tl.program_id(1) == tl.num_programs(1) - 1:
        pairs = tl.zeros((BE, BE), dtype=tl.float32)
        length_sum = tl.zeros((TOKENS,), dtype=tl.float32)
        number = tl.zeros((TOKENS,), dtype=tl.float32)
        for start in tl.range(0, num_left, TOKENS, num_stages=STAGES):
            token = start + tl.arange(0, TOKENS)
            exists = token < num_left
            enters = exists & (tl.load(counted + token, mask=exists, other=0) != 0)
            length_sum += tl.where(enters, tl.load(lengths + token, mask=exists, other=0.0), 0.0)
            number += enters.to(tl.float32)
            ones = (mark_chosen(experts, token, exists, BE, K) & enters[None, :]).to(tl.float32).to(TYPE)
            pairs = tl.dot(ones, tl.trans(ones), pairs)
        out += E * D
        tl.store(out + expert[:, None] * E + expert[None, :], pairs, mask=known & (expert < E)[None, :])
        out += E * E + D
        tl.store(out, tl.sum(length_sum, 0))
        tl.store(out + 1, tl.sum(number, 0))
    else:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < D
        sums = tl.zeros((BE, COLUMNS), dtype=tl.float32)
        # Queries go to the products and nowhere else: only then does the compiler keep each block until both are done.
        for start in tl.range(0, num_left, TOKENS, num_stages=STAGES):
            token = start + tl.arange(0, TOKENS)
            exists = token < num_left
            keep = exists[:, None] & inside[None, :]
            q = tl.load(query + token[:, None] * D + column[None, :], mask=keep, other=0.0)
            enters = exists & (tl.load(counted + token, mask=exists, other=0) != 0)
            high, low = split_inverse(tl.load(lengths + token, mask=exists, other=0.0), enters, TYPE)
            chosen = mark_chosen(experts, token, exists, BE, K)
            nothing = tl.zeros((BE, TOKENS), dtype=TYPE)
            sums = tl.dot(tl.where(chosen, high[None, :], nothing), q, sums)
            sums = tl.dot(tl.where(chosen, low[None, :], nothing), q, sums)
        tl.store(out + expert[:, None] * D + column[None, :], sums, mask=known & inside[None, :])
        raw_sum = tl.zeros((COLUMNS,), dtype=tl.float32)
        raw_sums += tl.program_id(0) * tiles * D
        for tile in range(tl.cdiv(num_left, TOKENS)):
            raw_sum += tl.load(raw_sums + tile * D + column, mask=inside, other=0.0)
        tl.store(out + E * (D + E) + column, raw_sum, mask=inside)


@triton.jit
def total_sums_kernel(
    table, counts, pairs, query_sum, raw_sum, norm_sum, num_counted, num_rows, width, E: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
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
    tl.store(raw_sum + column, total, mask=(column >= 0) & (column < D))
    column -= D
    tl.store(norm_sum + column, total, mask=column == 0)
    tl.store(num_counted + column - 1, whole, mask=column == 1)


def sum_in_one_pass(experts: Tensor, counted: Tensor, query: Tensor, totals: Sequence[Tensor]) -> None:
    """Fill totals with what `nearest.sum_by_expert` returns, for at most MAX_EXPERTS experts."""
    num_tokens, top_k = experts.shape
    num_experts, d = len(totals[0]), query.shape[1]
    num_tiles = triton.cdiv(num_tokens, TOKENS)
    padded = triton.next_power_of_2(d)
    lengths = torch.empty(num_tokens, dtype=torch.float32, device=query.device)
    raw_sums = lengths.new_empty(num_tiles, d)
    measure_kernel[(num_tiles,)](
        query, counted, lengths, raw_sums, num_tokens, D=d, BD=padded, TOKENS=TOKENS,
        ROWS=min(TOKENS, max(1, 2**15 // padded)), num_warps=8,
    )  # fmt: skip

    columns = min(COLUMNS, max(16, padded))
    parts = triton.cdiv(d, columns) + 1
    tiles = triton.cdiv(num_tiles, max(1, PROGRAMS // parts))
    rows = triton.cdiv(num_tiles, tiles)
    at_once = 32
    width = at_once * triton.cdiv(num_experts * (d + num_experts) + d + 2, at_once)  # padded: each row is aligned
    table = lengths.new_empty(rows, width)
    partial_sums_kernel[(rows, parts)](
        query, experts, counted, lengths, raw_sums, table, num_tokens, tiles, width, E=num_experts, BE=MAX_EXPERTS,
        K=top_k, D=d, COLUMNS=columns, TOKENS=TOKENS, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    total_sums_kernel[(width // at_once,)](
        table, *totals, rows, width, E=num_experts, D=d, ROWS=triton.next_power_of_2(rows), COLUMNS=at_once
    )

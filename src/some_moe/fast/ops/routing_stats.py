"""Routing statistics for gravity: selection counts, co-selections and sums of unit queries by expert.

Up to 64 experts and a width of 512, all layers take one launch: the queries are read once, and multi-hot matrices are
made in registers. Each program reduces its own tokens of one layer to one row of partial sums; the few rows of a layer
are reduced in a fixed order. One launch for all layers has longer programs and fewer rows than one a layer. With more
experts the multi-hot matrix (N, 3·E) of a layer is stored, and all sums are GEMMs with it.

Shapes: L layers, N tokens, E experts, K chosen, D model width, S samples.
"""
# mypy: disable-error-code=assignment
# (The tuples grow, part by part.)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from some_moe.fast.ops.opaque import opaque

MAX_EXPERTS = 64  # one program holds the sums of all experts, (512, 64) at most, in its registers
MAX_WIDTH = 512
PROGRAMS = 132  # at most, over all layers: about one an SM, and each leaves a row of E · D partial sums
TOKENS = 64  # that a program takes at a time
PART = 128  # columns: the M of a dot that eight warps share
WARPS, STAGES = 8, 3
NOT_SAMPLED = tl.constexpr(torch.iinfo(torch.int64).max)


@triton.jit
def select_pointer(pointers, index, SIZE: tl.constexpr):
    """pointers[index], of SIZE, for an index on the device."""
    found = pointers[0]
    for other in tl.static_range(1, SIZE):
        found = tl.where(index == other, pointers[other], found)
    return found


@triton.jit
def load_parts(query, token, exists, D: tl.constexpr, PART: tl.constexpr):
    """These tokens' rows of query (N, D), in parts of PART columns; zeros where there are none."""
    parts = ()
    for first in tl.static_range(0, D, PART):
        column = first + tl.arange(0, PART)
        mask = exists[:, None] & (column < D)[None, :]
        parts += (tl.load(query + token[:, None] * D + column[None, :], mask=mask, other=0.0),)
    return parts


@triton.jit
def inverse_norms(parts):
    """1 / ‖row‖, and 0 for a row of zeros."""
    size = tl.abs(parts[0].to(tl.float32))
    for part in tl.static_range(1, len(parts)):
        size = tl.maximum(size, tl.abs(parts[part].to(tl.float32)))
    row_max = tl.max(size, 1)
    # A power of two, so that squares neither overflow nor underflow.
    power_of_2 = tl.where(row_max > 2.0**50, 2.0**-80, tl.where(row_max < 2.0**-50, 2.0**80, 1.0))
    squares = tl.zeros_like(size)
    for part in tl.static_range(len(parts)):
        x = parts[part].to(tl.float32) * power_of_2[:, None]
        squares += x * x
    norm = tl.sqrt(tl.sum(squares, 1)) / power_of_2
    return tl.where(norm > 0, 1.0 / norm, 0.0)


@triton.jit
def accumulate_dots(sums, parts, multi_hot):
    """sums + partsᵀ @ multi_hot, part by part."""
    new = ()
    for part in tl.static_range(len(parts)):
        new += (tl.dot(tl.trans(parts[part]), multi_hot, sums[part]),)
    return new


@triton.jit
def routing_stats_partial_kernel(
    queries, choices, counted, partial, num_tokens, per_program, counted_stride, width, L: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One row of partial (L, programs, width): the sums of unit queries (E, D), co-selections (E, E), and how many
    tokens are counted. queries and choices: L pointers each, to (N, D) and (N, K).

    Queries are taken in parts of PART columns. The columns are the M of every dot and are split among the warps, so
    that all accumulators have one layout, without conversions.
    """
    layer = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * per_program
    num_left = tl.minimum(num_tokens - first, per_program).to(tl.int32)
    query = select_pointer(queries, layer, L) + first * D
    experts = select_pointer(choices, layer, L) + first * K
    counted += layer.to(tl.int64) * counted_stride + first
    expert = tl.arange(0, BE)
    sums = ()
    for _ in tl.static_range(0, D, PART):
        sums += (tl.zeros((PART, BE), dtype=tl.float32),)
    pairs = tl.zeros((BE, BE), dtype=tl.float32)
    count = tl.zeros((TOKENS,), dtype=tl.float32)
    # cp.async takes no single bytes, so these are not pipelined as the rest is: prefetched by hand.
    next_counted = tl.load(counted + tl.arange(0, TOKENS), mask=tl.arange(0, TOKENS) < num_left, other=0)
    for start in range(0, per_program, TOKENS):
        token = start + tl.arange(0, TOKENS)
        exists = token < num_left
        is_counted = next_counted != 0
        next_counted = tl.load(counted + token + TOKENS, mask=token + TOKENS < num_left, other=0)
        count += is_counted.to(tl.float32)
        # A bitmask of experts: testing a bit costs as much for many choices as for one.
        bitmask = tl.zeros((TOKENS,), dtype=tl.int64)
        for k in tl.static_range(K):
            bitmask |= tl.full((TOKENS,), 1, tl.int64) << tl.load(experts + token * K + k, mask=exists, other=0)
        bitmask = tl.where(is_counted, bitmask, 0)
        selected = ((bitmask[None, :] >> expert[:, None].to(tl.int64)) & 1) != 0

        rows = load_parts(query, token, exists, D, PART)
        scale = inverse_norms(rows)
        dtype: tl.constexpr = query.dtype.element_ty
        high = scale.to(dtype)
        low = (scale - high.to(tl.float32)).to(dtype)
        zeros = tl.zeros((BE, TOKENS), dtype=dtype)
        ones = tl.where(selected, tl.full((BE, TOKENS), 1.0, tl.float32).to(dtype), zeros)
        highs = tl.trans(tl.where(selected, high[None, :], zeros))
        lows = tl.trans(tl.where(selected, low[None, :], zeros))
        pairs = tl.dot(ones, tl.trans(ones), pairs)
        sums = accumulate_dots(accumulate_dots(sums, rows, highs), rows, lows)

    in_range = expert < E
    out = partial + (layer * tl.num_programs(0) + tl.program_id(0)) * width
    for part in tl.static_range(len(sums)):
        column = part * PART + tl.arange(0, PART)
        mask = (column < D)[:, None] & in_range[None, :]
        tl.store(out + expert[None, :] * D + column[:, None], sums[part], mask=mask)
    out += E * D
    tl.store(out + expert[:, None] * E + expert[None, :], pairs, mask=in_range[:, None] & in_range[None, :])
    tl.store(out + E * E, tl.sum(count, 0))


@triton.jit
def routing_stats_reduce_kernel(
    partial, counts, pairs, query_sum, num_counted, num_rows, width, E: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Reduce each layer's at most ROWS rows of partial (L, num_rows, width); store each column's sum in its output."""
    layer = tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = (layer * num_rows + row)[:, None] * width + column[None, :]
    total = tl.sum(tl.load(partial + at, mask=(row < num_rows)[:, None], other=0.0), 0)
    total_int = total.to(tl.int64)
    tl.store(query_sum + layer * (E * D) + column, total, mask=column < E * D)
    column -= E * D
    is_pair = (column >= 0) & (column < E * E)
    tl.store(pairs + layer * (E * E) + column, total_int, mask=is_pair)
    tl.store(counts + layer * E + column // (E + 1), total_int, mask=is_pair & (column % (E + 1) == 0))  # the diagonal
    column -= E * E
    tl.store(num_counted + layer + column, total_int, mask=column == 0)


@triton.jit
def gather_samples_kernel(queries, index, order, sample, L: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """sample (L, S, D): the unit queries at index (L, S); zero where nothing was sampled."""
    layer = tl.program_id(1)
    at = layer * tl.num_programs(0) + tl.program_id(0)
    column = tl.arange(0, BD)
    mask = (column < D) & (tl.load(order + at) < NOT_SAMPLED)
    row = select_pointer(queries, layer, L) + tl.load(index + at) * D
    x = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
    row_max = tl.max(tl.abs(x), 0)
    x = x / tl.where(row_max > 0, row_max, 1.0)  # squares must not overflow
    norm = tl.sqrt(tl.sum(x * x, 0))
    tl.store(sample + at * D + column, x / tl.maximum(norm, 1.0), mask=column < D)


@triton.jit
def routing_stats_multi_hot_kernel(
    query, experts, counted, multi_hot, partial_counts, num_tokens, E: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """multi_hot (N, 3E) of each counted token's experts: 1 at e, and 1/‖query‖ in two bf16 terms at E + e and 2E + e.
    All else is 0. partial_counts: how many of each program's tokens are counted."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    column = tl.arange(0, BD)
    x = tl.load(
        query + token[:, None] * D + column[None, :], mask=exists[:, None] & (column < D)[None, :], other=0.0
    ).to(tl.float32)
    row_max = tl.max(tl.abs(x), 1)
    x = x / tl.where(row_max > 0, row_max, 1.0)[:, None]  # squares must not overflow
    norm = row_max * tl.sqrt(tl.sum(x * x, 1))
    scale = tl.where(norm > 0, 1.0 / norm, 0.0)
    high = scale.to(tl.bfloat16)
    low = (scale - high.to(tl.float32)).to(tl.bfloat16)
    is_counted = exists & (tl.load(counted + token, mask=exists, other=0) != 0)
    tl.store(partial_counts + tl.program_id(0), tl.sum(is_counted.to(tl.int32), 0))

    expert = tl.arange(0, BE)[None, :]
    selected = tl.zeros((BLOCK, BE), dtype=tl.int1)
    for k in tl.static_range(K):
        selected |= expert == tl.load(experts + token * K + k, mask=is_counted, other=-1)[:, None]
    mask = exists[:, None] & (expert < E)
    row = multi_hot + token[:, None] * (3 * E)
    zeros = tl.zeros((BLOCK, BE), dtype=tl.bfloat16)
    tl.store(row + expert, selected.to(tl.float32).to(tl.bfloat16), mask=mask)
    tl.store(row + E + expert, tl.where(selected, high[:, None], zeros), mask=mask)
    tl.store(row + 2 * E + expert, tl.where(selected, low[:, None], zeros), mask=mask)


@triton.jit
def routing_stats_finalize_kernel(
    gram, sums, partial_counts, counts, pairs, query_sum, num_counted, num_parts, E: tl.constexpr, BE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn the GEMMs into what `sum_by_expert` returns: program e < E for expert e, the last for the rest.

    gram (E, E) = multi_hotᵀ @ multi_hot; sums (2E, D): of both terms of the unit queries.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BD)
    inside = column < D
    if row < E:
        high = tl.load(sums + row * D + column, mask=inside)
        low = tl.load(sums + (E + row) * D + column, mask=inside)
        tl.store(query_sum + row * D + column, high + low, mask=inside)
        other = tl.arange(0, BE)
        found = tl.load(gram + row * E + other, mask=other < E)
        tl.store(pairs + row * E + other, found.to(tl.int64), mask=other < E)
        tl.store(counts + row, tl.load(gram + row * E + row).to(tl.int64))
    else:
        count = tl.zeros((BLOCK,), dtype=tl.int64)
        for first in range(0, num_parts, BLOCK):
            part = first + tl.arange(0, BLOCK)
            count += tl.load(partial_counts + part, mask=part < num_parts, other=0)
        tl.store(num_counted, tl.sum(count, 0))


def can_sum(d_model: int, num_experts: int) -> bool:
    """Whether one program can hold the accumulators of all experts."""
    return num_experts <= MAX_EXPERTS and d_model <= MAX_WIDTH


def sum_in_one_pass(
    experts: Sequence[Tensor], counted: Tensor, queries: Sequence[Tensor], num_experts: int, totals: Sequence[Tensor]
) -> None:
    """Fill totals with what `sum_by_expert` returns, one layer behind the other, where `can_sum` admits.

    counted (N,): the same for all layers; or (L, N).
    """
    num_layers, (num_tokens, top_k), d = len(queries), experts[0].shape, queries[0].shape[1]
    most = max(1, PROGRAMS // num_layers)
    per_program = TOKENS * max(1, triton.cdiv(num_tokens, TOKENS * most))
    programs = triton.cdiv(num_tokens, per_program)
    rows = triton.next_power_of_2(max(1, programs))
    columns = max(32, min(256, 4096 // rows))
    width = columns * triton.cdiv(num_experts * (d + num_experts) + 1, columns)  # padded: rows are aligned
    partial = torch.empty(num_layers, programs, width, dtype=torch.float32, device=queries[0].device)
    routing_stats_partial_kernel[(programs, num_layers)](
        tuple(queries), tuple(experts), counted, partial, num_tokens, per_program, num_tokens * (counted.dim() - 1),
        width, L=num_layers, E=num_experts, BE=MAX_EXPERTS, K=top_k, D=d, PART=PART, TOKENS=TOKENS, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    routing_stats_reduce_kernel[(width // columns, num_layers)](
        partial, *totals, programs, width, E=num_experts, D=d, ROWS=rows, COLUMNS=columns
    )


Sums = tuple[Tensor, Tensor, Tensor, Tensor]


@opaque("some_moe::sum_by_expert")
def sum_by_expert(experts: Tensor, counted: Tensor, query: Tensor, num_experts: int) -> Sums:
    """Sums over the counted ones of N tokens with bf16 queries (N, D).

    Selections (E,) and co-selections (E, E) int64, exact; sums of unit queries (E, D); how many are counted () int64.
    All are bf16 GEMMs with float32 accumulation: ones are exact, and 1/‖query‖ leaves an error of 2⁻¹⁷. Few experts
    take one pass; for many the multi-hot matrix is stored first.
    """
    experts, counted, query = experts.contiguous(), counted.contiguous(), query.contiguous()
    num_tokens, top_k = experts.shape
    sums_out = _empty_sums(experts, query, num_experts)
    if can_sum(query.shape[1], num_experts):
        sum_in_one_pass([experts], counted, [query], num_experts, sums_out)
        return sums_out
    padded, padded_experts = triton.next_power_of_2(query.shape[1]), triton.next_power_of_2(num_experts)
    sizes = {"E": num_experts, "BE": padded_experts, "D": query.shape[1], "BD": padded}
    block = max(1, 2048 // max(padded, padded_experts))
    programs = triton.cdiv(num_tokens, block)
    multi_hot = query.new_empty(num_tokens, 3 * num_experts)
    partial_counts = torch.empty(programs, dtype=torch.int32, device=query.device)
    routing_stats_multi_hot_kernel[(programs,)](
        query, experts, counted, multi_hot, partial_counts, num_tokens, K=top_k, BLOCK=block, **sizes
    )
    ones = multi_hot[:, :num_experts]
    gram = torch.mm(ones.T, ones, out_dtype=torch.float32)
    sums = torch.mm(multi_hot[:, num_experts:].T, query, out_dtype=torch.float32)
    routing_stats_finalize_kernel[(num_experts + 1,)](
        gram, sums, partial_counts, *sums_out, programs, BLOCK=1024, **sizes
    )
    return sums_out


def _empty_sums(experts: Tensor, query: Tensor, num_experts: int, *num_layers: int) -> Sums:
    """Empty outputs of `sum_by_expert`; with a leading dimension, where a number of layers is given."""
    return (
        experts.new_empty(*num_layers, num_experts),
        experts.new_empty(*num_layers, num_experts, num_experts),
        query.new_empty(*num_layers, num_experts, query.shape[1], dtype=torch.float32),
        experts.new_empty(num_layers),
    )


@sum_by_expert.register_fake
def _(experts: Tensor, counted: Tensor, query: Tensor, num_experts: int) -> Sums:  # noqa: ARG001
    return _empty_sums(experts, query, num_experts)


LayerSums = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@opaque("some_moe::sum_layers")
def sum_layers(
    experts: list[Tensor], counted: Tensor, queries: list[Tensor], index: Tensor, order: Tensor, num_experts: int
) -> LayerSums:
    """`sum_by_expert` of L layers, where `can_sum` admits: each tensor has the layers first. The fifth is the
    samples: unit queries (L, S, D) at index (L, S), zero where the order (L, S) says that nothing was sampled.

    experts: L of (N, K); queries: L of (N, D) in bf16; counted (N,) or (L, N).
    """
    sums_out = _empty_layer_sums(experts, queries, index, num_experts)
    queries = [query.contiguous() for query in queries]
    sum_in_one_pass([one.contiguous() for one in experts], counted.contiguous(), queries, num_experts, sums_out[:4])
    num_layers, num_samples, d = sums_out[4].shape
    gather_samples_kernel[(num_samples, num_layers)](
        tuple(queries), index.contiguous(), order.contiguous(), sums_out[4], L=num_layers, D=d,
        BD=triton.next_power_of_2(d), num_warps=1,
    )  # fmt: skip
    return sums_out


def _empty_layer_sums(
    experts: Sequence[Tensor], queries: Sequence[Tensor], index: Tensor, num_experts: int
) -> LayerSums:
    """Empty outputs of `sum_layers`."""
    num_layers, d = len(queries), queries[0].shape[1]
    sample = queries[0].new_empty(num_layers, index.shape[1], d, dtype=torch.float32)
    return *_empty_sums(experts[0], queries[0], num_experts, num_layers), sample


@sum_layers.register_fake
def _(
    experts: list[Tensor],
    counted: Tensor,  # noqa: ARG001
    queries: list[Tensor],
    index: Tensor,
    order: Tensor,  # noqa: ARG001
    num_experts: int,
) -> LayerSums:
    return _empty_layer_sums(experts, queries, index, num_experts)

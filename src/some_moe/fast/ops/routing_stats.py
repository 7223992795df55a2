"""What gravity reads of a step's routing: sums over the counted tokens, by expert.

Up to 64 experts, and a width of 512, all layers are summed at once, when they have run: the queries are read once, and
no marks are stored. Each program adds up its own tokens of one layer and leaves one row of a table; the few rows of a
layer are added up in the same order every time. One launch for all layers has longer programs and fewer rows than one a
layer. More experts are marked in a table (N, 3·E), layer by layer, and all sums are products with it.

Shapes: L layers, N tokens, E experts, K chosen, D model width, S samples.
"""
# mypy: disable-error-code=assignment
# (The tuples grow, part by part.)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_EXPERTS = 64  # one program holds the sums of all experts, (512, 64) at most, in its registers
MAX_WIDTH = 512
PROGRAMS = 132  # at most, over all layers: about one a multiprocessor, and each leaves a row of E · D sums
TOKENS = 64  # that a program takes at a time
PART = 128  # columns: as many as the rows of a product that eight warps share
WARPS, STAGES = 8, 3
NOT_SAMPLED = tl.constexpr(torch.iinfo(torch.int64).max)


@triton.jit
def pick(pointers, number, SIZE: tl.constexpr):
    """The pointer of this number among SIZE."""
    found = pointers[0]
    for other in tl.static_range(1, SIZE):
        found = tl.where(number == other, pointers[other], found)
    return found


@triton.jit
def load_parts(query, token, exists, D: tl.constexpr, PART: tl.constexpr):
    """These tokens' rows of query (N, D), in parts of PART columns; zeros where there are none."""
    parts = ()
    for first in tl.static_range(0, D, PART):
        column = first + tl.arange(0, PART)
        keep = exists[:, None] & (column < D)[None, :]
        parts += (tl.load(query + token[:, None] * D + column[None, :], mask=keep, other=0.0),)
    return parts


@triton.jit
def invert_lengths(parts):
    """One over the length of each row, zero for a row of zeros."""
    size = tl.abs(parts[0].to(tl.float32))
    for part in tl.static_range(1, len(parts)):
        size = tl.maximum(size, tl.abs(parts[part].to(tl.float32)))
    largest = tl.max(size, 1)
    # A power of two, so that squares neither overflow nor vanish.
    factor = tl.where(largest > 2.0**50, 2.0**-80, tl.where(largest < 2.0**-50, 2.0**80, 1.0))
    squares = tl.zeros_like(size)
    for part in tl.static_range(len(parts)):
        x = parts[part].to(tl.float32) * factor[:, None]
        squares += x * x
    length = tl.sqrt(tl.sum(squares, 1)) / factor
    return tl.where(length > 0, 1.0 / length, 0.0)


@triton.jit
def add_products(sums, parts, marks):
    """sums + partsᵀ · marks, part by part."""
    new = ()
    for part in tl.static_range(len(parts)):
        new += (tl.dot(tl.trans(parts[part]), marks, sums[part]),)
    return new


@triton.jit
def partial_sums_kernel(
    queries, choices, counted, table, num_tokens, per_program, counted_stride, width, L: tl.constexpr, E: tl.constexpr,
    BE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One row of table (L, programs, width): the sums of unit queries (E, D), co-selections (E, E), and how many tokens
    are counted. queries and choices: L pointers each, to (N, D) and (N, K).

    Queries are taken in parts of PART columns. Products have the columns first: these are shared out among the warps,
    in every product alike, so that no sums change hands.
    """
    layer = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * per_program
    num_left = tl.minimum(num_tokens - first, per_program).to(tl.int32)
    query = pick(queries, layer, L) + first * D
    experts = pick(choices, layer, L) + first * K
    counted += layer.to(tl.int64) * counted_stride + first
    expert = tl.arange(0, BE)
    sums = ()
    for _ in tl.static_range(0, D, PART):
        sums += (tl.zeros((PART, BE), dtype=tl.float32),)
    pairs = tl.zeros((BE, BE), dtype=tl.float32)
    number = tl.zeros((TOKENS,), dtype=tl.float32)
    # Single bytes cannot be copied ahead as the rest is; they are loaded one round before they are needed.
    ahead = tl.load(counted + tl.arange(0, TOKENS), mask=tl.arange(0, TOKENS) < num_left, other=0)
    for start in range(0, per_program, TOKENS):
        token = start + tl.arange(0, TOKENS)
        exists = token < num_left
        enters = ahead != 0
        ahead = tl.load(counted + token + TOKENS, mask=token + TOKENS < num_left, other=0)
        number += enters.to(tl.float32)
        # One bit an expert: to test one costs as much for many choices as for one.
        bits = tl.zeros((TOKENS,), dtype=tl.int64)
        for k in tl.static_range(K):
            bits |= tl.full((TOKENS,), 1, tl.int64) << tl.load(experts + token * K + k, mask=exists, other=0)
        bits = tl.where(enters, bits, 0)
        chosen = ((bits[None, :] >> expert[:, None].to(tl.int64)) & 1) != 0

        rows = load_parts(query, token, exists, D, PART)
        scale = invert_lengths(rows)
        dtype: tl.constexpr = query.dtype.element_ty
        high = scale.to(dtype)
        low = (scale - high.to(tl.float32)).to(dtype)
        nothing = tl.zeros((BE, TOKENS), dtype=dtype)
        ones = tl.where(chosen, tl.full((BE, TOKENS), 1.0, tl.float32).to(dtype), nothing)
        highs = tl.trans(tl.where(chosen, high[None, :], nothing))
        lows = tl.trans(tl.where(chosen, low[None, :], nothing))
        pairs = tl.dot(ones, tl.trans(ones), pairs)
        sums = add_products(add_products(sums, rows, highs), rows, lows)

    known = expert < E
    out = table + (layer * tl.num_programs(0) + tl.program_id(0)) * width
    for part in tl.static_range(len(sums)):
        column = part * PART + tl.arange(0, PART)
        keep = (column < D)[:, None] & known[None, :]
        tl.store(out + expert[None, :] * D + column[:, None], sums[part], mask=keep)
    out += E * D
    tl.store(out + expert[:, None] * E + expert[None, :], pairs, mask=known[:, None] & known[None, :])
    tl.store(out + E * E, tl.sum(number, 0))


@triton.jit
def total_sums_kernel(
    table, counts, pairs, query_sum, num_counted, num_rows, width, E: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up each layer's at most ROWS rows of table (L, num_rows, width); store each column's sum where it belongs."""
    layer = tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = (layer * num_rows + row)[:, None] * width + column[None, :]
    total = tl.sum(tl.load(table + at, mask=(row < num_rows)[:, None], other=0.0), 0)
    whole = total.to(tl.int64)
    tl.store(query_sum + layer * (E * D) + column, total, mask=column < E * D)
    column -= E * D
    is_pair = (column >= 0) & (column < E * E)
    tl.store(pairs + layer * (E * E) + column, whole, mask=is_pair)
    tl.store(counts + layer * E + column // (E + 1), whole, mask=is_pair & (column % (E + 1) == 0))  # the diagonal
    column -= E * E
    tl.store(num_counted + layer + column, whole, mask=column == 0)


@triton.jit
def samples_kernel(queries, place, order, sample, L: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """sample (L, S, D): the queries at these places (L, S), scaled to unit length; zero where nobody was sampled."""
    layer = tl.program_id(1)
    at = layer * tl.num_programs(0) + tl.program_id(0)
    column = tl.arange(0, BD)
    keep = (column < D) & (tl.load(order + at) < NOT_SAMPLED)
    x = tl.load(pick(queries, layer, L) + tl.load(place + at) * D + column, mask=keep, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 0)
    x = x / tl.where(largest > 0, largest, 1.0)  # squares must not overflow
    length = tl.sqrt(tl.sum(x * x, 0))
    tl.store(sample + at * D + column, x / tl.maximum(length, 1.0), mask=column < D)


@triton.jit
def mark_kernel(
    query, experts, counted, marks, numbers, num_tokens, E: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Mark each counted token's experts in marks (N, 3E): 1 at e, and 1/|query| in two bf16 parts at E + e and 2E + e.
    All else is 0. numbers: how many of each program's tokens are counted."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    column = tl.arange(0, BD)
    x = tl.load(
        query + token[:, None] * D + column[None, :], mask=exists[:, None] & (column < D)[None, :], other=0.0
    ).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    x = x / tl.where(largest > 0, largest, 1.0)[:, None]  # squares must not overflow
    norm = largest * tl.sqrt(tl.sum(x * x, 1))
    scale = tl.where(norm > 0, 1.0 / norm, 0.0)
    high = scale.to(tl.bfloat16)
    low = (scale - high.to(tl.float32)).to(tl.bfloat16)
    enters = exists & (tl.load(counted + token, mask=exists, other=0) != 0)
    tl.store(numbers + tl.program_id(0), tl.sum(enters.to(tl.int32), 0))

    expert = tl.arange(0, BE)[None, :]
    chosen = tl.zeros((BLOCK, BE), dtype=tl.int1)
    for k in tl.static_range(K):
        chosen |= expert == tl.load(experts + token * K + k, mask=enters, other=-1)[:, None]
    keep = exists[:, None] & (expert < E)
    row = marks + token[:, None] * (3 * E)
    nothing = tl.zeros((BLOCK, BE), dtype=tl.bfloat16)
    tl.store(row + expert, chosen.to(tl.float32).to(tl.bfloat16), mask=keep)
    tl.store(row + E + expert, tl.where(chosen, high[:, None], nothing), mask=keep)
    tl.store(row + 2 * E + expert, tl.where(chosen, low[:, None], nothing), mask=keep)


@triton.jit
def finish_kernel(
    products, sums, numbers, counts, pairs, query_sum, num_counted, num_parts, E: tl.constexpr, BE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn the products of marks into what `sum_by_expert` returns: program e < E for expert e, the last for the rest.

    products (E, E); sums (2E, D): of both parts of the unit queries.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BD)
    inside = column < D
    if row < E:
        high = tl.load(sums + row * D + column, mask=inside)
        low = tl.load(sums + (E + row) * D + column, mask=inside)
        tl.store(query_sum + row * D + column, high + low, mask=inside)
        other = tl.arange(0, BE)
        found = tl.load(products + row * E + other, mask=other < E)
        tl.store(pairs + row * E + other, found.to(tl.int64), mask=other < E)
        tl.store(counts + row, tl.load(products + row * E + row).to(tl.int64))
    else:
        number = tl.zeros((BLOCK,), dtype=tl.int64)
        for first in range(0, num_parts, BLOCK):
            part = first + tl.arange(0, BLOCK)
            number += tl.load(numbers + part, mask=part < num_parts, other=0)
        tl.store(num_counted, tl.sum(number, 0))


def can_sum(d_model: int, num_experts: int) -> bool:
    """Whether one program can hold the sums of all experts."""
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
    width = columns * triton.cdiv(num_experts * (d + num_experts) + 1, columns)  # padded: each row is aligned
    table = torch.empty(num_layers, programs, width, dtype=torch.float32, device=queries[0].device)
    partial_sums_kernel[(programs, num_layers)](
        tuple(queries), tuple(experts), counted, table, num_tokens, per_program, num_tokens * (counted.dim() - 1),
        width, L=num_layers, E=num_experts, BE=MAX_EXPERTS, K=top_k, D=d, PART=PART, TOKENS=TOKENS, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    total_sums_kernel[(width // columns, num_layers)](
        table, *totals, programs, width, E=num_experts, D=d, ROWS=rows, COLUMNS=columns
    )


Sums = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("some_moe::sum_by_expert", mutates_args=())
def sum_by_expert(experts: Tensor, counted: Tensor, query: Tensor, num_experts: int) -> Sums:
    """Sums over the counted ones of N tokens with bf16 queries (N, D).

    Selections (E,) and co-selections (E, E) int64, exact; sums of unit queries (E, D); how many are counted () int64.
    All are bf16 products with float32 sums: ones are exact, and a length leaves an error of 2⁻¹⁷. Few experts take one
    pass; many are marked in a table first.
    """
    experts, counted, query = experts.contiguous(), counted.contiguous(), query.contiguous()
    num_tokens, top_k = experts.shape
    made = _empty_sums(experts, query, num_experts)
    if can_sum(query.shape[1], num_experts):
        sum_in_one_pass([experts], counted, [query], num_experts, made)
        return made
    padded, padded_experts = triton.next_power_of_2(query.shape[1]), triton.next_power_of_2(num_experts)
    sizes = {"E": num_experts, "BE": padded_experts, "D": query.shape[1], "BD": padded}
    block = max(1, 2048 // max(padded, padded_experts))
    programs = triton.cdiv(num_tokens, block)
    marks = query.new_empty(num_tokens, 3 * num_experts)
    numbers = torch.empty(programs, dtype=torch.int32, device=query.device)
    mark_kernel[(programs,)](query, experts, counted, marks, numbers, num_tokens, K=top_k, BLOCK=block, **sizes)
    ones = marks[:, :num_experts]
    products = torch.mm(ones.T, ones, out_dtype=torch.float32)
    sums = torch.mm(marks[:, num_experts:].T, query, out_dtype=torch.float32)
    finish_kernel[(num_experts + 1,)](products, sums, numbers, *made, programs, BLOCK=1024, **sizes)
    return made


def _empty_sums(experts: Tensor, query: Tensor, num_experts: int, *num_layers: int) -> Sums:
    """Room for what `sum_by_expert` returns; for so many layers, where a number is given."""
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


@torch.library.custom_op("some_moe::sum_layers", mutates_args=())
def sum_layers(
    experts: list[Tensor], counted: Tensor, queries: list[Tensor], place: Tensor, order: Tensor, num_experts: int
) -> LayerSums:
    """`sum_by_expert` of L layers, where `can_sum` admits: each tensor has the layers first. The fifth is the
    samples: unit queries (L, S, D) at these places (L, S), zero where the order (L, S) says that nobody was sampled.

    experts: L of (N, K); queries: L of (N, D) in bf16; counted (N,) or (L, N).
    """
    made = _empty_layer_sums(experts, queries, place, num_experts)
    queries = [query.contiguous() for query in queries]
    sum_in_one_pass([one.contiguous() for one in experts], counted.contiguous(), queries, num_experts, made[:4])
    num_layers, num_samples, d = made[4].shape
    samples_kernel[(num_samples, num_layers)](
        tuple(queries), place.contiguous(), order.contiguous(), made[4], L=num_layers, D=d,
        BD=triton.next_power_of_2(d), num_warps=1,
    )  # fmt: skip
    return made


def _empty_layer_sums(
    experts: Sequence[Tensor], queries: Sequence[Tensor], place: Tensor, num_experts: int
) -> LayerSums:
    """Room for what `sum_layers` returns."""
    num_layers, d = len(queries), queries[0].shape[1]
    sample = queries[0].new_empty(num_layers, place.shape[1], d, dtype=torch.float32)
    return *_empty_sums(experts[0], queries[0], num_experts, num_layers), sample


@sum_layers.register_fake
def _(
    experts: list[Tensor],
    counted: Tensor,  # noqa: ARG001
    queries: list[Tensor],
    place: Tensor,
    order: Tensor,  # noqa: ARG001
    num_experts: int,
) -> LayerSums:
    return _empty_layer_sums(experts, queries, place, num_experts)

"""The gradient of a token embedding: a segment sum of the tokens' gradients by token id, in float32, without atomics.

Ids are assigned to buckets (id modulo their number), and tokens are sorted by bucket, a counting sort:
`embedding_rank_kernel` makes each block's histogram and ranks its tokens, `embedding_sort_kernel` makes the prefix sums
over the blocks and gives each token its slot. `embedding_segment_sum_kernel` sums the rows of a bucket for all its ids
at once, as a GEMM with a one-hot matrix, so that it matters little how often an id occurs. A bucket of many slots is
summed in chunks (split-K), and `embedding_reduce_kernel` reduces their partial sums. All orders are fixed.

One-hots are exact, and so are the three bf16 terms that float32 rows are split into. But a NaN or infinity in a row
reaches all ids of its bucket: zero times infinity is NaN.

Shapes: N tokens, V ids, D model width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from some_moe.fast.ops.opaque import opaque

BLOCK = 256  # tokens at least that are ranked together, all pairs compared
BLOCKS = 128  # beyond so many blocks they are longer, for each program of the sort reads all histograms
MAX_BLOCK = 512  # so much: from 65,536 tokens on there are more blocks again
WIDTH = 16  # tokens with which a block's are compared at a time
BINS = 512  # buckets a program counts at most
COUNTS = 16384  # counts that a program of the sort holds at a time
CHUNK = 256  # slots that one program sums at most
TOKENS = 64  # so many at a time
WARPS, STAGES = 4, 1  # occupancy hides the latency of loads better than a software pipeline
REDUCE_ROWS, REDUCE_COLUMNS = 32, 128  # of the chunks' partial sums that one program reduces at a time
REDUCE_PROGRAMS = 8  # buckets of many slots that are reduced in parallel


@triton.jit
def embedding_rank_kernel(
    tokens, ranks, counts, num_tokens, BUCKETS: tl.constexpr, PADDED: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """counts (blocks, PADDED): this block's histogram of buckets; ranks (N,): of each token within its bucket here."""
    block, first = tl.program_id(0), tl.program_id(1) * BINS
    slot = block * BLOCK + tl.arange(0, BLOCK)
    exists = slot < num_tokens
    mine = tl.load(tokens + slot, mask=exists, other=0).to(tl.int32) % BUCKETS
    own_bin = mine - first
    histogram = tl.histogram(own_bin, BINS, mask=exists & (own_bin >= 0) & (own_bin < BINS))
    tl.store(counts + block * PADDED + first + tl.arange(0, BINS), histogram)
    if first == 0:
        before = tl.zeros((BLOCK, WIDTH), dtype=tl.int32)
        for start in tl.static_range(0, BLOCK, WIDTH):  # unrolled: all loads in flight at once
            other = block * BLOCK + start + tl.arange(0, WIDTH)
            theirs = tl.load(tokens + other, mask=other < num_tokens, other=0).to(tl.int32) % BUCKETS
            before += ((mine[:, None] == theirs[None, :]) & (other[None, :] < slot[:, None])).to(tl.int32)
        tl.store(ranks + slot, tl.sum(before, 1), mask=exists)


@triton.jit
def embedding_sort_kernel(
    tokens, ranks, counts, starts, order, num_tokens, num_blocks, BUCKETS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """order (N,): tokens by bucket, each bucket's in their own order; starts (BUCKETS + 2,): each bucket's first slot,
    N, and the most slots that a bucket has.

    Every program reduces all histograms for itself, which costs less than another launch.
    """
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    mine = tl.load(tokens + token, mask=exists, other=0).to(tl.int32) % BUCKETS
    rank = tl.load(ranks + token, mask=exists, other=0)
    bucket = tl.arange(0, PADDED)
    here = tl.zeros((ROWS, PADDED), dtype=tl.int32)
    before = tl.zeros((ROWS, PADDED), dtype=tl.int32)
    for first in range(0, num_blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        at = counts + row[:, None] * PADDED + bucket[None, :]
        count = tl.load(at, mask=(row < num_blocks)[:, None], other=0)
        here += count
        before += tl.where((row < block)[:, None], count, 0)
    total = tl.sum(here, 0)
    start = tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(starts + bucket, start, mask=bucket < BUCKETS)
        tl.store(starts + BUCKETS, num_tokens)
        tl.store(starts + BUCKETS + 1, tl.max(total, 0))
    slot = tl.gather(start + tl.sum(before, 0), mine, 0) + rank
    tl.store(order + slot, token, mask=exists)


@triton.jit
def embedding_segment_sum_kernel(
    grad, tokens, starts, order, partial, out, num_tokens, num_ids, num_partial, D: tl.constexpr,
    BUCKETS: tl.constexpr, IDS: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """WIDTH columns of out (V, D), for the ids of a bucket; or of partial (num_partial, IDS, D), for a chunk of slots.

    Buckets of more than CHUNK slots leave their sums in partial. Of these at most one comes into a chunk from before,
    and at most one begins in it: programs 2·i and 2·i + 1 are theirs, of chunk i.
    """
    program = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    in_chunk = program < num_partial
    enters = program % 2 == 0
    if in_chunk & (tl.load(starts + BUCKETS + 1) <= CHUNK):
        return
    if in_chunk:
        low = program // 2 * CHUNK
        high = tl.minimum(low + CHUNK, num_tokens)
        at = tl.load(order + tl.where(enters, low, high - 1))
        bucket = tl.load(tokens + at).to(tl.int32) % BUCKETS
    else:
        low = program * 0
        high = num_tokens + low
        bucket = program - num_partial
    first = tl.load(starts + bucket)
    last = tl.load(starts + bucket + 1)
    is_long = last - first > CHUNK
    if (is_long != in_chunk) | (in_chunk & ((first < low) != enters)):
        return
    first, last = tl.maximum(first, low), tl.minimum(last, high)

    own = tl.arange(0, IDS)
    total = tl.zeros((WIDTH, IDS), dtype=tl.float32)
    for start in range(first, last, TOKENS):
        slot = start + tl.arange(0, TOKENS)
        exists = slot < last
        token = tl.load(order + slot, mask=exists, other=0)
        rows = grad + token.to(tl.int64)[:, None] * D + column[None, :]
        row = tl.load(rows, mask=exists[:, None] & (column < D)[None, :], other=0.0)
        # Beyond the last slot rows are zeros, of whatever id.
        id_in_bucket = tl.load(tokens + token).to(tl.int32) // BUCKETS
        one_hot = (id_in_bucket[:, None] == own[None, :]).to(tl.float32)
        if grad.dtype.element_ty == tl.float32:
            one_hot = one_hot.to(tl.bfloat16)
            term_1 = row.to(tl.bfloat16)
            rest = row - term_1.to(tl.float32)
            term_2 = rest.to(tl.bfloat16)
            term_3 = (rest - term_2.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(tl.trans(term_1), one_hot, total)
            total = tl.dot(tl.trans(term_2), one_hot, total)
            total = tl.dot(tl.trans(term_3), one_hot, total)
        else:
            total = tl.dot(tl.trans(row), one_hot.to(row.dtype), total)

    inside = (column < D)[:, None]
    if in_chunk:
        id_row = (program * IDS + own).to(tl.int64)
        tl.store(partial + id_row[None, :] * D + column[:, None], total, mask=inside)
    else:
        id_row = (own * BUCKETS + bucket).to(tl.int64)
        tl.store(out + id_row[None, :] * D + column[:, None], total, mask=inside & (id_row < num_ids)[None, :])


@triton.jit
def embedding_reduce_kernel(
    partial, starts, out, num_ids, D: tl.constexpr, BUCKETS: tl.constexpr, PADDED: tl.constexpr, IDS: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The ids' rows of out (V, D), for buckets of more than CHUNK slots; COLUMNS: of the bucket's IDS · D elements."""
    if tl.load(starts + BUCKETS + 1) <= CHUNK:
        return
    bucket = tl.arange(0, PADDED)
    first = tl.load(starts + bucket, mask=bucket < BUCKETS, other=0)
    last = tl.load(starts + bucket + 1, mask=bucket < BUCKETS, other=0)
    is_long = (last - first > CHUNK).to(tl.int32)
    rank = tl.cumsum(is_long, 0) * is_long  # counted from 1 on
    element = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for wanted in range(tl.program_id(0) + 1, tl.sum(is_long, 0) + 1, tl.num_programs(0)):
        chosen = rank == wanted
        this = tl.sum(tl.where(chosen, bucket, 0), 0)
        begin = tl.sum(tl.where(chosen, first, 0), 0) // CHUNK
        end = (tl.sum(tl.where(chosen, last, 0), 0) - 1) // CHUNK + 1
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(begin, end, ROWS):
            chunk = start + tl.arange(0, ROWS)
            row = (2 * chunk + (chunk == begin).to(tl.int32)).to(tl.int64)
            mask = (chunk < end)[:, None] & (element < IDS * D)[None, :]
            total += tl.load(partial + row[:, None] * (IDS * D) + element[None, :], mask=mask, other=0.0)
        id_row = (element // D * BUCKETS + this).to(tl.int64)
        mask = (element < IDS * D) & (id_row < num_ids)
        tl.store(out + id_row * D + element % D, tl.sum(total, 0), mask=mask)


def pad(num_buckets: int) -> int:
    """Buckets in a vector: a power of two, and no fewer than a warp counts."""
    return max(32, triton.next_power_of_2(num_buckets))


def sort_by_bucket(tokens: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """starts and order as of `embedding_sort_kernel`, int32 both. tokens (N,), N > 0."""
    num_tokens, padded = len(tokens), pad(num_buckets)
    block = min(MAX_BLOCK, max(BLOCK, triton.next_power_of_2(triton.cdiv(num_tokens, BLOCKS))))
    num_blocks, bins = triton.cdiv(num_tokens, block), min(BINS, padded)
    counts = torch.empty(num_blocks, padded, dtype=torch.int32, device=tokens.device)
    ranks, order = torch.empty(2, num_tokens, dtype=torch.int32, device=tokens.device)
    starts = torch.empty(num_buckets + 2, dtype=torch.int32, device=tokens.device)
    embedding_rank_kernel[(num_blocks, padded // bins)](
        tokens, ranks, counts, num_tokens, BUCKETS=num_buckets, PADDED=padded, BINS=bins, BLOCK=block, WIDTH=WIDTH,
        num_warps=8,
    )  # fmt: skip
    rows = min(triton.next_power_of_2(num_blocks), max(1, COUNTS // padded))
    embedding_sort_kernel[(num_blocks,)](
        tokens, ranks, counts, starts, order, num_tokens, num_blocks, BUCKETS=num_buckets, PADDED=padded, BLOCK=block,
        ROWS=rows, num_warps=min(16, max(4, rows * padded // 1024)),
    )  # fmt: skip
    return starts, order


@opaque("some_moe::embedding_gradient")
def embedding_gradient(grad: Tensor, tokens: Tensor, num_ids: int) -> Tensor:
    """Sums (V, D) float32 of the rows of grad (…, D) that belong to each id. tokens (…): ids from 0 to V − 1."""
    grad, tokens = grad.contiguous(), tokens.flatten().contiguous()  # flat views may have gaps
    num_tokens, d = len(tokens), grad.shape[-1]
    if grad.numel() == 0:
        return torch.zeros(num_ids, d, dtype=torch.float32, device=grad.device)
    out = torch.empty(num_ids, d, dtype=torch.float32, device=grad.device)
    # A bucket has ids enough to be worth a GEMM, few enough for a program's registers; many ids need fewer buckets.
    ids = 32 if num_ids <= 16384 else 64
    num_buckets = triton.cdiv(num_ids, ids)
    starts, order = sort_by_bucket(tokens, num_buckets)
    num_chunks = triton.cdiv(num_tokens, CHUNK) if num_tokens > CHUNK else 0
    partial = torch.empty(2 * num_chunks, ids, d, dtype=torch.float32, device=grad.device)
    width = 128 if d > 64 else 64
    embedding_segment_sum_kernel[(2 * num_chunks + num_buckets, triton.cdiv(d, width))](
        grad, tokens, starts, order, partial, out, num_tokens, num_ids, 2 * num_chunks, D=d, BUCKETS=num_buckets,
        IDS=ids, CHUNK=CHUNK, TOKENS=TOKENS, WIDTH=width, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if num_chunks > 0:
        embedding_reduce_kernel[(min(REDUCE_PROGRAMS, num_chunks), triton.cdiv(ids * d, REDUCE_COLUMNS))](
            partial, starts, out, num_ids, D=d, BUCKETS=num_buckets, PADDED=pad(num_buckets), IDS=ids, CHUNK=CHUNK,
            ROWS=REDUCE_ROWS, COLUMNS=REDUCE_COLUMNS,
        )  # fmt: skip
    return out


@embedding_gradient.register_fake
def _(grad: Tensor, tokens: Tensor, num_ids: int) -> Tensor:  # noqa: ARG001
    return grad.new_empty(num_ids, grad.shape[-1], dtype=torch.float32)

"""The permutation of slots by expert: a stable counting sort, each expert's rows padded to BLOCK_M.

`permute_count_kernel` makes a histogram for each block of slots, `permute_scan_kernel` an inclusive prefix sum over the
blocks, and `permute_index_kernel` the row of each slot. Nothing is read back to the host; deterministic.
Shapes: N tokens, K experts each, S = N·K slots (token, choice), E experts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 128  # slots a program of permute_index_kernel compares with each other
BINS = 512  # experts a program of permute_count_kernel counts
WIDTH = 32  # so many at a time: more registers would mean lower occupancy
COLUMNS = 4  # experts a program of permute_scan_kernel scans


@dataclass(frozen=True)
class Permutation:
    """Slots sorted by expert, stably; each expert's rows begin at a multiple of BLOCK_M."""

    row: Tensor  # (N, K) int32: the row of each slot
    tile_expert: Tensor  # (max_tiles,) int32: the expert of each M-tile, or −1 beyond the last in use
    num_tiles: Tensor  # () int32: M-tiles in use
    spans: Tensor  # (2, E) int32: each expert's first row, and how many it has without padding


@triton.jit
def permute_count_kernel(experts, counts, num_slots, E: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """counts (blocks, E): the histogram of each block of slots over the experts."""
    block, first = tl.program_id(0), tl.program_id(1) * BINS
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + slot, mask=slot < num_slots, other=-1).to(tl.int32) - first
    histogram = tl.histogram(expert, BINS, mask=(expert >= 0) & (expert < BINS) & (slot < num_slots))
    column = first + tl.arange(0, BINS)
    tl.store(counts + block * E + column, histogram, mask=column < E)


@triton.jit
def permute_scan_kernel(counts, num_blocks, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inclusive prefix sum of counts (blocks, E) over the blocks, in place."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), dtype=tl.int32)
    for first in range(0, num_blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_blocks)[:, None] & (expert < E)[None, :]
        at = counts + row[:, None] * E + expert[None, :]
        count = tl.load(at, mask=mask, other=0)
        tl.store(at, before[None, :] + tl.cumsum(count, 0), mask=mask)
        before += tl.sum(count, 0)


@triton.jit
def permute_index_kernel(
    experts, totals, rows, tile_expert, num_tiles, spans, num_slots, num_blocks, max_tiles, E: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """rows (S,) of PART slots, tile_expert of TILES M-tiles; num_tiles (), those in use, and spans (2, E).

    totals (blocks, E): the inclusive prefix sums.
    """
    expert = tl.arange(0, PADDED)
    total = tl.load(totals + (num_blocks - 1) * E + expert, mask=expert < E, other=0)
    expert_tiles = (total + BLOCK_M - 1) // BLOCK_M
    tile_end = tl.cumsum(expert_tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(num_tiles, tl.sum(expert_tiles, 0))
        tl.store(spans + expert, (tile_end - expert_tiles) * BLOCK_M, mask=expert < E)
        tl.store(spans + E + expert, total, mask=expert < E)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    if tl.program_id(0) * TILES < max_tiles:
        # As many experts as end at this tile or before it come before its own.
        expert_of_tile = tl.sum((tile_end[None, :] <= tile[:, None]).to(tl.int32), 1)
        tl.store(tile_expert + tile, tl.where(expert_of_tile < E, expert_of_tile, -1), mask=tile < max_tiles)

    first = tl.program_id(0) * PART
    if first >= num_slots:
        return
    slot = first + tl.arange(0, PART)
    exists = slot < num_slots
    own_expert = tl.load(experts + slot, mask=exists, other=0).to(tl.int32)
    block = first // BLOCK
    row = tl.gather((tile_end - expert_tiles) * BLOCK_M, own_expert, 0)
    row += tl.load(totals + (block - 1) * E + own_expert, mask=exists & (block > 0), other=0)
    # The rank within the block: slots before this one with the same expert.
    for start in range(block * BLOCK, first, WIDTH):
        other_expert = tl.load(experts + start + tl.arange(0, WIDTH)).to(tl.int32)
        row += tl.sum((own_expert[:, None] == other_expert[None, :]).to(tl.int32), 1)
    for start in tl.static_range(0, PART, WIDTH):  # unrolled: all loads in flight at once
        other = first + start + tl.arange(0, WIDTH)
        other_expert = tl.load(experts + other, mask=other < num_slots, other=-1).to(tl.int32)
        same = (own_expert[:, None] == other_expert[None, :]) & (other[None, :] < slot[:, None])
        row += tl.sum(same.to(tl.int32), 1)
    tl.store(rows + slot, row, mask=exists)


def max_tiles(num_slots: int, num_experts: int, block_m: int) -> int:
    """An upper bound of the M-tiles in use for any routing: known without a host sync."""
    return -(-num_slots // block_m) + min(num_experts, num_slots)


def next_power_of_2(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def block_size(num_experts: int) -> int:
    """Slots of one histogram: the more experts, the wider the histograms, and the fewer there may be."""
    return min(1024, max(PART, next_power_of_2(num_experts) // 4))


def permute_slots(experts: Tensor, num_experts: int, block_m: int) -> Permutation:
    """The permutation of the slots of `experts` (N, K) int64, padded to `block_m` rows per expert."""
    experts = experts.contiguous()
    num_slots, block, most = experts.numel(), block_size(num_experts), max_tiles(experts.numel(), num_experts, block_m)
    padded = next_power_of_2(num_experts)
    num_blocks = triton.cdiv(num_slots, block)
    counts = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=experts.device)
    row = torch.empty(experts.shape, dtype=torch.int32, device=experts.device)
    tile_expert = torch.empty(most, dtype=torch.int32, device=experts.device)
    num_tiles = torch.empty((), dtype=torch.int32, device=experts.device)
    spans = torch.empty(2, num_experts, dtype=torch.int32, device=experts.device)

    bins = min(BINS, max(32, padded))
    permute_count_kernel[(num_blocks, triton.cdiv(num_experts, bins))](
        experts, counts, num_slots, E=num_experts, BLOCK=block, BINS=bins
    )
    scan_rows = min(1024, next_power_of_2(num_blocks))
    permute_scan_kernel[(triton.cdiv(num_experts, COLUMNS),)](
        counts, num_blocks, E=num_experts, ROWS=scan_rows, COLUMNS=COLUMNS,
        num_warps=min(16, max(1, scan_rows * COLUMNS // 256)),
    )  # fmt: skip
    tiles_per_program = max(1, min(4, 4096 // padded))
    permute_index_kernel[(max(triton.cdiv(num_slots, PART), triton.cdiv(most, tiles_per_program)),)](
        experts, counts, row, tile_expert, num_tiles, spans, num_slots, num_blocks, most, E=num_experts,
        PADDED=padded, BLOCK_M=block_m, BLOCK=block, PART=PART, WIDTH=WIDTH, TILES=tiles_per_program,
    )  # fmt: skip
    return Permutation(row, tile_expert, num_tiles, spans)

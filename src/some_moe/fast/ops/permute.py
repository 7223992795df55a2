"""Where every slot goes when slots are laid out by expert: counted in three kernels, with no sort.

`count_kernel` counts each block's slots by expert, `scan_kernel` adds the counts up from block to block, and
`place_kernel` gives each slot its row. Nothing is read back to the host, and the same slots get the same rows.
Shapes: N tokens, K experts each, S = N·K slots (token, choice), E experts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 128  # slots a program of place_kernel compares with each other
BINS = 512  # experts a program of count_kernel counts
WIDTH = 32  # so many at a time: with more in registers, fewer programs run beside each other
COLUMNS = 4  # experts a program of scan_kernel adds up


@dataclass(frozen=True)
class Placement:
    """Slots in rows: experts in order, each one's slots in order from a multiple of the tile's size on."""

    row: Tensor  # (N, K) int32: the row of each slot
    tile_expert: Tensor  # (most_tiles,) int32: the expert of each tile of `size` rows, or −1 beyond the last used one
    num_tiles: Tensor  # () int32: tiles in use


@triton.jit
def count_kernel(experts, counts, num_slots, E: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """counts (blocks, E): how many of each block's slots an expert has."""
    block, first = tl.program_id(0), tl.program_id(1) * BINS
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + slot, mask=slot < num_slots, other=-1).to(tl.int32) - first
    found = tl.histogram(expert, BINS, mask=(expert >= 0) & (expert < BINS) & (slot < num_slots))
    column = first + tl.arange(0, BINS)
    tl.store(counts + block * E + column, found, mask=column < E)


@triton.jit
def scan_kernel(counts, num_blocks, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add to each block's counts (blocks, E) those of all blocks before it, in place."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), dtype=tl.int32)
    for first in range(0, num_blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        keep = (row < num_blocks)[:, None] & (expert < E)[None, :]
        at = counts + row[:, None] * E + expert[None, :]
        count = tl.load(at, mask=keep, other=0)
        tl.store(at, before[None, :] + tl.cumsum(count, 0), mask=keep)
        before += tl.sum(count, 0)


@triton.jit
def place_kernel(
    experts, totals, rows, tile_expert, used, num_slots, num_blocks, most_tiles, E: tl.constexpr, PADDED: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """rows (S,) of PART slots, tile_expert of TILES tiles, and used (), the number of tiles that have slots.

    totals (blocks, E): up to the end of each block.
    """
    expert = tl.arange(0, PADDED)
    total = tl.load(totals + (num_blocks - 1) * E + expert, mask=expert < E, other=0)
    num_own = (total + SIZE - 1) // SIZE
    last_tile = tl.cumsum(num_own, 0)
    if tl.program_id(0) == 0:
        tl.store(used, tl.sum(num_own, 0))
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    if tl.program_id(0) * TILES < most_tiles:
        # As many experts as end at this tile or before it come before the tile's own.
        passed = tl.sum((last_tile[None, :] <= tile[:, None]).to(tl.int32), 1)
        tl.store(tile_expert + tile, tl.where(passed < E, passed, -1), mask=tile < most_tiles)

    first = tl.program_id(0) * PART
    if first >= num_slots:
        return
    slot = first + tl.arange(0, PART)
    exists = slot < num_slots
    mine = tl.load(experts + slot, mask=exists, other=0).to(tl.int32)
    block = first // BLOCK
    row = tl.gather((last_tile - num_own) * SIZE, mine, 0)
    row += tl.load(totals + (block - 1) * E + mine, mask=exists & (block > 0), other=0)
    # Within the block: the slots before, against which each of mine is held.
    for start in range(block * BLOCK, first, WIDTH):
        theirs = tl.load(experts + start + tl.arange(0, WIDTH)).to(tl.int32)
        row += tl.sum((mine[:, None] == theirs[None, :]).to(tl.int32), 1)
    for start in tl.static_range(0, PART, WIDTH):  # all of it asked for at once
        other = first + start + tl.arange(0, WIDTH)
        theirs = tl.load(experts + other, mask=other < num_slots, other=-1).to(tl.int32)
        same = (mine[:, None] == theirs[None, :]) & (other[None, :] < slot[:, None])
        row += tl.sum(same.to(tl.int32), 1)
    tl.store(rows + slot, row, mask=exists)


def most_tiles(num_slots: int, num_experts: int, size: int) -> int:
    """Never fewer than the tiles in use, whoever has the slots: known without asking the device."""
    return -(-num_slots // size) + min(num_experts, num_slots)


def pad_to_power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def block_size(num_experts: int) -> int:
    """Slots counted together: the more experts, the longer the table's rows, and the fewer there may be."""
    return min(1024, max(PART, pad_to_power(num_experts) // 4))


def place_slots(experts: Tensor, num_experts: int, size: int) -> Placement:
    """Lay out the slots of `experts` (N, K) int64, each expert's from a multiple of `size` on."""
    experts = experts.contiguous()
    num_slots, block, tiles = experts.numel(), block_size(num_experts), most_tiles(experts.numel(), num_experts, size)
    padded = pad_to_power(num_experts)
    num_blocks = triton.cdiv(num_slots, block)
    table = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=experts.device)
    row = torch.empty(experts.shape, dtype=torch.int32, device=experts.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=experts.device)
    used = torch.empty((), dtype=torch.int32, device=experts.device)

    bins = min(BINS, max(32, padded))
    count_kernel[(num_blocks, triton.cdiv(num_experts, bins))](
        experts, table, num_slots, E=num_experts, BLOCK=block, BINS=bins
    )
    at_once = min(1024, pad_to_power(num_blocks))
    scan_kernel[(triton.cdiv(num_experts, COLUMNS),)](
        table, num_blocks, E=num_experts, ROWS=at_once, COLUMNS=COLUMNS,
        num_warps=min(16, max(1, at_once * COLUMNS // 256)),
    )  # fmt: skip
    of_a_program = max(1, min(4, 4096 // padded))
    place_kernel[(max(triton.cdiv(num_slots, PART), triton.cdiv(tiles, of_a_program)),)](
        experts, table, row, tile_expert, used, num_slots, num_blocks, tiles, E=num_experts, PADDED=padded, SIZE=size,
        BLOCK=block, PART=PART, WIDTH=WIDTH, TILES=of_a_program,
    )  # fmt: skip
    return Placement(row, tile_expert, used)

"""The first few of many numbers on a GPU: each block's smallest, and the smallest of these, in two launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 64  # numbers asked for at most: more would not fit in registers beside a block
BLOCKS = (1024, 2048, 4096)
LAST = tl.constexpr(torch.iinfo(torch.int64).max)
NOWHERE = tl.constexpr(torch.iinfo(torch.int32).max)


@triton.jit
def smallest_kernel(
    order, places, first_order, first_places, length, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, HAS_PLACES: tl.constexpr,
):  # fmt: skip
    """The SIZE smallest of each BLOCK of order (length,), in order, and their places: (blocks, SIZE) each.

    places (length,): where the numbers came from; without it, they are where they stand.
    """
    start = tl.program_id(0) * BLOCK
    index = start + tl.arange(0, BLOCK)
    x = tl.load(order + index, mask=index < length, other=LAST)
    # The largest of those with all bits turned over. Sorting carries no place along: it is looked up afterwards.
    found = ~tl.topk(~x, PADDED)
    place = tl.full((PADDED,), NOWHERE, tl.int32)
    for part in range(0, BLOCK, WIDTH):
        stand = start + part + tl.arange(0, WIDTH)
        candidate = tl.load(order + stand, mask=stand < length, other=LAST)
        if HAS_PLACES:
            at = tl.load(places + stand, mask=stand < length, other=NOWHERE).to(tl.int32)
        else:
            at = stand
        same = found[:, None] == candidate[None, :]
        place = tl.minimum(place, tl.min(tl.where(same, at[None, :], NOWHERE), 1))
    turn = tl.arange(0, PADDED)
    out = tl.program_id(0) * SIZE + turn
    tl.store(first_order + out, found, mask=turn < SIZE)
    tl.store(first_places + out, place.to(tl.int64), mask=turn < SIZE)


@torch.library.custom_op("some_moe::first_samples", mutates_args=())
def first_samples(order: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` ≤ MOST smallest of order (N,) int64, in order, and their places; equal ones share the first place."""
    assert 0 < size <= min(MOST, len(order))
    values, places = order.contiguous(), None
    while True:
        length = len(values)
        # Small blocks are quick, and large ones leave few enough for one block to choose from.
        block = next((block for block in BLOCKS if triton.cdiv(length, block) * size <= block), BLOCKS[-1])
        num_blocks = triton.cdiv(length, block)
        best = torch.empty(num_blocks * size, dtype=torch.int64, device=order.device)
        best_places = torch.empty_like(best)
        smallest_kernel[(num_blocks,)](
            values, values if places is None else places, best, best_places, length, SIZE=size,
            PADDED=max(2, triton.next_power_of_2(size)), BLOCK=block, WIDTH=128, HAS_PLACES=places is not None,
            num_warps=max(8, block // 256),
        )  # fmt: skip
        if num_blocks == 1:
            return best, best_places
        values, places = best, best_places


@first_samples.register_fake
def _(order: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return order.new_empty(size), order.new_empty(size)

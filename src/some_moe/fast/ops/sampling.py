"""Sampled tokens of all layers on a GPU: every token's number in a layer's order, each block's smallest, and the
smallest of these, in three launches.

Shapes: L layers, B rows, T positions, N = B·T tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from some_moe.fast.ops.opaque import opaque

MOST = 64  # tokens asked for at most: more would not fit in registers beside a block
BLOCKS = (1024, 2048, 4096)
LAST = tl.constexpr(torch.iinfo(torch.int64).max)
NOWHERE = tl.constexpr(torch.iinfo(torch.int32).max)


@triton.jit
def lowbias32(word):
    """`hashing.mix_`, the lowbias32 integer hash, on unsigned words, where a shift is logical by itself."""
    word ^= word >> 16
    word *= 0x7FEB352D
    word ^= word >> 15
    word *= 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def hash_words(counter, first, second):
    """`hashing.hash_words` on unsigned words."""
    return lowbias32(lowbias32(counter ^ first) + second)


@triton.jit
def order_kernel(salt, layers, rows, counted, order, num_tokens, num_positions, limit, BLOCK: tl.constexpr):
    """order (L, N): `hashing.sample_order` of each counted token, LAST where its upper 31 bits reach the limit."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    layer = tl.program_id(1)
    first_salt = tl.load(salt).to(tl.uint32, bitcast=True)
    second_salt = tl.load(salt + 1).to(tl.uint32, bitcast=True)
    first = first_salt ^ tl.load(layers + 2 * layer).to(tl.uint32, bitcast=True)
    second = second_salt ^ tl.load(layers + 2 * layer + 1).to(tl.uint32, bitcast=True)
    row = tl.load(rows + token // num_positions, mask=exists, other=0).to(tl.uint32)
    row_words = hash_words(row, first, second)
    position = (token % num_positions).to(tl.uint32)
    high = (hash_words(position, row_words, second_salt) & 0x7FFFFFFF).to(tl.int64)
    low = hash_words(position, first_salt, row_words).to(tl.int64)
    enters = (tl.load(counted + token, mask=exists, other=0) != 0) & (high < limit)
    tl.store(order + layer.to(tl.int64) * num_tokens + token, tl.where(enters, high << 32 | low, LAST), mask=exists)


@triton.jit
def smallest_kernel(
    order, places, first_order, first_places, length, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, HAS_PLACES: tl.constexpr,
):  # fmt: skip
    """The SIZE smallest of each BLOCK of order (L, length), in order, and their places: (L, blocks, SIZE) each.

    places (L, length): where the numbers came from; without it, they are where they stand.
    """
    layer = tl.program_id(1).to(tl.int64)
    order += layer * length
    places += layer * length
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
    out = (layer * tl.num_programs(0) + tl.program_id(0)) * SIZE + turn
    tl.store(first_order + out, found, mask=turn < SIZE)
    tl.store(first_places + out, place.to(tl.int64), mask=turn < SIZE)


def smallest(order: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The places (L, size) of the `size` ≤ MOST smallest in each row of order (L, N) int64, and these, in order.

    Equal ones share the first place.
    """
    num_layers = len(order)
    assert 0 < size <= min(MOST, order.shape[1])
    values, places = order.contiguous(), None
    while True:
        length = values.shape[1]
        # Small blocks are quick, and large ones leave few enough for one block to choose from.
        block = next((block for block in BLOCKS if triton.cdiv(length, block) * size <= block), BLOCKS[-1])
        num_blocks = triton.cdiv(length, block)
        best = torch.empty(num_layers, num_blocks * size, dtype=torch.int64, device=order.device)
        best_places = torch.empty_like(best)
        smallest_kernel[(num_blocks, num_layers)](
            values, values if places is None else places, best, best_places, length, SIZE=size,
            PADDED=max(2, triton.next_power_of_2(size)), BLOCK=block, WIDTH=128, HAS_PLACES=places is not None,
            num_warps=max(8, block // 256),
        )  # fmt: skip
        if num_blocks == 1:
            return best_places, best
        values, places = best, best_places


@opaque("some_moe::first_samples")
def first_samples(
    salt: Tensor, layers: Tensor, rows: Tensor, counted: Tensor, limit: int, size: int
) -> tuple[Tensor, Tensor]:
    """Places and orders (L, size) of the first counted tokens, size ≤ MOST; see `model.samples.choose_samples`.

    salt (2,) and layers (L, 2) int32; rows (B,) int64; counted (B, T). An order's upper 31 bits are below the limit.
    """
    num_tokens, block = counted.numel(), 1024
    order = torch.empty(len(layers), num_tokens, dtype=torch.int64, device=counted.device)
    order_kernel[(triton.cdiv(num_tokens, block), len(layers))](
        salt, layers.contiguous(), rows.contiguous(), counted.contiguous(), order, num_tokens, counted.shape[1], limit,
        BLOCK=block,
    )  # fmt: skip
    return smallest(order, size)


@first_samples.register_fake
def _(
    salt: Tensor,  # noqa: ARG001
    layers: Tensor,
    rows: Tensor,
    counted: Tensor,  # noqa: ARG001
    limit: int,  # noqa: ARG001
    size: int,
) -> tuple[Tensor, Tensor]:
    shape = (len(layers), size)
    return rows.new_empty(shape, dtype=torch.int64), rows.new_empty(shape, dtype=torch.int64)

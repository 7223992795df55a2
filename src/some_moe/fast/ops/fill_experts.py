"""Expert weights from a counter-based RNG, one launch a stack: the bits of `model.expert_weights.fill_experts`."""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
def hash_unit24(counter, first, second):
    """The upper 24 bits of the stream's words at `counter`."""
    return (hash_words(counter, first, second) >> 8).to(tl.int32)


@triton.jit
def fill_experts_kernel(out, keys, factor, size, num_zero, SPARSE: tl.constexpr, BLOCK: tl.constexpr):
    """Fill row `expert` of out (E, size) from its four key words, keys (E, 4): values, then where zeros are."""
    expert = tl.program_id(1)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counter = index.to(tl.uint32)
    first = tl.load(keys + expert * 4).to(tl.uint32, bitcast=True)
    second = tl.load(keys + expert * 4 + 1).to(tl.uint32, bitcast=True)
    odd = hash_unit24(counter, first, second) * 2 + (1 - (1 << 24))
    value = odd.to(tl.float32) * tl.load(factor)
    if SPARSE:
        first = tl.load(keys + expert * 4 + 2).to(tl.uint32, bitcast=True)
        second = tl.load(keys + expert * 4 + 3).to(tl.uint32, bitcast=True)
        value *= (hash_unit24(counter, first, second) >= num_zero).to(tl.float32)
    tl.store(out + expert.to(tl.int64) * size + index, value.to(out.dtype.element_ty), mask=index < size)


def fill(out: Tensor, keys: Tensor, factor: Tensor, num_zero: int) -> None:
    """Fill out (E, size) under key words (E, 4) int32; `num_zero` of 2²⁴ hashes are zeros (0: none)."""
    block = 4096
    grid = (triton.cdiv(out.shape[1], block), out.shape[0])
    with torch.cuda.device(out.device):
        fill_experts_kernel[grid](
            out, keys, factor, out.shape[1], num_zero, SPARSE=num_zero > 0, BLOCK=block, num_warps=8
        )

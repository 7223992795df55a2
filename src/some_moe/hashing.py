"""A counter-based integer hash: the same bits on every device, whatever the order of generation.

Arithmetic is on 32-bit integers that wrap around, which every machine does alike; nothing here depends on
floating-point rounding. `mix` is a bijection of 32-bit words (two multiply-xorshift rounds); a stream is
indexed by two key words, which `derive_key` makes from any integers, and a counter.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


def _signed(word: int) -> int:
    """The int32 with the same bits as an unsigned 32-bit word."""
    return word - (1 << 32) if word >= 1 << 31 else word


def mix_int(word: int) -> int:
    """`mix_` for one Python integer in [0, 2³²)."""
    word ^= word >> 16
    word = word * _FIRST & WORD
    word ^= word >> 15
    word = word * _SECOND & WORD
    return word ^ word >> 16


def mix_(words: Tensor) -> Tensor:
    """Scramble int32 words in place. Shifts are made logical by masking the copied sign bits."""
    words ^= (words >> 16) & 0xFFFF
    words *= _FIRST
    words ^= (words >> 15) & 0x1FFFF
    words *= _signed(_SECOND)
    words ^= (words >> 16) & 0xFFFF
    return words


def derive_key(*parts: int) -> tuple[int, int]:
    """Fold non-negative integers of up to 64 bits into two signed 32-bit key words."""
    first, second = 0x9E3779B9, 0x85EBCA6B
    for part in parts:
        for word in (part & WORD, part >> 32 & WORD):
            first = mix_int(first ^ word)
            second = mix_int((second + first) & WORD) ^ word
    return _signed(mix_int(first)), _signed(mix_int(second ^ first))


def hash_words(counter: Tensor, first: Tensor | int, second: Tensor | int) -> Tensor:
    """Return the stream's int32 words at `counter` (int32), under the two key words (broadcast)."""
    return mix_(mix_(counter ^ first) + second)


def to_unit24(words: Tensor) -> Tensor:
    """Keep the upper 24 bits of int32 words: integers in [0, 2²⁴), uniform."""
    return (words >> 8) & 0xFFFFFF


def sample_order(salt: Tensor, layer: int | Tensor, rows: Tensor, num_positions: int) -> Tensor:
    """Give each token (row, position) a 63-bit number that depends on nothing else but salt and layer.

    salt: (2,) int32, made from seed and step. layer: its number, or (…, 2) int32 `derive_key` of one or several, with
    which compiled code is the same for every layer. rows: (B,) row numbers within the step's whole batch.
    Returns (…, B, T) int64, non-negative: the smallest are sampled first, however the batch was split.
    """
    first, second = derive_key(layer) if isinstance(layer, int) else layer[..., None, :].unbind(-1)
    row_words = hash_words(rows.to(torch.int32), salt[0] ^ first, salt[1] ^ second)[..., None]
    position = torch.arange(num_positions, dtype=torch.int32, device=rows.device)
    high = hash_words(position, row_words, salt[1]).to(torch.int64) & 0x7FFFFFFF
    low = hash_words(position, salt[0], row_words).to(torch.int64) & WORD
    return high << 32 | low


def make_layer_words(layers: Iterable[int]) -> Tensor:
    """The numbers of layers as `sample_order` takes them: (L, 2) int32."""
    return torch.tensor([derive_key(layer) for layer in layers], dtype=torch.int32)


def make_salt(seed: int, step: int, device: torch.device | str | None = None) -> Tensor:
    """Two key words for `sample_order`, as a tensor so that a compiled forward does not depend on the step."""
    return torch.tensor(derive_key(seed, step), dtype=torch.int32, device=device)


def assign_experts(ids: Tensor, num_experts: int, top_k: int, seed: int, layer: int) -> Tensor:
    """Choose top_k different experts for each token id by hash alone: (…,) ids → (…, k) int64."""
    first, second = derive_key(seed, layer)
    token_words = hash_words(ids.to(torch.int32), first, second)[..., None]
    expert = torch.arange(num_experts, dtype=torch.int32, device=ids.device)
    words = hash_words(expert.expand(*ids.shape, num_experts), token_words, second)
    return words.topk(top_k, dim=-1).indices

"""Dropout by hash: which elements fall away follows from seed, step, row, position and channel alone.

So the same ones do however a batch is split among micro-batches or processes, compiled or not, resumed or not.
"""

import zlib

import torch
from torch import Tensor, nn

from some_moe.hashing import derive_key, hash_words, to_unit24
from some_moe.model.tokens import TokenInfo

STREAM = zlib.crc32(b"dropout")


class Dropout(nn.Module):
    """Zero a share of the elements in training, and scale the others so that their mean stays. No parameters."""

    def __init__(self, share: float, place: int) -> None:
        """place: a number of its own for every place in the model."""
        super().__init__()
        self.share, self.place = share, place
        self.words: Tensor
        self.register_buffer("words", torch.tensor(derive_key(STREAM, place), dtype=torch.int32), persistent=False)

    @property
    def is_on(self) -> bool:
        return self.share > 0 and self.training and torch.is_grad_enabled()

    def forward(self, x: Tensor, info: TokenInfo) -> Tensor:
        """x (B, T, D) → the same with some elements zero."""
        if not self.is_on:
            return x
        row = hash_words(info.rows.to(torch.int32), info.salt[0] ^ self.words[0], info.salt[1] ^ self.words[1])
        position, channel = (torch.arange(n, dtype=torch.int32, device=x.device) for n in x.shape[1:])
        token = hash_words(position.expand(x.shape[:2]), row[:, None], info.salt[1])
        words = hash_words(channel.expand(x.shape), token[..., None], info.salt[0])
        kept = to_unit24(words) >= round(self.share * 2**24)
        return torch.where(kept, x / (1 - self.share), torch.zeros((), dtype=x.dtype, device=x.device))

"""What a model must know about a batch's tokens besides their ids. Shapes: B rows, T positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from some_moe.hashing import make_salt


@dataclass(frozen=True, kw_only=True)
class TokenInfo:
    """Which tokens count, where they stand, and what the step's random choices follow from."""

    counted: Tensor  # (B, T) bool: which tokens enter the statistics
    rows: Tensor  # (B,) int64: each row's number within the whole step, over micro-batches and ranks
    salt: Tensor  # (2,) int32: a hash of seed and step, see hashing.make_salt
    ids: Tensor | None = None  # (B, T) token ids, for hash routing
    positions: Tensor | None = None  # (B, T), for packed rows; None: from 0 on, behind what a cache holds
    segments: Tensor | None = None  # (B, T), for packed rows: tokens see only tokens of their segment
    shares: Tensor | None = None  # (B, T, E) how much each expert counts by the text before, where branches look back
    sums: bool = True  # whether layers make the sums that gravity reads: not in evaluation and generation

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        device: torch.device,
        *,
        seed: int = 0,
        step: int = 0,
        sums: bool = True,
        **given: Tensor | None,
    ) -> Self:
        """Fill in what is not given for a batch of this shape (B, T): every token counts, rows are numbered from 0."""
        found: dict[str, Any] = {
            "counted": torch.ones(tuple(shape), dtype=torch.bool, device=device),
            "rows": torch.arange(shape[0], device=device),
            "salt": make_salt(seed, step, device),
        }
        found |= {name: tensor for name, tensor in given.items() if tensor is not None}
        return cls(**found, sums=sums)

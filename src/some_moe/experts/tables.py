"""The permutation of slots by expert, made on the device without a host sync."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """The S = N·K slots (token, choice) of a batch, sorted by expert."""

    order: Tensor  # (S,) int64: permuted slot → slot
    expert: Tensor  # (S,) expert of each permuted slot, in the smallest dtype that holds it
    ends: Tensor  # (E,) int32: one past each expert's last permuted slot (the offsets of a grouped GEMM)


def sort_slots(experts: Tensor, num_experts: int) -> Slots:
    """Sort the slots of `experts` (N, K) int64 by expert, stably."""
    # A radix sort: the fewer bytes a key has, the fewer passes.
    small = torch.uint8 if num_experts <= 256 else torch.int16 if num_experts < 1 << 15 else torch.int32
    expert, order = experts.reshape(-1).to(small).sort(stable=True)
    every = torch.arange(num_experts, device=experts.device).to(small)
    ends = torch.searchsorted(expert, every, right=True, out_int32=True)
    return Slots(order, expert, ends)

"""How the experts share the work. Each figure is of selection counts or gates; padding is left out by the mask.

Shapes: E experts, K chosen a token. A mask (…) over tokens says which count: real ones, or all positions.
"""

import math

import torch
from torch import Tensor

from some_moe.hashing import assign_experts


def take_counted(values: Tensor, mask: Tensor | None) -> Tensor:
    """The values (…, …) of the tokens that the mask (…) says; all of them without one."""
    return values if mask is None else values[mask.to(torch.bool)]


def count_selections(experts: Tensor, num_experts: int, mask: Tensor | None = None) -> Tensor:
    """Count how often each expert was chosen: experts (…, K), mask (…) → (E,) int64."""
    return torch.bincount(take_counted(experts, mask).reshape(-1), minlength=num_experts)


def gini(counts: Tensor) -> float:
    """Inequality of the load: 0 when all experts are chosen alike, (E−1)/E when one does everything."""
    ordered = counts.double().sort().values
    total = float(ordered.sum())
    if total == 0:
        return 0.0
    n = len(ordered)
    place = torch.arange(1, n + 1, dtype=torch.float64, device=ordered.device)
    return float(((2 * place - n - 1) * ordered).sum()) / (n * total)


def entropy_bits(counts: Tensor) -> float:
    """Shannon entropy of the load, in bits: log₂E when even, 0 when one expert does everything."""
    total = float(counts.sum())
    if total == 0:
        return 0.0
    share = counts.double()[counts > 0] / total
    return max(0.0, float(-(share * share.log2()).sum()))


def experts_used(counts: Tensor) -> int:
    """Number of experts chosen at least once."""
    return int((counts > 0).sum())


def max_load(counts: Tensor) -> float:
    """The busiest expert's load, in fair shares: 1 when even, E when one does everything."""
    total = int(counts.sum())
    return int(counts.max()) * len(counts) / total if total else 0.0


def gate_entropy_nats(gates: Tensor, mask: Tensor | None = None) -> float:
    """Mean entropy of the gate weights (…, K) of a token, in nats: ln K when the chosen count alike.

    Of their shares: a single expert's gate is less than 1, and leaves no choice all the same.
    """
    entropies = gate_entropies(take_counted(gates, mask))
    return float(entropies.mean()) if entropies.numel() else 0.0


def gate_entropies(gates: Tensor) -> Tensor:
    """Entropy of each token's gates (…, K): (…), in nats and float64."""
    gates = gates.double()
    shares = gates / gates.sum(-1, keepdim=True).clamp(min=torch.finfo(gates.dtype).tiny)
    return -torch.xlogy(shares, shares).sum(-1)


def hash_counts(ids: Tensor, num_experts: int, top_k: int, mask: Tensor | None = None, seed: int = 0) -> Tensor:
    """Selections that a hash of the token id would make on the same tokens: usage that knows no content.

    Frequent words alone make such usage uneven; a router's gini says something only beside this one.
    """
    types, frequency = torch.unique(take_counted(ids, mask), return_counts=True)
    experts = assign_experts(types, num_experts, top_k, seed, layer=0)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    return counts.index_add(0, experts.reshape(-1), frequency.repeat_interleave(top_k))


def summarize_usage(counts: Tensor) -> dict[str, float | int]:
    """The figures of one layer's load that every table shows."""
    return {
        "gini": gini(counts),
        "entropy_bits": entropy_bits(counts),
        "max_entropy_bits": math.log2(len(counts)),
        "experts_used": experts_used(counts),
        "num_experts": len(counts),
        "max_load": max_load(counts),
    }

"""Which experts are chosen together: communities of the co-selection graph, and whether chance makes as many.

Shapes: N tokens, K experts a token, E experts.
"""

from typing import Any

import numpy as np

from some_moe.glass.inspect.association import rank_p_values

REPAIR_ROUNDS = 50  # of mixing again the tokens that a shuffle gave one expert twice
ROUNDING = 1e-9  # of a modularity
LARGE_LIBRARY = 128  # experts from which on finding communities is slow, and fewer shuffles are made


def count_pairs(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """How many tokens chose both of two experts: experts (N, K) → (E, E) int64, each one's tokens on the diagonal."""
    chosen = np.zeros((len(experts), num_experts), dtype=np.float32)
    np.put_along_axis(chosen, experts, 1, axis=1)
    return np.asarray(chosen.T @ chosen, dtype=np.int64)


def find_communities(pairs: np.ndarray, seed: int) -> tuple[list[list[int]], float]:
    """Groups of experts (the largest first) by Louvain's method, and their modularity.

    pairs (E, E): see `count_pairs`. Experts that share no token with another are left out.
    """
    import networkx

    graph = networkx.Graph()
    first, second = np.nonzero(np.triu(pairs, 1))
    graph.add_weighted_edges_from(zip(first.tolist(), second.tolist(), pairs[first, second].tolist(), strict=True))
    if not graph:
        return [], 0.0
    groups = networkx.community.louvain_communities(graph, seed=seed)
    modularity = float(networkx.community.modularity(graph, groups))
    return sorted((sorted(group) for group in groups), key=lambda group: (-len(group), group)), modularity


def shuffle_selections(experts: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Deal all selections (N, K) out anew: every expert keeps its number, every token gets K different ones.

    Where an expert is so busy that this cannot be found soon, a few tokens keep one expert twice.
    """
    mixed = random.permutation(experts.ravel()).reshape(experts.shape)
    for _ in range(REPAIR_ROUNDS):
        twice = np.flatnonzero((np.diff(np.sort(mixed, axis=1), axis=1) == 0).any(1))
        if not len(twice):
            break
        # A few other tokens join in, for those that have an expert twice may have no other to exchange.
        again = np.union1d(twice, random.integers(0, len(mixed), len(twice) + 2))
        mixed[again] = random.permutation(mixed[again].ravel()).reshape(-1, experts.shape[1])
    return mixed


def measure_communities(
    experts: np.ndarray, num_experts: int, num_shuffles: int, random: np.random.Generator
) -> dict[str, Any]:
    """Communities of one layer's experts (N, K) against selections dealt out anew with every expert's load kept."""
    seed = int(random.integers(2**31))
    groups, modularity = find_communities(count_pairs(experts, num_experts), seed)
    if num_experts >= LARGE_LIBRARY:
        num_shuffles = min(num_shuffles, 19)
    mixed = (shuffle_selections(experts, random) for _ in range(num_shuffles))
    null = np.array([find_communities(count_pairs(one, num_experts), seed)[1] for one in mixed])
    return {
        "modularity": modularity,
        "null_mean": float(null.mean()),
        "null_sd": float(null.std(ddof=1)),
        "p_value": float(rank_p_values(np.array(modularity - ROUNDING), null)),
        "groups": groups,
    }

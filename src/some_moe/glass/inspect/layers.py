"""What a collection says about each layer: who works, who works together, what the queries look like.

Shapes: E experts, N tokens, K experts a token, D model width, S sampled queries.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from some_moe.glass.inspect.collection import Collection
from some_moe.metrics.keys import effective_rank, mean_pairwise_cosine, query_collinearity
from some_moe.metrics.usage import gate_entropy_nats, gini, hash_counts, summarize_usage

GENERALIST_LOAD = 3.0
UNDER_USED_LOAD = 0.1
RULES = {  # how the words of a layer's numbers are meant
    "generalists": f"experts with at least {GENERALIST_LOAD:g} fair shares of the layer's selections",
    "under_used": f"experts with less than {UNDER_USED_LOAD:g} fair shares of the layer's selections",
    "breadth": "share of the different token ids of the pass that an expert served at least once",
    "hash_gini": "gini if a hash of the token id chose the experts: the unevenness of the words alone",
}


class LayerNumbers:
    """One layer's figures. Loads are in fair shares: 1 is Σn/E selections."""

    gini: float
    entropy_bits: float
    max_entropy_bits: float
    experts_used: int
    num_experts: int
    max_load: float

    def __init__(self, collection: Collection, place: int) -> None:
        num_experts, top_k = collection.meta["num_experts"], collection.meta["top_k"]
        experts, respawns = collection.experts[place], collection.respawns[place]
        counts = np.bincount(experts.ravel(), minlength=num_experts)
        loads = counts * (num_experts / max(1, counts.sum()))
        self.layer: int = collection.meta["depths"][place]  # the block it belongs to
        self.counts: list[int] = counts.tolist()  # (E,) selections n
        self.loads: list[float] = loads.tolist()  # (E,)
        self.breadth: list[float] = measure_breadth(experts, collection.tokens, num_experts).tolist()  # (E,) see RULES
        self.__dict__ |= summarize_usage(torch.from_numpy(counts))
        self.hash_gini = gini(hash_counts(torch.from_numpy(collection.tokens.astype(np.int64)), num_experts, top_k))
        self.gate_entropy_nats = gate_entropy_nats(torch.from_numpy(collection.gates[place]))
        self.max_gate_entropy_nats = float(np.log(top_k))
        self.generalists = [int(i) for i in np.argsort(-loads, kind="stable") if loads[i] >= GENERALIST_LOAD]
        self.under_used: list[int] = np.flatnonzero(loads < UNDER_USED_LOAD).tolist()
        self.respawned: list[int] = np.flatnonzero(respawns).tolist()
        self.respawns = int(respawns.sum())
        queries, keys = collection.queries[place], collection.keys[place]
        self.query_mean_cosine = _measure(mean_pairwise_cosine, queries)  # over pairs of different queries
        self.query_collinearity = _measure(query_collinearity, queries)  # norm of the mean unit query
        self.query_effective_rank = _measure(effective_rank, queries)
        self.key_mean_cosine = _measure(mean_pairwise_cosine, keys)  # over pairs of different keys
        self.key_effective_rank = _measure(effective_rank, keys)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def _measure(figure: Callable[[torch.Tensor], float], vectors: np.ndarray) -> float | None:
    """A figure of vectors (n, D) at unit length; None where there are none, as under hash routing."""
    return figure(torch.nn.functional.normalize(torch.from_numpy(vectors).double(), dim=-1)) if vectors.size else None


def measure_layers(collection: Collection) -> list[LayerNumbers]:
    """The figures of every layer, in order of depth; none for a dense model."""
    return [LayerNumbers(collection, place) for place in range(len(collection.experts))]


def measure_breadth(experts: np.ndarray, tokens: np.ndarray, num_experts: int) -> np.ndarray:
    """Share of the different ids in tokens (N,) that each expert served: (E,)."""
    ids, place = np.unique(tokens, return_inverse=True)
    served = np.zeros((num_experts, len(ids)), bool)
    served[experts, place[:, None]] = True
    return np.asarray(served.mean(1))


def share_company(pairs: np.ndarray) -> np.ndarray:
    """Of the tokens that chose expert i, the share that chose j too: (E, E); 0 where i was never chosen."""
    others = pairs * ~np.eye(len(pairs), dtype=bool)
    return np.asarray(others / np.maximum(1, np.diag(pairs))[:, None])


def order_by_company(pairs: np.ndarray) -> np.ndarray:
    """An order (E,) in which experts that often work together stand side by side; unused ones come last."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    chosen = np.diag(pairs)
    used, unused = np.flatnonzero(chosen), np.flatnonzero(chosen == 0)
    if len(used) > 2:
        closeness = pairs[np.ix_(used, used)] / np.sqrt(np.outer(chosen[used], chosen[used]))
        distance = 1 - (closeness + closeness.T) / 2
        np.fill_diagonal(distance, 0.0)
        used = used[leaves_list(linkage(squareform(distance, checks=False), "average"))]
    return np.concatenate((used, unused))


def strongest_pairs(pairs: np.ndarray, num_tokens: int, limit: int = 20) -> list[dict[str, Any]]:
    """The pairs that share most tokens, and their lift: how many times more often than two independent choices."""
    chosen = np.diag(pairs).astype(float)
    i, j = np.triu_indices(len(pairs), 1)
    best = np.argsort(-pairs[i, j], kind="stable")[:limit]
    return [
        {
            "experts": [int(a), int(b)],
            "tokens": int(pairs[a, b]),
            "lift": float(pairs[a, b] * num_tokens / (chosen[a] * chosen[b])),
        }
        for a, b in zip(i[best], j[best], strict=True)
        if pairs[a, b] > 0
    ]

"""What a collection says about each layer: who works, who works together, what the queries look like.

Shapes: E experts, N tokens, K experts a token, D model width, S sampled queries.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from some_moe.glass.inspect.collection import Collection
from some_moe.metrics.keys import effective_rank, mean_pairwise_cosine, query_collinearity
from some_moe.metrics.usage import gate_entropy_nats, gini, hash_counts, summarize_usage

GENERALIST_LOAD = 3.0
UNDER_USED_LOAD = 0.1
RULES = {
    "generalists": f"experts with at least {GENERALIST_LOAD:g} fair shares of the layer's selections",
    "under_used": f"experts with less than {UNDER_USED_LOAD:g} fair shares of the layer's selections",
    "breadth": "share of the different token ids of the pass that an expert served at least once",
    "hash_gini": "gini if a hash of the token id chose the experts: the unevenness of the words alone",
}
"""How the words of a layer's numbers are meant."""


@dataclass(frozen=True, kw_only=True)
class LayerNumbers:
    """One layer's figures. Loads are in fair shares: 1 is Σn/E selections."""

    layer: int  # the block it belongs to
    counts: list[int]  # (E,) selections n
    loads: list[float]  # (E,)
    breadth: list[float]  # (E,) see RULES
    gini: float
    hash_gini: float
    entropy_bits: float
    max_entropy_bits: float
    experts_used: int
    num_experts: int
    max_load: float
    gate_entropy_nats: float
    max_gate_entropy_nats: float
    generalists: list[int]  # busiest first
    under_used: list[int]
    respawned: list[int]
    respawns: int
    query_mean_cosine: float | None  # over pairs of different queries; None without queries
    query_collinearity: float | None  # norm of the mean unit query
    query_effective_rank: float | None
    key_mean_cosine: float | None  # over pairs of different keys
    key_effective_rank: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_layers(collection: Collection) -> list[LayerNumbers]:
    """The figures of every layer, in order of depth; none for a dense model."""
    return [_measure_layer(collection, place) for place in range(len(collection.experts))]


def _measure_layer(collection: Collection, place: int) -> LayerNumbers:
    num_experts, top_k = collection.meta["num_experts"], collection.meta["top_k"]
    experts, respawns = collection.experts[place], collection.respawns[place]
    counts = count_experts(experts, num_experts)
    loads = counts * (num_experts / max(1, counts.sum()))
    by_hash = hash_counts(torch.from_numpy(collection.tokens.astype(np.int64)), num_experts, top_k)
    queries, keys = _unit_vectors(collection.queries[place]), _unit_vectors(collection.keys[place])
    busiest_first = np.argsort(-loads, kind="stable")
    return LayerNumbers(
        layer=collection.meta["depths"][place],
        counts=counts.tolist(),
        loads=loads.tolist(),
        breadth=measure_breadth(experts, collection.tokens, num_experts).tolist(),
        hash_gini=gini(by_hash),
        gate_entropy_nats=gate_entropy_nats(torch.from_numpy(collection.gates[place])),
        max_gate_entropy_nats=float(np.log(top_k)),
        generalists=[int(expert) for expert in busiest_first if loads[expert] >= GENERALIST_LOAD],
        under_used=np.flatnonzero(loads < UNDER_USED_LOAD).tolist(),
        respawned=np.flatnonzero(respawns).tolist(),
        respawns=int(respawns.sum()),
        **summarize_usage(torch.from_numpy(counts)),  # type: ignore[arg-type]
        query_mean_cosine=None if queries is None else mean_pairwise_cosine(queries),
        query_collinearity=None if queries is None else query_collinearity(queries),
        query_effective_rank=None if queries is None else effective_rank(queries),
        key_mean_cosine=None if keys is None else mean_pairwise_cosine(keys),
        key_effective_rank=None if keys is None else effective_rank(keys),
    )


def _unit_vectors(vectors: np.ndarray) -> torch.Tensor | None:
    """The vectors (n, D) at unit length; None where there are none, as under hash routing."""
    if vectors.size == 0:
        return None
    return torch.nn.functional.normalize(torch.from_numpy(vectors).double(), dim=-1)


def count_experts(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """How often each expert was chosen: experts (N, K) → (E,) int64."""
    return np.bincount(experts.reshape(-1), minlength=num_experts)


def measure_breadth(experts: np.ndarray, tokens: np.ndarray, num_experts: int) -> np.ndarray:
    """Share of the different ids in tokens (N,) that each expert served: (E,)."""
    ids, place = np.unique(tokens, return_inverse=True)
    served = np.zeros((num_experts, len(ids)), bool)
    served[experts, place[:, None]] = True
    return np.asarray(served.mean(1))


def share_company(pairs: np.ndarray) -> np.ndarray:
    """Of the tokens that chose expert i, the share that chose j too: (E, E); 0 where i was never chosen."""
    chosen = np.diag(pairs)
    shares = pairs / np.maximum(1, chosen)[:, None]
    np.fill_diagonal(shares, 0.0)
    return np.asarray(shares)


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

"""What a record of the study is made of, beside the guilds: clusters of keys, load against drift, pruned experts.

numpy and torch alone: a machine with a GPU need not have what draws. Shapes: L layers, E experts, D width.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from some_moe.glass.inspect.association import adjust_by_maximum, rank_p_values
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.interventions import Probe, knock_out, replay, stand_in
from some_moe.glass.inspect.movement import LayerMovement
from some_moe.training.runs import Run

SIZES = (2, 3, 4, 6, 8)  # of k-means
RESTARTS, ROUNDS, NUM_CLOUDS = 3, 20, 99
SHARES = (1 / 8, 1 / 4, 1 / 2)
NUM_RANDOM, PRUNE_TOKENS = 8, 8_000
NUM_BOOTSTRAPS = 1000


# --- galaxies -----------------------------------------------------------------------------------------------


def measure_clusters(keys: np.ndarray, random: np.random.Generator) -> list[dict[str, Any]]:
    """Of every layer's keys (L, E, D): how well they fall into clusters, beside one cloud and beside random keys."""
    unit = _unit(keys.astype(np.float64))
    found = [best_silhouette(one, random) for one in unit]
    clouds = np.array(
        [[best_silhouette(_unit(draw_cloud(one, random)), random)[0] for one in unit] for _ in range(NUM_CLOUDS)]
    )
    chance = [best_silhouette(_unit(random.normal(size=unit.shape[1:])), random)[0] for _ in range(NUM_CLOUDS)]
    silhouettes = np.array([silhouette for silhouette, _ in found])
    adjusted = adjust_by_maximum(silhouettes, clouds)
    return [
        {
            "layer": layer,
            "silhouette": float(silhouette),
            "num_clusters": size,
            "one_cloud": float(clouds[:, layer].mean()),
            "p_cloud": float(adjusted[layer]),
            "random_keys": float(np.mean(chance)),
            "p_random": float(rank_p_values(np.array(silhouette), np.array(chance))),
        }
        for layer, (silhouette, size) in enumerate(found)
    ]


def draw_cloud(points: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """As many points as (E, D) from a normal distribution with their mean and covariance."""
    centred = points - points.mean(0)
    return np.asarray(
        points.mean(0) + random.normal(size=(len(points), len(points))) @ centred / np.sqrt(len(points) - 1)
    )


def best_silhouette(unit: np.ndarray, random: np.random.Generator) -> tuple[float, int]:
    """The best mean silhouette of spherical k-means on unit vectors (E, D), and its number of clusters."""
    distance = 1 - unit @ unit.T
    found = [(-1.0, 0)]
    for size in SIZES:
        if size < len(unit):
            tries = [group_keys(unit, size, random) for _ in range(RESTARTS)]
            _, groups = max(tries, key=lambda one: one[0])
            found.append((measure_silhouette(distance, groups), size))
    return max(found)


def group_keys(unit: np.ndarray, size: int, random: np.random.Generator) -> tuple[float, np.ndarray]:
    """Spherical k-means of unit vectors (E, D): how near they lie to their centres, and each one's group (E,)."""
    centres = unit[random.choice(len(unit), size, replace=False)]
    groups = np.full(len(unit), -1)
    for _ in range(ROUNDS):
        near = unit @ centres.T
        new = near.argmax(1)
        if (new == groups).all():
            break
        groups = new
        sums = np.zeros_like(centres)
        np.add.at(sums, groups, unit)
        empty = np.bincount(groups, minlength=size) == 0
        sums[empty] = unit[near.max(1).argsort()[: empty.sum()]]  # the vectors that are served worst
        centres = _unit(sums)
    return float((unit @ centres.T).max(1).sum()), groups


def measure_silhouette(distance: np.ndarray, groups: np.ndarray) -> float:
    """The mean silhouette of groups (E,) by distances (E, E); a group of one has 0."""
    member = np.eye(groups.max() + 1)[groups]  # (E, groups)
    counts = member.sum(0)
    sums = distance @ member
    own = sums[np.arange(len(groups)), groups] / np.maximum(counts[groups] - 1, 1)
    others = np.where((member > 0) | (counts == 0), np.inf, sums / np.maximum(counts, 1)).min(1)
    value = np.where(np.isfinite(others), (others - own) / np.maximum(np.maximum(own, others), 1e-12), 0)
    return float(np.where(counts[groups] > 1, value, 0).mean())


def _unit(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12))


# --- galactic centres ---------------------------------------------------------------------------------------


def correlate_drift(
    loads: np.ndarray, movements: Sequence[LayerMovement], random: np.random.Generator
) -> dict[str, Any] | None:
    """Spearman's correlation of load (L, E) and drift, of used experts; None where no key moved or none was kept."""
    if len(movements) != len(loads) or not any(one.drift.any() for one in movements):
        return None
    pairs = []
    for load, movement in zip(loads, movements, strict=True):
        used = load > 0
        if used.sum() > 3:
            late = movement.speed[-max(1, len(movement.speed) // 4) :].mean(0)
            pairs.append((load[used], movement.drift[used], late[used]))
    by_layer = [spearman(load, drift) for load, drift, _ in pairs]
    draws = []
    for _ in range(NUM_BOOTSTRAPS):
        chosen = [random.integers(len(load), size=len(load)) for load, _, _ in pairs]
        draws.append(np.mean([spearman(load[c], drift[c]) for (load, drift, _), c in zip(pairs, chosen, strict=True)]))
    return {
        "rho": float(np.mean(by_layer)),
        "interval": np.quantile(draws, (0.025, 0.975)).tolist(),
        "by_layer": by_layer,
        "late_rho": float(np.mean([spearman(load, late) for load, _, late in pairs])),
    }


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """The correlation of ranks, equal values sharing theirs; 0 where one of them never varies."""
    ranks = []
    for values in (one, other):
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[place])
    first, second = (rank - rank.mean() for rank in ranks)
    scale = np.sqrt((first @ first) * (second @ second))
    return float(first @ second / scale) if scale > 0 else 0.0


# --- pruning ------------------------------------------------------------------------------------------------


def prune(run: Run, seen: Collection, size: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """What the loss of the first tokens rises by without a share of every layer's experts, chosen in four ways."""
    probe = Probe(seen.tokens[:size], seen.targets[:size], seen.story[:size])
    layers, num_experts, top_k = run.model.layers, seen.meta["num_experts"], seen.meta["top_k"]
    base = replay(run.model, probe, run.config).nats.mean()
    central = np.stack(
        [_unit(keys) @ _unit(queries.mean(0)) for keys, queries in zip(seen.keys, seen.queries, strict=True)]
    )

    def cost(gone: np.ndarray) -> float:
        """gone: (L, m) experts."""
        with stand_in(*(knock_out(layer, experts.tolist()) for layer, experts in zip(layers, gone, strict=True))):
            return float(replay(run.model, probe, run.config).nats.mean() - base)

    found = []
    for share in SHARES:
        count = min(round(share * num_experts), num_experts - top_k)
        by_chance = [
            cost(np.stack([random.permutation(num_experts)[:count] for _ in layers])) for _ in range(NUM_RANDOM)
        ]
        found.append(
            {
                "share": share,
                "num_experts": count,
                "least_used": cost(seen.usage.argsort(1, kind="stable")[:, :count]),
                "least_central": cost(central.argsort(1, kind="stable")[:, :count]),
                "most_used": cost((-seen.usage).argsort(1, kind="stable")[:, :count]),
                "random": by_chance,
            }
        )
    return found

"""Causal trials: is a class hurt when its experts are taken away, and does it matter which expert sits where?

Shapes: N tokens of a probe, E experts, R random sets, S stories.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from some_moe.glass.inspect.association import beyond_draws, bootstrap_weights
from some_moe.glass.inspect.interventions import Probe, Replay, exchange_experts, knock_out, replay, stand_in
from some_moe.training.runs import Run

NUM_BOOTSTRAPS = 1000
FEWEST_SETS = 5  # different ones: from fewer no spread can be told
TRIES = 20  # for each set


def draw_matched_sets(
    usage: np.ndarray, experts: Sequence[int], count: int, top_k: int, random: np.random.Generator
) -> list[list[int]]:
    """Different random sets of *other* experts that together are used as much as `experts`, as nearly as they come.

    usage (E,): selections of each expert. Experts are added in random order while that brings the set's usage
    nearer to the wanted one; at least top_k experts always stay out of the set. Fewer than `count` where the others
    do not make so many: a guild may be busier than all of them together.
    """
    wanted = usage[list(experts)].sum()
    others = np.array([e for e in range(len(usage)) if e not in set(experts) and usage[e] > 0], dtype=np.int64)
    largest = min(len(others), len(usage) - top_k)
    sets: dict[frozenset[int], list[int]] = {}
    for _ in range(TRIES * count if largest else 0):
        order = random.permutation(others)
        total = np.cumsum(usage[order])[:largest]
        chosen = order[: int(np.argmin(abs(total - wanted))) + 1].tolist()
        sets.setdefault(frozenset(chosen), chosen)
        if len(sets) == count:
            break
    return list(sets.values())


def bootstrap_contrast(
    change: np.ndarray, inside: np.ndarray, outside: np.ndarray, story: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Draws (R,) of the mean change inside minus outside, with stories drawn anew. All arguments (N,)."""
    num_stories = int(story.max()) + 1
    weights = bootstrap_weights(num_stories, NUM_BOOTSTRAPS, random)

    def mean_of(mask: np.ndarray) -> np.ndarray:
        sums = np.bincount(story, change * mask, num_stories)
        counts = np.bincount(story, mask, num_stories)
        mean: np.ndarray = (weights @ sums) / np.maximum(weights @ counts, 1)
        return mean

    return mean_of(inside) - (mean_of(outside) if outside.any() else 0.0)


def try_knock_out(
    run: Run,
    probe: Probe,
    base: Replay,
    layer: int,
    experts: Sequence[int],
    inside: np.ndarray,
    outside: np.ndarray,
    *,
    num_sets: int,
    level: float,
    random: np.random.Generator,
) -> dict[str, Any] | None:
    """Take the experts away, then matched random sets of others; None where there are too few such sets.

    inside, outside (N,) bool: tokens of the class, and all other words. A change is in nats of predicting the
    next token from that position. `effect` is a difference of differences: how much more the class is hurt than
    other tokens, by these experts more than by random ones. Its p-value takes the sets' own differences as
    draws of the null; its interval draws stories anew.
    """
    some_layer = run.model.layers[layer]
    usage = np.bincount(base.experts[layer].ravel(), minlength=some_layer.model.num_experts)
    sets = draw_matched_sets(usage, experts, num_sets, some_layer.model.top_k, random)
    if len(sets) < FEWEST_SETS or not inside.any() or not outside.any():
        return None

    def change_without(gone: Sequence[int]) -> np.ndarray:
        with stand_in(knock_out(some_layer, gone)):
            change: np.ndarray = replay(run.model, probe, run.config).nats - base.nats
        return change

    def displaced(gone: Sequence[int]) -> float:
        return float(np.isin(base.experts[layer][inside], gone).any(-1).mean())

    change = change_without(experts)
    random_changes = np.stack([change_without(gone) for gone in sets])
    random_change = random_changes.mean(0)
    after = np.roll(inside, 1) & (np.diff(probe.story, prepend=-1) == 0)
    difference = change[inside].mean() - change[outside].mean()
    random_differences = random_changes[:, inside].mean(1) - random_changes[:, outside].mean(1)
    draws = bootstrap_contrast(change - random_change, inside, outside, probe.story, random)
    return {
        "class_change": float(change[inside].mean()),
        "other_change": float(change[outside].mean()),
        "random_class_change": float(random_change[inside].mean()),
        "random_other_change": float(random_change[outside].mean()),
        "effect": float(difference - random_differences.mean()),
        "p_value": float(beyond_draws(difference, random_differences)),
        "interval": np.quantile(draws, (level / 2, 1 - level / 2)).tolist(),
        "next_change": float(change[after].mean()) if after.any() else None,
        "class_displaced": displaced(experts),
        "random_class_displaced": float(np.mean([displaced(gone) for gone in sets])),
        "usage_share": float(usage[list(experts)].sum() / usage.sum()),
        "random_usage_share": float(np.mean([usage[gone].sum() for gone in sets]) / usage.sum()),
        "num_sets": len(sets),
        "class_tokens": int(inside.sum()),
    }


def try_exchanges(
    run: Run, probe: Probe, base: Replay, *, num_draws: int, level: float, random: np.random.Generator
) -> list[dict[str, Any]]:
    """Let the experts of one layer change places under fixed keys, so that none stays where it was."""
    everywhere = np.ones(probe.num_tokens, bool)
    results = []
    for number, layer in enumerate(run.model.layers):
        changes = []
        for _ in range(num_draws):
            with stand_in(*exchange_experts(layer, _derange(layer.model.num_experts, random))):
                changes.append(replay(run.model, probe, run.config).nats - base.nats)
        change = np.mean(changes, axis=0)
        draws = bootstrap_contrast(change, everywhere, ~everywhere, probe.story, random)
        results.append(
            {
                "layer": number,
                "loss_change": float(change.mean()),
                "interval": np.quantile(draws, (level / 2, 1 - level / 2)).tolist(),
                "num_draws": num_draws,
            }
        )
    return results


def _derange(count: int, random: np.random.Generator) -> np.ndarray:
    """A random cycle through 0 … count−1: an order in which nothing keeps its place."""
    cycle = random.permutation(count)
    order = np.empty(count, dtype=np.int64)
    order[cycle] = np.roll(cycle, 1)
    return order

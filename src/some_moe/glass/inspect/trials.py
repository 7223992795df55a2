"""Causal trials: is a class hurt when its experts are taken away, and does it matter which expert sits where?

Shapes: N tokens of a probe, E experts, R random sets, S stories.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from some_moe.glass.inspect.association import beyond_draws, bootstrap_weights, cover
from some_moe.glass.inspect.cards import Case
from some_moe.glass.inspect.interventions import Probe, Replay, StandIn, exchange_experts, knock_out, replay, stand_in
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
    others = np.setdiff1d(np.flatnonzero(usage), experts)
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


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Stories on which a run's model is altered, with what it does unaltered."""

    run: Run
    probe: Probe
    base: Replay
    level: float  # of the intervals
    random: np.random.Generator

    def change_under(self, *changes: StandIn) -> np.ndarray:
        """How many nats (N,) more each token costs while these tensors stand in."""
        with stand_in(*changes):
            return np.asarray(replay(self.run.model, self.probe, self.run.config).nats - self.base.nats)

    def draw_interval(self, change: np.ndarray, inside: np.ndarray, outside: np.ndarray) -> list[float]:
        """An interval for the mean change inside minus outside, by stories drawn anew. All arguments (N,)."""
        story, num_stories = self.probe.story, int(self.probe.story.max()) + 1
        weights = bootstrap_weights(num_stories, NUM_BOOTSTRAPS, self.random)

        def mean_of(mask: np.ndarray) -> np.ndarray:
            sums, counts = np.bincount(story, change * mask, num_stories), np.bincount(story, mask, num_stories)
            return np.asarray((weights @ sums) / np.maximum(weights @ counts, 1))

        return list(cover(mean_of(inside) - mean_of(outside), self.level))

    def knock_out(self, case: Case, *, num_sets: int) -> dict[str, Any] | None:
        """Take a guild's experts away, then matched random sets of others; None where there are too few such sets.

        A change is in nats of predicting the next token from that position. `effect` is a difference of differences:
        how much more the class is hurt than other tokens, by these experts more than by random ones. Its p-value takes
        the sets' own differences as draws of the null; its interval draws stories anew.
        """
        size, layer, experts = len(self.probe.story), case.card["layer"], case.card["experts"]
        inside, outside = case.inside[:size], case.outside[:size]
        some_layer, chosen = self.run.model.layers[layer], self.base.experts[layer]
        usage = np.bincount(chosen.ravel(), minlength=some_layer.model.num_experts)
        sets = draw_matched_sets(usage, experts, num_sets, some_layer.model.top_k, self.random)
        if len(sets) < FEWEST_SETS or not inside.any() or not outside.any():
            return None

        def displaced(gone: Sequence[int]) -> float:
            return float(np.isin(chosen[inside], gone).any(-1).mean())

        change = self.change_under(knock_out(some_layer, experts))
        random_changes = np.stack([self.change_under(knock_out(some_layer, gone)) for gone in sets])
        random_change = random_changes.mean(0)
        after = np.roll(inside, 1) & (np.diff(self.probe.story, prepend=-1) == 0)
        difference = change[inside].mean() - change[outside].mean()
        random_differences = random_changes[:, inside].mean(1) - random_changes[:, outside].mean(1)
        return {
            "class_change": float(change[inside].mean()),
            "other_change": float(change[outside].mean()),
            "random_class_change": float(random_change[inside].mean()),
            "random_other_change": float(random_change[outside].mean()),
            "effect": float(difference - random_differences.mean()),
            "p_value": float(beyond_draws(difference, random_differences)),
            "interval": self.draw_interval(change - random_change, inside, outside),
            "next_change": float(change[after].mean()) if after.any() else None,
            "class_displaced": displaced(experts),
            "random_class_displaced": float(np.mean([displaced(gone) for gone in sets])),
            "usage_share": float(usage[experts].sum() / usage.sum()),
            "random_usage_share": float(np.mean([usage[gone].sum() for gone in sets]) / usage.sum()),
            "num_sets": len(sets),
            "class_tokens": int(inside.sum()),
        }

    def exchange(self, layer: int, *, num_draws: int) -> dict[str, Any]:
        """Let the experts of one layer change places under fixed keys, so that none stays where it was."""
        some_layer, everywhere = self.run.model.layers[layer], np.ones(len(self.probe.story), bool)
        changes = []
        for _ in range(num_draws):
            cycle = self.random.permutation(some_layer.model.num_experts)
            order = np.roll(cycle, 1)[np.argsort(cycle)]  # a cycle through all experts: none keeps its place
            changes.append(self.change_under(*exchange_experts(some_layer, order)))
        change = np.mean(changes, axis=0)
        return {
            "layer": layer,
            "loss_change": float(change.mean()),
            "interval": self.draw_interval(change, everywhere, ~everywhere),
            "num_draws": num_draws,
        }

"""Causal trials: is a class hurt when its experts are taken away, and does it matter which expert sits where?

Shapes: N tokens of a probe, E experts, R random sets, S stories, P shuffles.

A class chooses its guild's experts more than other tokens do, so it loses more when they go: that alone is no service.
What is compared is the harm *beyond displacement*: what tokens lose when their experts go, less what they would lose if
as much of their gates went to waste with other experts; that of the class, less that of other tokens. Labels are
shuffled as in association.py, so that the p-value is a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from some_moe.glass.inspect.association import bootstrap_weights, cover, rank_together
from some_moe.glass.inspect.cards import Case
from some_moe.glass.inspect.evidence import Words, shuffles_of
from some_moe.glass.inspect.interventions import Probe, Replay, StandIn, exchange_experts, knock_out, replay, stand_in
from some_moe.training.runs import Run

NUM_BOOTSTRAPS = 1000
FEWEST_SETS = 5  # different ones: from fewer nothing can be told about other experts
TRIES = 20  # for each set


def draw_matched_sets(
    usage: np.ndarray, served: np.ndarray, experts: Sequence[int], count: int, top_k: int, random: np.random.Generator
) -> list[list[int]]:
    """Different random sets of *other* experts that displace the class as much as `experts`, as nearly as they come.

    usage and served (E,): selections of each expert, by all tokens and by those of the class. Experts are added in
    random order while that brings the class's selections nearer to the wanted ones; of the better half of the sets so
    found those nearest in usage are taken. A set has at most half of the others, so that they make several, and at
    least top_k experts stay out of it; fewer than `count` sets where the others make no more.
    """
    own = list(experts)
    others = np.setdiff1d(np.flatnonzero(usage), experts)
    largest = min((len(others) + 1) // 2, len(usage) - top_k)
    sets: dict[frozenset[int], list[int]] = {}
    for _ in range(TRIES * count if largest else 0):
        order = random.permutation(others)[:largest]
        miss = abs(np.cumsum(served[order]) - served[own].sum())
        chosen = order[: int(np.argmin(miss)) + 1].tolist()
        sets.setdefault(frozenset(chosen), chosen)
    near = sorted(sets.values(), key=lambda one: abs(served[one].sum() - served[own].sum()))
    near = near[: max(count, len(near) // 2)]
    return sorted(near, key=lambda one: abs(usage[one].sum() - usage[own].sum()))[:count]


def measure_harm(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """The harm beyond displacement (…), in nats a token: to a class, more than to others.

    inside and outside (…, 5), sums over the tokens of the class and over others: nats and gates that they lose with the
    guild's experts, and with the random sets; and how many tokens they are.
    """

    def exceed(sums: np.ndarray) -> np.ndarray:
        nats, gates, other_nats, other_gates, count = np.moveaxis(sums, -1, 0)
        return np.asarray((nats - gates * other_nats / np.maximum(other_gates, 1e-9)) / np.maximum(count, 1))

    return np.asarray(exceed(inside) - exceed(outside))


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

    def draw_interval(self, change: np.ndarray) -> list[float]:
        """An interval for the mean change (N,), by stories drawn anew."""
        sums = self.add_up(np.stack((change, np.ones(len(change))), -1), np.ones(len(change)))
        return list(cover(sums[:, 0] / sums[:, 1], self.level))

    def add_up(self, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Sums of values (N, M) over the tokens of a mask (N,), in draws of stories with replacement: (draws, M)."""
        story, num_stories = self.probe.story, int(self.probe.story.max()) + 1
        by_story = np.stack([np.bincount(story, column * mask, num_stories) for column in values.T], -1)
        weights = bootstrap_weights(num_stories, NUM_BOOTSTRAPS, np.random.default_rng(0))
        return np.asarray(weights @ by_story)

    def knock_out(self, case: Case, *, num_sets: int) -> dict[str, Any] | None:
        """Take a guild's experts away, then matched random sets of others; None where there are too few such sets.

        A change is in nats of predicting the next token from that position; `effect` is that of `measure_harm`, its
        interval draws stories anew, and `judge_knock_outs` adds its p-values.
        """
        size, layer, experts = len(self.probe.story), case.card["layer"], case.card["experts"]
        inside, outside = case.inside[:size], case.outside[:size]
        some_layer, chosen = self.run.model.layers[layer], self.base.experts[layer]
        num_experts = some_layer.model.num_experts
        usage, served = (np.bincount(one.ravel(), minlength=num_experts) for one in (chosen, chosen[inside]))
        sets = draw_matched_sets(usage, served, experts, num_sets, some_layer.model.top_k, self.random)

        def lose(gone: Sequence[int]) -> np.ndarray:
            """The nats (all, then those of tokens that lose an expert) and the gates (N, 3) that a set costs."""
            change = self.change_under(knock_out(some_layer, gone))
            lost = (np.isin(chosen, gone) * self.base.gates[layer]).sum(-1)
            return np.stack((change, change * (lost > 0), lost), -1)

        if len(sets) < FEWEST_SETS:
            return None
        own, others = lose(experts), np.mean([lose(gone) for gone in sets], axis=0)
        if not (own[inside, 2].any() and others[inside, 2].any() and outside.any()):
            return None
        case.losses = np.concatenate((own[:, 1:], others[:, 1:], np.ones((size, 1))), -1)
        draws = measure_harm(self.add_up(case.losses, inside), self.add_up(case.losses, outside))
        after = np.roll(inside, 1) & (np.diff(self.probe.story, prepend=-1) == 0)
        return {
            "class_change": float(own[inside, 0].mean()),
            "other_change": float(own[outside, 0].mean()),
            "random_class_change": float(others[inside, 0].mean()),
            "random_other_change": float(others[outside, 0].mean()),
            "effect": float(measure_harm(case.losses[inside].sum(0), case.losses[outside].sum(0))),
            "interval": list(cover(draws, self.level)),
            "next_change": float(own[after, 0].mean()) if after.any() else None,
            "class_displaced": float(own[inside, 2].mean()),
            "random_class_displaced": float(others[inside, 2].mean()),
            "usage_share": float(usage[experts].sum() / usage.sum()),
            "random_usage_share": float(np.mean([usage[gone].sum() for gone in sets]) / usage.sum()),
            "num_sets": len(sets),
            "class_tokens": int(inside.sum()),
        }

    def exchange(self, layer: int, *, num_draws: int) -> dict[str, Any]:
        """Let the experts of one layer change places under fixed keys, so that none stays where it was."""
        some_layer = self.run.model.layers[layer]
        changes = []
        for _ in range(num_draws):
            cycle = self.random.permutation(some_layer.model.num_experts)
            order = np.roll(cycle, 1)[np.argsort(cycle)]  # a cycle through all experts: none keeps its place
            changes.append(self.change_under(*exchange_experts(some_layer, order)))
        change = np.mean(changes, axis=0)
        return {
            "layer": layer,
            "loss_change": float(change.mean()),
            "interval": self.draw_interval(change),
            "num_draws": num_draws,
        }


def judge_knock_outs(cases: Sequence[Case], words: Words, num_shuffles: int, random: np.random.Generator) -> None:
    """Give every case that was knocked out its p-values: alone, and corrected for all of them. words: the probe's."""
    tests, judged = [], []
    for family in words.families:
        tried = [case for case in cases if case.card["knockout"] and case.card["family"] == family.name]
        if tried:
            losses = np.stack([case.losses[words.places] for case in tried])  # (cases, words, 5)
            classes = np.array([family.classes.index(case.card["class"]) for case in tried])
            nulls = [
                np.stack(
                    [
                        _sort_harm(shuffle(family.labels, words.text, random), classes, losses)
                        for _ in range(num_shuffles)
                    ]
                )
                for shuffle in shuffles_of(family)
            ]
            tests.append((_sort_harm(family.labels, classes, losses), nulls))
            judged.append(tried)
    for tried, (p_values, adjusted) in zip(judged, rank_together(tests), strict=True):
        for case, p_value, p_adjusted in zip(tried, p_values.tolist(), adjusted.tolist(), strict=True):
            case.card["knockout"] |= {"p_value": p_value, "p_adjusted": p_adjusted}


def _sort_harm(labels: np.ndarray, classes: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """The harm of each case (M,) to its class (M,), if words had these labels (n,). losses (M, n, 5)."""
    inside = np.einsum("mn,mnj->mj", labels == classes[:, None], losses)
    return measure_harm(inside, losses.sum(1) - inside)

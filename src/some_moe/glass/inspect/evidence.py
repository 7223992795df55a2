"""What the routing of one run says about each family of classes: figures, nulls and p-values, not yet verdicts.

Shapes: N words, L layers, K experts a token, E experts, C classes, P shuffles, R draws of random keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from some_moe.glass.inspect.association import (
    TINY_BITS,
    Arrangement,
    Null,
    Shuffle,
    adjust_by_holm,
    adjust_by_maximum,
    arrange,
    beyond_draws,
    class_information,
    class_shares,
    count_table,
    entropy_bits,
    false_discovery_rates,
    mutual_information,
    normalized_pmi,
    rank_p_values,
    shuffle_by_story,
    shuffle_by_word,
    shuffle_many,
    standardize,
)
from some_moe.glass.inspect.labels import OTHER, UNLABELLED, Family

FEWEST_TOKENS = 20  # a class that occurs less often is not looked for


@dataclass(frozen=True, kw_only=True)
class Words:
    """The labelled tokens of a text, with their experts and their labels in every family."""

    families: tuple[Family, ...]  # labels (N,), all of them real classes
    experts: np.ndarray  # (L, N, K) int64
    text: Arrangement
    num_experts: int


def find_words(
    families: Sequence[Family], tokens: np.ndarray, story: np.ndarray, experts: np.ndarray, num_experts: int
) -> Words:
    """Leave out the tokens that are no words (bos). tokens and story (n,), experts (L, n, K)."""
    labelled = families[0].labels != UNLABELLED
    return Words(
        families=tuple(replace(family, labels=family.labels[labelled]) for family in families),
        experts=experts[:, labelled].astype(np.int64),
        text=arrange(tokens[labelled], story[labelled]),
        num_experts=num_experts,
    )


def shuffles_of(family: Family) -> tuple[Shuffle, ...]:
    """The shuffles whose nulls a family must beat: see association.py."""
    if family.describes:
        # No shuffle keeps a word's frequency and changes its identity: these families are of words by definition.
        return (shuffle_by_story,)
    return (shuffle_by_word, shuffle_by_story) if family.in_context else (shuffle_by_word,)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One family in one run."""

    family: Family
    table: np.ndarray  # (L, E, C) selections
    information: np.ndarray  # (L,) bits
    nulls: tuple[Null, ...]  # one for each shuffle

    @property
    def null_mean(self) -> np.ndarray:
        """Bits (L,) that chance shares, under the shuffle that leaves most."""
        return np.asarray(np.max([null.information.mean(0) for null in self.nulls], axis=0))

    @property
    def entropy(self) -> np.ndarray:
        """Bits (L,) of the classes: the most that an expert could tell."""
        return np.asarray(np.maximum(entropy_bits(self.table.sum(-2)), TINY_BITS))

    @property
    def nmi(self) -> np.ndarray:
        """Share (L,) of the classes' entropy that is told, what chance shares taken off."""
        return np.asarray((self.information - self.null_mean) / self.entropy)

    @property
    def testable(self) -> np.ndarray:
        """Classes (C,) that a guild could be found for."""
        top_k = self.table[0].sum() / max(1, len(self.family.labels))
        often = self.table[0].sum(0) >= FEWEST_TOKENS * top_k
        named = np.array([name != OTHER for name in self.family.classes])
        return np.asarray(often & named & (not self.family.describes))


def measure_family(
    words: Words,
    family: Family,
    *,
    num_shuffles: int,
    random: Callable[[], np.random.Generator],
    keep_shares: bool = False,
) -> Measured:
    """Count a family's selections, and shuffle its labels in all the ways that it must beat.

    random: gives the generator of each way. keep_shares: of the shuffles, for `rate_enrichment`.
    """
    sizes = {"num_experts": words.num_experts, "num_classes": len(family.classes)}
    table = count_table(words.experts, family.labels, **sizes)
    nulls = tuple(
        shuffle_many(
            words.experts,
            family.labels,
            words.text,
            shuffle,
            **sizes,
            num_shuffles=num_shuffles,
            random=random(),
            keep_shares=keep_shares,
        )
        for shuffle in shuffles_of(family)
    )
    return Measured(family=family, table=table, information=mutual_information(table), nulls=nulls)


@dataclass(frozen=True)
class Association:
    """p-values (L,) of one family: alone, and corrected for all layers and families."""

    p_value: np.ndarray
    p_adjusted: np.ndarray


def judge_association(measured: Sequence[Measured]) -> list[Association]:
    """Compare every family and layer with its nulls; the p-value is that of the null that is hardest to beat."""
    pairs = [(one, null) for one in measured for null in one.nulls]
    adjusted = adjust_by_maximum([one.information for one, _ in pairs], [null.information for _, null in pairs])
    found = []
    for one in measured:
        own = [place for place, (owner, _) in enumerate(pairs) if owner is one]
        alone = [rank_p_values(one.information, null.information) for null in one.nulls]
        found.append(Association(np.max(alone, axis=0), np.max([adjusted[place] for place in own], axis=0)))
    return found


def rate_enrichment(measured: Sequence[Measured]) -> list[np.ndarray]:
    """False discovery rates (L, E, C) of "this class chooses this expert more than chance", over all families.

    Cells that are not tested (unused experts, rare classes, families that only describe) have the rate 1.
    """
    cells, heights, nulls = [], [], []
    for one in measured:
        used = one.table.sum(-1, keepdims=True) > 0
        tested = np.broadcast_to(one.testable, one.table.shape) & used
        cells.append(tested)
        if not tested.any():
            continue
        pairs = [standardize(class_shares(one.table), null.shares) for null in one.nulls if null.shares is not None]
        # The observed must beat every shuffle, and every shuffle's chances count.
        heights.append(np.min([observed for observed, _ in pairs], axis=0)[tested])
        nulls.append(np.max([null for _, null in pairs], axis=0)[:, tested])
    if not heights:
        return [np.ones(tested.shape) for tested in cells]
    num_kept = min(len(null) for null in nulls)
    found = false_discovery_rates(np.concatenate(heights), np.concatenate([null[:num_kept] for null in nulls], axis=1))
    return _put_back(found, cells)


def _put_back(values: np.ndarray, cells: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The values (M,) in the places that are true in cells, one array after the other; 1 elsewhere."""
    filled = [np.ones(tested.shape) for tested in cells]
    ends = np.cumsum([tested.sum() for tested in cells])
    for one, tested, part in zip(filled, cells, np.split(values, ends[:-1]), strict=True):
        one[tested] = part
    return filled


# --- random keys ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyComparison:
    """One family under the run's own keys and under random ones, on the same words."""

    own: np.ndarray  # (L,) normalised information, what chance shares taken off
    random: np.ndarray  # (R, L)
    own_class_bits: np.ndarray  # (L, C) bits about "this class or not"
    random_class_bits: np.ndarray  # (R, L, C)
    p_value: np.ndarray  # (L, C)
    p_adjusted: np.ndarray  # (L, C), by Holm over all that was tested; 1 where it was not


def compare_keys(
    words: Words, draws: Sequence[np.ndarray], measured: Sequence[Measured], num_shuffles: int
) -> list[KeyComparison]:
    """Compare every family of `words` with the same words routed by random keys: draws, R times (L, N, K).

    num_shuffles: a few, that correct the information under each set of keys.
    """
    found = []
    for family in words.families:
        own, *others = (
            measure_family(
                replace(words, experts=experts),
                family,
                num_shuffles=num_shuffles,
                random=lambda: np.random.default_rng(0),  # the same shuffles for every routing
            )
            for experts in (words.experts, *draws)
        )
        own_bits = class_information(own.table)
        other_bits = np.stack([class_information(other.table) for other in others])
        # Information is nearly a square of what varies normally.
        p_value = beyond_draws(np.sqrt(own_bits), np.sqrt(other_bits))
        found.append((own.nmi, np.stack([other.nmi for other in others]), own_bits, other_bits, p_value))
    tested = [np.broadcast_to(one.testable, part[-1].shape) for one, part in zip(measured, found, strict=True)]
    p_values = np.concatenate([part[-1][mask] for part, mask in zip(found, tested, strict=True)])
    adjusted = _put_back(adjust_by_holm(p_values), tested)
    return [KeyComparison(*parts, p_adjusted) for parts, p_adjusted in zip(found, adjusted, strict=True)]


# --- candidates -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A guild that has yet to be judged."""

    family: int  # place among the families
    label: int  # place of the class among the family's
    layer: int
    experts: tuple[int, ...]  # the most enriched first
    npmi: float  # highest among its experts
    q_value: float  # largest among its experts


def find_candidates(
    measured: Sequence[Measured], rates: Sequence[np.ndarray], level: float, most_experts: int
) -> list[Candidate]:
    """Every layer and class with enriched experts, the clearest first; at most `most_experts` experts each."""
    found = []
    for place, (one, rate) in enumerate(zip(measured, rates, strict=True)):
        npmi = normalized_pmi(one.table)
        for layer, label in np.argwhere((rate <= level).any(1)):
            enriched = np.flatnonzero((rate[layer, :, label] <= level) & (npmi[layer, :, label] > 0))
            enriched = enriched[np.argsort(-npmi[layer, enriched, label], kind="stable")][:most_experts]
            if len(enriched):
                found.append(
                    Candidate(
                        family=place,
                        label=int(label),
                        layer=int(layer),
                        experts=tuple(enriched.tolist()),
                        npmi=float(npmi[layer, enriched, label].max()),
                        q_value=float(rate[layer, enriched, label].max()),
                    )
                )
    return sorted(found, key=lambda candidate: -candidate.npmi)


def describe_family(
    one: Measured, association: Association, keys: KeyComparison | None, intervals: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """A family's figures for the file."""
    counts = one.table[0].sum(0)
    layers = [
        {
            "layer": layer,
            "mi_bits": float(one.information[layer]),
            "mi_corrected_bits": float(one.information[layer] - one.null_mean[layer]),
            "nmi": float(one.nmi[layer]),
            "p_value": float(association.p_value[layer]),
            "p_adjusted": float(association.p_adjusted[layer]),
            "null_mean_bits": float(one.null_mean[layer]),
            "null_high_bits": float(max(np.quantile(null.information[:, layer], 0.99) for null in one.nulls)),
            "random_keys_nmi": [] if keys is None else keys.random[:, layer].tolist(),
            "own_keys_nmi": None if keys is None else float(keys.own[layer]),
            "interval": list(intervals[layer]),
        }
        for layer in range(len(one.information))
    ]
    return {
        "family": one.family.name,
        "classes": list(one.family.classes),
        "class_shares": (counts / max(1, counts.sum())).tolist(),
        "shuffles": [shuffle.__name__.replace("shuffle_", "").replace("_", " ") for shuffle in shuffles_of(one.family)],
        "describes": one.family.describes,
        "layers": layers,
    }

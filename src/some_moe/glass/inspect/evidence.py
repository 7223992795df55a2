"""What the routing of one run says about each family of classes: figures, nulls and p-values, not yet verdicts.

Shapes: N words, L layers, K experts a token, E experts, C classes, P shuffles, R draws of random keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from some_moe.glass.inspect import association
from some_moe.glass.inspect.labels import OTHER, PLACE, UNLABELLED, Family

MOST_SHARES, FEWEST_KEPT = 20_000_000, 32  # large libraries keep the shares of fewer shuffles
FEWEST_TOKENS = 20  # a class that occurs less often is not looked for


class Words:
    """The labelled tokens among the first of a text, with their experts and their labels in every family."""

    def __init__(
        self,
        families: Sequence[Family],
        tokens: np.ndarray,
        story: np.ndarray,
        experts: np.ndarray,
        num_experts: int,
        size: int | None = None,
    ) -> None:
        """tokens and story (n,), experts (L, n, K); bos is left out, and all that comes after `size` tokens."""
        self.places = np.flatnonzero(families[0].labels[:size] != UNLABELLED)  # (N,)
        self.families = [replace(family, labels=family.labels[self.places]) for family in families]
        self.experts = experts[:, self.places].astype(np.int64)  # (L, N, K)
        self.text = association.Arrangement(tokens[self.places], story[self.places])
        self.num_experts = num_experts


class Null(NamedTuple):
    """What P shuffles of the labels gave."""

    information: np.ndarray  # (P, L) bits
    shares: np.ndarray  # (P or fewer, L, E, C) float32 class shares; none where they were not asked for


class KeyComparison(NamedTuple):
    """One family under the run's own keys and under random ones, on the same words."""

    own: np.ndarray  # (L,) normalised information, what chance shares taken off
    random: np.ndarray  # (r, L), of the first draws alone: each needs shuffles
    own_class_bits: np.ndarray  # (L, C) bits about "this class or not"
    random_class_bits: np.ndarray  # (R, L, C)
    p_adjusted: np.ndarray  # (L, C), corrected over all that was tested; 1 where it was not


class Measured:
    """One family in one run: its selections, and how much more they tell than chance. Tests add what they find."""

    p_value: np.ndarray  # (L,) of the association, alone
    p_adjusted: np.ndarray  # (L,) corrected for all layers and families
    keys: KeyComparison | None = None  # None where there are no keys

    def __init__(
        self, words: Words, family: Family, experts: np.ndarray, num_shuffles: int, random: Generator | None = None
    ) -> None:
        """Count the selections of experts (L, N, K), and shuffle the labels in all the ways that they must beat.

        random: without it every routing meets the same shuffles, and nothing of them is kept for `rate_enrichment`.
        """
        sizes = (words.num_experts, len(family.classes))
        self.family = family
        self.table = association.count_table(experts, family.labels, *sizes)  # (L, E, C) selections
        places = association.index_selections(experts, *sizes)
        num_kept = 0 if random is None or family.describes else max(FEWEST_KEPT, MOST_SHARES // self.table.size)

        def count_shuffled(shuffle: association.Shuffle, random: Generator) -> Null:
            information, shares = [], []
            for number in range(num_shuffles):
                chosen = (places + shuffle(family.labels, words.text, random)[:, None]).ravel()
                table = np.bincount(chosen, minlength=self.table.size).reshape(self.table.shape)
                information.append(association.mutual_information(table))
                if number < num_kept:
                    shares.append(association.class_shares(table).astype(np.float32))
            return Null(np.stack(information), np.array(shares))

        self.nulls = [count_shuffled(shuffle, random or np.random.default_rng(0)) for shuffle in shuffles_of(family)]
        self.information = association.mutual_information(self.table)  # (L,) bits
        # Bits (L,) that chance shares, under the shuffle that leaves most.
        self.null_mean = np.asarray(np.max([null.information.mean(0) for null in self.nulls], axis=0))
        # The share (L,) that is told of the classes' entropy, the most that an expert could tell.
        entropy = np.maximum(association.entropy_bits(self.table.sum(-2)), association.TINY_BITS)
        self.nmi = np.asarray((self.information - self.null_mean) / entropy)

    @property
    def tested(self) -> np.ndarray:
        """Classes (C,) that a guild could be found for."""
        top_k = self.table[0].sum() / max(1, len(self.family.labels))
        often = self.table[0].sum(0) >= FEWEST_TOKENS * top_k
        named = np.array([name != OTHER for name in self.family.classes])
        return np.asarray(often & named & (not self.family.describes))

    def describe(self, intervals: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """The family's figures for the file. intervals: of the normalised information, by layer."""
        counts = self.table[0].sum(0)
        layers = [
            {
                "layer": layer,
                "mi_bits": float(self.information[layer]),
                "mi_corrected_bits": float(self.information[layer] - self.null_mean[layer]),
                "nmi": float(self.nmi[layer]),
                "p_value": float(self.p_value[layer]),
                "p_adjusted": float(self.p_adjusted[layer]),
                "null_mean_bits": float(self.null_mean[layer]),
                "null_high_bits": float(max(np.quantile(null.information[:, layer], 0.99) for null in self.nulls)),
                "random_keys_nmi": [] if self.keys is None else self.keys.random[:, layer].tolist(),
                "own_keys_nmi": None if self.keys is None else float(self.keys.own[layer]),
                "interval": list(interval),
            }
            for layer, interval in enumerate(intervals)
        ]
        return {
            "family": self.family.name,
            "classes": list(self.family.classes),
            "class_shares": (counts / max(1, counts.sum())).tolist(),
            "shuffles": [shuffle.__name__[len("shuffle_") :].replace("_", " ") for shuffle in shuffles_of(self.family)],
            "describes": self.family.describes,
            "layers": layers,
        }


def shuffles_of(family: Family) -> tuple[association.Shuffle, ...]:
    """The shuffles whose nulls a family must beat: see association.py."""
    if family.name == PLACE:
        return (association.shuffle_within_words,)
    if family.describes:
        # No shuffle keeps a word's frequency and changes its identity: these families are of words by definition.
        return (association.shuffle_by_story,)
    by_word = (association.shuffle_by_word,)
    return (*by_word, association.shuffle_by_story) if family.in_context else by_word


def judge_association(measured: Sequence[Measured]) -> None:
    """Compare every family and layer with its nulls, on a logarithmic scale, on which long tails differ less."""

    def log(bits: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(bits + association.TINY_BITS))

    tests = [(log(one.information), [log(null.information) for null in one.nulls]) for one in measured]
    for one, found in zip(measured, association.rank_together(tests), strict=True):
        one.p_value, one.p_adjusted = found


def rate_enrichment(measured: Sequence[Measured]) -> list[np.ndarray]:
    """False discovery rates (L, E, C) of "this class chooses this expert more than chance", over all families.

    Cells that are not tested (unused experts, rare classes, families that only describe) have the rate 1.
    """
    cells = [np.broadcast_to(one.tested, one.table.shape) & (one.table.sum(-1, keepdims=True) > 0) for one in measured]
    heights, nulls = [], []
    for one, tested in zip(measured, cells, strict=True):
        if tested.any():
            pairs = [association.standardize(association.class_shares(one.table), null.shares) for null in one.nulls]
            # The observed must beat every shuffle, and every shuffle's chances count.
            heights.append(np.min([observed for observed, _ in pairs], axis=0)[tested])
            nulls.append(np.max([null for _, null in pairs], axis=0)[:, tested])
    if not heights:
        return [np.ones(tested.shape) for tested in cells]
    num_kept = min(len(null) for null in nulls)
    found = association.false_discovery_rates(
        np.concatenate(heights), np.concatenate([null[:num_kept] for null in nulls], axis=1)
    )
    return _put_back(found, cells)


def _put_back(values: np.ndarray, cells: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The values (M,) in the places that are true in cells, one array after the other; 1 elsewhere."""
    filled = [np.ones(tested.shape) for tested in cells]
    ends = np.cumsum([tested.sum() for tested in cells])
    for one, tested, part in zip(filled, cells, np.split(values, ends[:-1]), strict=True):
        one[tested] = part
    return filled


def compare_keys(
    words: Words, draws: Sequence[np.ndarray], measured: Sequence[Measured], num_described: int, num_shuffles: int
) -> None:
    """Compare every family of `words` with the same words routed by random keys: draws, R times (L, n, K).

    Of the first num_described draws the information is told too, each corrected by a few shuffles.
    """
    found = []
    for family in words.families:
        sizes = (words.num_experts, len(family.classes))
        own = Measured(words, family, words.experts, num_shuffles)
        others = [Measured(words, family, draw[:, words.places], num_shuffles).nmi for draw in draws[:num_described]]
        tables = (association.count_table(draw[:, words.places], family.labels, *sizes) for draw in draws)
        bits = np.stack([association.class_information(table) for table in tables])
        own_bits = association.class_information(own.table)
        found.append(KeyComparison(own.nmi, np.stack(others), own_bits, bits, np.ones_like(own_bits)))
    cells = [np.broadcast_to(one.tested, part.p_adjusted.shape) for one, part in zip(measured, found, strict=True)]
    pairs = list(zip(found, cells, strict=True))
    own_bits = np.concatenate([part.own_class_bits[tested] for part, tested in pairs])
    random_bits = np.concatenate([part.random_class_bits[:, tested] for part, tested in pairs], axis=1)
    # Information is nearly a square of what varies evenly.
    adjusted = _put_back(association.adjust_by_maximum(np.sqrt(own_bits), np.sqrt(random_bits)), cells)
    for one, part, p_adjusted in zip(measured, found, adjusted, strict=True):
        one.keys = part._replace(p_adjusted=p_adjusted)

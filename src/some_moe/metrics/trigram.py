"""An interpolated Kneser–Ney trigram over token ids: the baseline that every small language model must beat.

With c the count of a trigram, n(·vw) the number of different ids seen before the pair vw, n(·v·) their sum
over w, n(·w) and n(··) the same one order lower, and D the discount, which is the same for all orders:

    P(w | u v) = max(c(uvw) - D, 0) / c(uv) + D |{w: c(uvw) > 0}| / c(uv) · P(w | v)
    P(w | v)   = max(n(·vw) - D, 0) / n(·v·) + D |{w: n(·vw) > 0}| / n(·v·) · P(w)
    P(w)       = max(n(·w) - D, 0) / n(··) + D |{w: n(·w) > 0}| / n(··) · 1 / V

A context that training never met passes its whole weight on to the next shorter one. A row is one document:
its first id (bos) is context only, and stands twice before the first target.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Trigram"]

Ids = NDArray[np.int64]
Rows = Sequence[Sequence[int] | NDArray[np.integer[Any]]]


Counts = list[tuple[Ids, Ids, Ids]]  # by order, shortest first: of targets, of their contexts, of what follows those


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trigram:
    """A fitted model; every array of keys is sorted, and packs the ids of an n-gram into one number."""

    vocab_size: int
    discount: float
    trigrams: Ids
    trigram_counts: Ids
    contexts: Ids
    context_counts: Ids
    context_followers: Ids
    pairs: Ids
    pair_counts: Ids
    last_counts: Ids
    last_followers: Ids
    word_counts: Ids

    @classmethod
    def fit(cls, rows: Rows, vocab_size: int, discount: float) -> Self:
        """Count the rows, each from its bos to its eos; `discount` is D, between 0 and 1."""
        if not 0 < discount < 1:
            raise ValueError(f"discount must lie between 0 and 1; it is {discount}")
        none, no_words = np.zeros(0, np.int64), np.zeros(max(0, vocab_size), np.int64)
        seen = ("trigrams", "trigram_counts", "contexts", "context_counts", "context_followers", "pairs", "pair_counts")
        words = ("last_counts", "last_followers", "word_counts")
        empty = dict.fromkeys(seen, none) | dict.fromkeys(words, no_words)
        return cls(vocab_size=vocab_size, discount=discount, **empty).extend(rows)

    def extend(self, rows: Rows) -> Self:
        """The model that has counted these rows too: the same as if all had been counted at once."""
        size = self.vocab_size
        before, last, target = _split_targets(rows, size)
        if not len(target):
            return self
        trigrams, counts = np.unique((before * size + last) * size + target, return_counts=True)
        is_new = _find(trigrams, self.trigrams, self.trigram_counts) == 0
        contexts, starts = np.unique(trigrams // size, return_index=True)
        pairs, pair_counts = np.unique(trigrams[is_new] % size**2, return_counts=True)
        new_pairs = pairs[_find(pairs, self.pairs, self.pair_counts) == 0]
        followers = np.add.reduceat(is_new.astype(np.int64), starts)
        found: dict[str, Any] = {}
        for keys, values, more, added in (
            ("trigrams", "trigram_counts", trigrams, counts),
            ("contexts", "context_counts", contexts, np.add.reduceat(counts, starts)),
            ("contexts", "context_followers", contexts, followers),
            ("pairs", "pair_counts", pairs, pair_counts),
        ):
            found[keys], found[values] = _add(getattr(self, keys), getattr(self, values), more, added)
        for name, ids in (
            ("last_counts", trigrams[is_new] // size % size),
            ("last_followers", new_pairs // size),
            ("word_counts", new_pairs % size),
        ):
            found[name] = getattr(self, name) + np.bincount(ids, minlength=size)
        return replace(self, **found)

    @classmethod
    def fit_tuned(cls, train_rows: Rows, valid_rows: Rows, vocab_size: int) -> Self:
        """Fit the train rows with the discount, to the nearest hundredth, that suits the valid rows best.

        The search takes the best tenth first, and then the best hundredth around it.
        """
        model = cls.fit(train_rows, vocab_size, discount=0.5)
        counts = model._look_up(*_split_targets(valid_rows, vocab_size))

        def score(hundredths: int) -> float:
            return _average(counts, hundredths / 100, vocab_size)

        tenth = min(range(10, 100, 10), key=score)
        return replace(model, discount=min(range(tenth - 9, tenth + 10), key=score) / 100)

    def loss(self, rows: Rows) -> float:
        """Mean nats per target; every id of a row is a target, but for its first, the bos."""
        counts = self._look_up(*_split_targets(rows, self.vocab_size))
        return _average(counts, self.discount, self.vocab_size)

    def _look_up(self, before: Ids, last: Ids, target: Ids) -> Counts:
        """What was counted of each target after its two ids."""
        context = before * self.vocab_size + last
        pair = last * self.vocab_size + target
        everywhere = np.zeros_like(target)
        num_words = np.count_nonzero(self.word_counts)
        return [
            (self.word_counts[target], everywhere + len(self.pairs), everywhere + num_words),
            (_find(pair, self.pairs, self.pair_counts), self.last_counts[last], self.last_followers[last]),
            (
                _find(context * self.vocab_size + target, self.trigrams, self.trigram_counts),
                _find(context, self.contexts, self.context_counts),
                _find(context, self.contexts, self.context_followers),
            ),
        ]


def _average(counts: Counts, discount: float, vocab_size: int) -> float:
    """Mean nats of the targets, each probability built up from the shortest context to the longest."""
    num_targets = len(counts[0][0])
    if not num_targets:
        raise ValueError("no row has a target: one needs at least two ids")
    probability = np.full(num_targets, 1 / vocab_size)
    for count, total, followers in counts:
        # An unseen context has count 0 and followers 0: dividing by 1, and passing on everything.
        divisor = np.maximum(total, 1)
        passed_on = np.where(total > 0, discount * followers / divisor, 1.0)
        probability = np.maximum(count - discount, 0) / divisor + passed_on * probability
    return float(-np.log(probability).mean())


def _find(keys: Ids, sorted_keys: Ids, values: Ids) -> Ids:
    """The value of each key, or 0 where `sorted_keys` does not have it."""
    if not len(sorted_keys):
        return np.zeros_like(keys)
    places = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[places] == keys, values[places], 0)


def _add(keys: Ids, values: Ids, more: Ids, added: Ids) -> tuple[Ids, Ids]:
    """Sorted keys and their values, with the values `added` to those of `more`, which are sorted too."""
    places = np.searchsorted(keys, more)
    known = places < len(keys)
    known[known] = keys[places[known]] == more[known]
    values = values.copy()
    values[places[known]] += added[known]
    new, at = ~known, places[~known]
    return np.insert(keys, at, more[new]), np.insert(values, at, added[new])


def _split_targets(rows: Rows, vocab_size: int) -> tuple[Ids, Ids, Ids]:
    """All targets of the rows, each with the two ids before it; before the second id of a row, bos twice."""
    if not 1 <= vocab_size <= 1 << 20:
        raise ValueError(f"vocab_size must be from 1 to {1 << 20}, to pack three ids; it is {vocab_size}")
    arrays = [np.asarray(row, dtype=np.int64) for row in rows if len(row)]
    ids = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(f"an id is outside the vocabulary of {vocab_size}")
    lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
    is_first = np.zeros(len(ids), dtype=bool)
    is_first[np.cumsum(lengths) - lengths] = True
    targets = np.flatnonzero(~is_first)
    before = np.where(is_first[targets - 1], targets - 1, targets - 2)
    return ids[before], ids[targets - 1], ids[targets]

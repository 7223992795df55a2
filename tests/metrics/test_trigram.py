"""The trigram is a Kneser–Ney model: right by hand, by a slow reference, and a distribution everywhere."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from numpy.typing import NDArray

from some_moe.metrics.trigram import Trigram

Rows = list[list[int]]
BOS, EOS = 0, 1
TOY = [[BOS, 2, 3, EOS], [BOS, 2, 2, EOS]]


def make_rows(count: int, vocab_size: int, seed: int) -> Rows:
    """Rows in which an id mostly follows the one before it by a small step."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        steps = random.geometric(0.4, size=int(random.integers(0, 20)))
        rows.append([BOS, *(2 + np.cumsum(steps) % (vocab_size - 2)).tolist(), EOS])
    return rows


def predict(model: Trigram, before: int, last: int) -> NDArray[np.float64]:
    """The probability of every id after two others: what it adds to the nats of a row of those two."""
    known = model.loss([[before, last]])
    return np.exp([known - 2 * model.loss([[before, last, word]]) for word in range(model.vocab_size)])


def predict_slowly(rows: Rows, vocab_size: int, discount: float, context: tuple[int, int]) -> list[float]:
    """The definition, counted with dictionaries of sets."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for row in rows:
        padded = [BOS, *row]
        counts.update(zip(padded, padded[1:], padded[2:], strict=False))
    before_pair = defaultdict(set)
    before_word = defaultdict(set)
    for first, second, third in counts:
        before_pair[second, third].add(first)
        before_word[third].add(second)

    def smooth(count: float, followers: list[float], rest: float) -> float:
        if not followers:
            return rest
        return (max(count - discount, 0) + discount * len(followers) * rest) / sum(followers)

    probabilities = []
    for word in range(vocab_size):
        words = [float(len(seen)) for seen in before_word.values()]
        pairs = [float(len(seen)) for (last, _), seen in before_pair.items() if last == context[1]]
        triples = [float(count) for trigram, count in counts.items() if trigram[:2] == context]
        unigram = smooth(len(before_word[word]) if word in before_word else 0, words, 1 / vocab_size)
        pair = (context[1], word)
        bigram = smooth(len(before_pair[pair]) if pair in before_pair else 0, pairs, unigram)
        probabilities.append(smooth(counts[*context, word], triples, bigram))
    return probabilities


def test_the_toy_example_matches_the_hand() -> None:
    model = Trigram.fit(TOY, vocab_size=4, discount=0.5)
    # Five pairs were seen: 02 23 31 22 21. One id stands before 3, two before 2, and two before 1.
    three, two, eos = 0.5 / 5 + 0.3 / 4, 1.5 / 5 + 0.3 / 4, 1.5 / 5 + 0.3 / 4
    # Behind 2 stand 3, 2 and 1, each after one id before the 2; behind 0 stands only 2.
    three_after_2, eos_after_2, two_after_bos = 0.5 / 3 + 0.5 * three, 0.5 / 3 + 0.5 * eos, 0.5 + 0.5 * two
    assert predict(model, BOS, 2)[3] == pytest.approx(0.5 / 2 + 0.5 * three_after_2)
    assert predict(model, BOS, 2)[EOS] == pytest.approx(0.5 * eos_after_2)
    assert predict(model, BOS, BOS)[2] == pytest.approx(1.5 / 2 + 0.25 * two_after_bos)
    assert predict(model, BOS, 2)[3] == pytest.approx(0.377083333)
    assert model.loss([[BOS, 2, EOS]]) == pytest.approx(-(math.log(0.921875) + math.log(0.177083333)) / 2)


@pytest.mark.parametrize("discount", [0.1, 0.75])
def test_it_equals_a_slow_reference(discount: float) -> None:
    rows = make_rows(60, vocab_size=12, seed=1)
    model = Trigram.fit(rows, vocab_size=12, discount=discount)
    for context in [(BOS, BOS), (BOS, 3), (3, 4), (5, 9), (EOS, 7), (2, EOS)]:
        expected = predict_slowly(rows, 12, discount, context)
        np.testing.assert_allclose(predict(model, *context), expected, rtol=1e-12)


def test_counting_on_gives_the_model_that_counted_everything_at_once() -> None:
    rows = make_rows(60, vocab_size=12, seed=4)
    whole = Trigram.fit(rows, vocab_size=12, discount=0.4)
    grown = Trigram.fit([], vocab_size=12, discount=0.4)
    for start in range(0, 60, 7):
        grown = grown.extend(rows[start : start + 7])
    grown = grown.extend([])
    for name in Trigram.__slots__:
        np.testing.assert_array_equal(getattr(grown, name), getattr(whole, name), err_msg=name)


def test_the_loss_is_the_mean_of_what_it_predicts_for_every_id_but_the_first() -> None:
    model = Trigram.fit(make_rows(80, vocab_size=15, seed=2), vocab_size=15, discount=0.6)
    rows = make_rows(10, vocab_size=15, seed=3)
    nats = [
        -math.log(predict(model, row[max(place - 2, 0)], row[place - 1])[row[place]])
        for row in rows
        for place in range(1, len(row))
    ]
    assert model.loss(rows) == pytest.approx(sum(nats) / len(nats))


def test_the_probabilities_sum_to_one_after_seen_and_unseen_contexts() -> None:
    rows = make_rows(50, vocab_size=10, seed=4)
    model = Trigram.fit(rows, vocab_size=14, discount=0.4)
    for before in range(14):
        for last in range(14):
            probabilities = predict(model, before, last)
            assert probabilities.sum() == pytest.approx(1)
            assert probabilities.min() > 0


def test_without_any_training_it_is_uniform() -> None:
    model = Trigram.fit([[BOS]], vocab_size=8, discount=0.5)
    assert model.loss([[BOS, 5, EOS]]) == pytest.approx(math.log(8))


def test_rows_do_not_run_into_each_other() -> None:
    rows = make_rows(40, vocab_size=9, seed=5)
    model = Trigram.fit(rows, vocab_size=9, discount=0.5)
    shuffled = Trigram.fit([[BOS], *rows[::-1], []], vocab_size=9, discount=0.5)
    assert model.loss(rows) == shuffled.loss(rows)
    together = sum(model.loss([row]) * (len(row) - 1) for row in rows) / sum(len(row) - 1 for row in rows)
    assert model.loss(rows) == pytest.approx(together)


def test_it_learns_what_a_shorter_context_cannot_tell() -> None:
    rows = [[BOS, first, 4, first, EOS] for first in (2, 3)] * 20
    model = Trigram.fit(rows, vocab_size=5, discount=0.2)
    assert predict(model, 2, 4)[2] > 0.95
    assert predict(model, 3, 4)[2] < 0.05


def test_the_tuned_discount_is_the_best_on_the_valid_rows() -> None:
    train, valid = make_rows(200, vocab_size=40, seed=6), make_rows(60, vocab_size=40, seed=7)
    tuned = Trigram.fit_tuned(train, valid, vocab_size=40)
    others = [Trigram.fit(train, vocab_size=40, discount=hundredths / 100) for hundredths in range(2, 100, 4)]
    assert tuned.loss(valid) <= min(model.loss(valid) for model in others)
    assert tuned.loss(valid) == Trigram.fit(train, vocab_size=40, discount=tuned.discount).loss(valid)


def test_rows_may_be_arrays() -> None:
    rows = make_rows(20, vocab_size=9, seed=8)
    arrays = [np.array(row, dtype=np.uint16) for row in rows]
    assert Trigram.fit(arrays, 9, 0.5).loss(arrays) == Trigram.fit(rows, 9, 0.5).loss(rows)


def test_ids_of_a_large_vocabulary_do_not_collide() -> None:
    top = (1 << 20) - 1
    model = Trigram.fit([[BOS, top, top - 1, top, EOS]], vocab_size=1 << 20, discount=0.5)
    assert model.loss([[BOS, top, top - 1, top, EOS]]) < 1
    assert model.loss([[BOS, top - 1, top, top - 1, EOS]]) > 1


@pytest.mark.parametrize("discount", [0.0, 1.0, -0.1, math.nan])
def test_a_discount_outside_its_range_is_refused(discount: float) -> None:
    with pytest.raises(ValueError, match="discount"):
        Trigram.fit(TOY, vocab_size=4, discount=discount)


def test_ids_outside_the_vocabulary_and_rows_without_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        Trigram.fit([[BOS, 4, EOS]], vocab_size=4, discount=0.5)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        Trigram.fit([[BOS, -1, EOS]], vocab_size=4, discount=0.5)
    with pytest.raises(ValueError, match="target"):
        Trigram.fit(TOY, vocab_size=4, discount=0.5).loss([[BOS], []])
    with pytest.raises(ValueError, match="target"):
        Trigram.fit_tuned(TOY, [[BOS]], vocab_size=4)
    with pytest.raises(ValueError, match="vocab_size"):
        Trigram.fit(TOY, vocab_size=1 << 21, discount=0.5)


def test_two_million_tokens_score_as_their_tenths_do() -> None:
    """No tables of vocabulary × vocabulary, no loop over tokens: either would hang here."""
    random = np.random.default_rng(9)
    ids = np.minimum(random.zipf(1.3, size=(10_000, 200)) + 1, 8191)
    ids[:, 0], ids[:, -1] = BOS, EOS
    model = Trigram.fit(list(ids), vocab_size=8192, discount=0.75)
    loss = model.loss(list(ids))
    assert 0 < loss < math.log(8192)
    parts = [model.loss(list(part)) for part in ids.reshape(10, 1000, 200)]
    assert loss == pytest.approx(sum(parts) / 10)

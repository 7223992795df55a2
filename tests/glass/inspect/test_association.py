"""Association: figures by hand, shuffles that keep what they promise to keep, and p-values that hold their level."""

import math

import numpy as np
import pytest

from some_moe.glass.inspect.association import (
    Arrangement,
    class_information,
    class_shares,
    count_table,
    entropy_bits,
    false_discovery_rates,
    mutual_information,
    normalized_pmi,
    rank_p_values,
    rank_together,
    shuffle_by_story,
    shuffle_by_word,
    shuffle_within_words,
)
from some_moe.glass.inspect.evidence import Measured, Words
from some_moe.glass.inspect.labels import Family

EXPERTS = np.array([[[0, 1], [0, 2], [3, 2]]])  # one layer, three tokens, two experts each
LABELS = np.array([0, 0, 1])


def make_text(seed: int, num_words: int = 64, num_stories: int = 12, length: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Words with a Zipf-like frequency in stories."""
    random = np.random.default_rng(seed)
    chance = 1 / np.arange(2, num_words + 2)
    tokens = random.choice(num_words, size=num_stories * length, p=chance / chance.sum())
    return tokens, np.repeat(np.arange(num_stories), length)


def test_a_table_counts_every_selection_once() -> None:
    table = count_table(EXPERTS, LABELS, num_experts=4, num_classes=2)
    assert table.tolist() == [[[2, 0], [1, 0], [1, 1], [0, 1]]]


def test_information_of_known_tables() -> None:
    assert mutual_information(np.array([[5, 0], [0, 5]])) == pytest.approx(1)
    assert mutual_information(np.array([[2, 4], [3, 6]])) == pytest.approx(0)
    assert mutual_information(np.zeros((3, 2))) == 0
    assert entropy_bits(np.array([1, 1, 2, 0])) == pytest.approx(1.5)


def test_class_information_asks_about_one_class_at_a_time() -> None:
    table = np.array([[6, 0, 0], [0, 1, 3], [0, 2, 6]])
    bits = class_information(table)
    for label in range(3):
        one_or_other = np.stack((table[:, label], table.sum(1) - table[:, label]), axis=1)
        assert bits[label] == pytest.approx(float(mutual_information(one_or_other)))
    assert bits[0] == pytest.approx(float(entropy_bits(np.array([6, 12]))))


def test_npmi_runs_from_never_to_only_together() -> None:
    found = normalized_pmi(np.array([[4, 0], [0, 4]]))
    assert found.tolist() == [[1, -1], [-1, 1]]
    assert normalized_pmi(np.array([[2, 2], [2, 2]])) == pytest.approx(np.zeros((2, 2)))
    by_hand = math.log((3 / 8) / (4 / 8 * 4 / 8)) / -math.log(3 / 8)
    assert normalized_pmi(np.array([[3, 1], [1, 3]]))[0, 0] == pytest.approx(by_hand)


def test_class_shares_sum_to_one_for_classes_that_occur() -> None:
    shares = class_shares(np.array([[1, 0], [3, 0]]))
    assert shares.tolist() == [[0.25, 0], [0.75, 0]]


def test_a_shuffle_by_word_moves_a_word_as_a_whole() -> None:
    tokens, story = make_text(0)
    text = Arrangement(tokens, story)
    of_word = np.random.default_rng(1).integers(0, 3, 64)
    shuffled = shuffle_by_word(of_word[tokens], text, np.random.default_rng(2))
    assert (shuffled != of_word[tokens]).any()
    for word in np.unique(tokens):
        assert len(set(shuffled[tokens == word].tolist())) == 1


def test_words_exchange_labels_only_with_words_of_like_frequency() -> None:
    tokens, story = make_text(0)
    text = Arrangement(tokens, story)
    words, word = np.unique(tokens, return_inverse=True)
    shuffled = shuffle_by_word(text.bins[word], text, np.random.default_rng(3))
    assert (shuffled == text.bins[word]).all()
    counts = np.bincount(word)
    highest = [counts[text.bins == one].max() for one in range(text.bins.max() + 1)]
    assert highest == sorted(highest, reverse=True)
    assert len(words) // 16 == text.bins.max() + 1


def test_a_shuffle_by_word_keeps_blocks_of_a_story_together() -> None:
    # Every word of a story has the story's label: wherever a block goes, it stays of one label.
    tokens, story = make_text(4)
    shuffled = shuffle_by_word(story % 3, Arrangement(tokens, story), np.random.default_rng(5))
    for place in np.unique(tokens * 100 + story):
        block = shuffled[tokens * 100 + story == place]
        assert len(set(block.tolist())) == 1


def test_a_shuffle_by_story_exchanges_whole_sequences() -> None:
    tokens, story = make_text(6)
    labels = np.arange(len(tokens))
    shuffled = shuffle_by_story(labels, Arrangement(tokens, story), np.random.default_rng(7)).reshape(12, 60)
    assert (np.diff(shuffled, axis=1) == 1).all()
    assert sorted(shuffled[:, 0].tolist()) == list(range(0, 720, 60))


def test_a_shuffle_by_story_stretches_stories_of_other_lengths() -> None:
    story = np.repeat([0, 1], [10, 30])
    position = np.concatenate((np.arange(10) / 10, np.arange(30) / 30))
    labels = (position * 5).astype(np.int64)
    text = Arrangement(np.arange(40) % 7, story)
    for seed in range(5):
        assert (shuffle_by_story(labels, text, np.random.default_rng(seed)) == labels).mean() > 0.7


def significant(seed: int, *, planted: bool) -> bool:
    """Is a class of words associated with experts, if words find theirs at random (unless planted)?"""
    tokens, story = make_text(seed)
    random = np.random.default_rng(seed + 1000)
    label_of, expert_of = random.integers(0, 3, 64), random.integers(0, 6, 64)
    if planted:
        expert_of = np.where(random.random(64) < 0.7, label_of, expert_of)
    experts, labels = expert_of[tokens][None, :, None], label_of[tokens]
    family = Family(name="kind", classes=("a", "b", "c"), labels=labels)  # not in context: shuffled by word
    words = Words([family], tokens, story, experts, 6)
    found = Measured(words, family, experts, 99, random)
    return bool(rank_p_values(found.information, found.nulls[0].information)[0] <= 0.05)


def test_a_content_router_without_guilds_is_not_called_significant() -> None:
    # Single tokens shuffled at random would call every one of these routers significant.
    assert sum(significant(seed, planted=False) for seed in range(100)) <= 11  # 5 expected


def test_a_content_router_with_guilds_is_found() -> None:
    assert sum(significant(seed, planted=True) for seed in range(20)) >= 18


def find_beyond(level: float, num_draws: int, num_tests: int, times: int) -> tuple[int, int]:
    """How often any of many tests passes by chance, corrected, and how often the first passes alone.

    Skewed draws, of tests that hang together and have tails of different length, as random keys give them.
    """
    random, length = np.random.default_rng(0), np.linspace(0.2, 1.2, num_tests)
    any_passed = first_passed = 0
    for _ in range(times):
        draws = np.exp(
            length * (random.normal(size=(num_draws + 1, 1)) + random.normal(size=(num_draws + 1, num_tests)))
        )
        alone, adjusted = rank_together([(draws[0], [draws[1:]])])[0]
        any_passed += bool((adjusted <= level).any())
        first_passed += bool(alone[0] <= level)
    return any_passed, first_passed


def test_the_largest_of_many_corrects_for_all_of_them() -> None:
    any_passed, first_passed = find_beyond(0.05, num_draws=99, num_tests=20, times=400)
    assert any_passed <= 35  # 20 expected; without correction more than 200
    assert first_passed <= 35


@pytest.mark.slow
def test_skewed_draws_pass_no_more_often_than_the_level_says() -> None:
    # The level, the draws and about as many tests as an analysis has. 20 expected; more than 35 has a chance of 0.1 %.
    any_passed, first_passed = find_beyond(1 / 300, num_draws=599, num_tests=100, times=6000)
    print(f"{any_passed} of 6000 pass corrected, {first_passed} alone")
    assert any_passed <= 35
    assert first_passed <= 35


def test_a_test_with_two_nulls_must_beat_the_harder_one() -> None:
    null = np.linspace(0, 1, 99)[:, None]
    (alone, adjusted), (other, _) = rank_together([(np.array([2.0]), [null, null + 3]), (np.array([2.0]), [null])])
    assert alone == pytest.approx([1.0])
    assert adjusted == pytest.approx([1.0])
    assert other == pytest.approx([0.01])


def test_false_discovery_rates_count_the_chances_of_the_shuffles() -> None:
    null = np.array([[0.0, 1.0], [2.0, 0.5], [0.1, 0.2], [0.3, 0.4]])
    # Above 3 no shuffled cell lies, above 0.45 three do; four shuffles.
    q = false_discovery_rates(np.array([3.0, 0.45]), null)
    assert q.tolist() == [(1 / 4) / 1, ((1 + 3) / 4) / 2]


def test_false_discovery_rates_never_fall_with_the_evidence() -> None:
    random = np.random.default_rng(1)
    observed = np.concatenate((random.normal(size=300), random.normal(6, size=20)))
    q = false_discovery_rates(observed, random.normal(size=(200, 320)))
    order = np.argsort(-observed)
    assert (np.diff(q[order]) >= 0).all()
    chosen = np.flatnonzero(q <= 0.05)
    assert len(chosen) >= 18
    assert (chosen < 300).mean() < 0.2


def test_a_shuffle_within_words_changes_only_what_the_word_does_not_say() -> None:
    tokens, story = make_text(8)
    text, random = Arrangement(tokens, story), np.random.default_rng(9)
    assert (shuffle_within_words(tokens, text, random) == tokens).all()
    shuffled = shuffle_within_words(story, text, random)
    assert (shuffled != story).mean() > 0.5
    for word in np.unique(tokens):
        assert set(shuffled[tokens == word]) <= set(story[tokens == word])

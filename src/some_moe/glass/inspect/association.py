"""How much an expert tells about a token's class, and how much it would tell by chance.

Shapes: L layers, N tokens, K experts a token, E experts, C classes, P shuffles.

A table counts selections: each of a token's K experts counts once, whatever its gate. Routing is by content,
so all occurrences of one word tend to go to the same experts, and shuffling single tokens would call any
content router a specialist. Labels are therefore shuffled in the clumps in which routing comes:

- *by word*: within bins of like frequency the words exchange their labels. Each block (one word in one story)
  takes the labels of a random block of the word it exchanges with. If experts are found by word, but words
  find them regardless of class, then the class is as far from the experts as in such a shuffle.
- *by story*: stories exchange whole label sequences, stretched to each other's length. This keeps what place
  in a story and the course of a story say about a label; it does not keep words together.

- *within words*: blocks of one word exchange their labels. This keeps all that the word itself says about a label.

A class that is a matter of the word (part of speech) is shuffled by word. One that depends on context (role,
plot part) must beat both of the first, and its p-value is the larger of the two. The place in a story, which the
second cannot change, is shuffled within words.

Every p-value is a rank among shuffles or draws, and many are corrected together by the largest of each shuffle or
draw: no shape of a tail is assumed, and a few hundred are enough however much is tested.
"""

from collections.abc import Callable, Sequence

import numpy as np

TINY_BITS = 1e-6
BIN_SIZE = 16  # words that exchange their labels: neighbours in frequency


def index_selections(experts: np.ndarray, num_experts: int, num_classes: int) -> np.ndarray:
    """Where each selection of `experts` (L, N, K) counts in a flat (L, E, C) table, but for its label: (L, N, K)."""
    layers = np.arange(len(experts), dtype=np.int64)[:, None, None]
    return np.asarray((layers * num_experts + experts) * num_classes)


def count_table(experts: np.ndarray, labels: np.ndarray, num_experts: int, num_classes: int) -> np.ndarray:
    """Selections by layer, expert and class (L, E, C) of experts (L, N, K) for tokens with labels (N,)."""
    places = index_selections(experts, num_experts, num_classes) + labels[:, None]
    size = len(experts) * num_experts * num_classes
    return np.bincount(places.ravel(), minlength=size).reshape(len(experts), num_experts, num_classes)


def entropy_bits(counts: np.ndarray) -> np.ndarray:
    """Entropy of the shares along the last axis; 0 where nothing was counted."""
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    return np.asarray(-np.where(shares > 0, shares * np.log2(np.where(shares > 0, shares, 1)), 0).sum(-1))


def mutual_information(table: np.ndarray) -> np.ndarray:
    """Bits that expert and class share, from tables (…, E, C): (…); as found, without any correction."""
    joint = entropy_bits(table.reshape(*table.shape[:-2], -1))
    return np.asarray(np.maximum(entropy_bits(table.sum(-1)) + entropy_bits(table.sum(-2)) - joint, 0))


def class_information(table: np.ndarray) -> np.ndarray:
    """Bits that the expert tells about "this class or not", from tables (…, E, C): (…, C)."""
    rest = table.sum(-1, keepdims=True) - table
    return mutual_information(np.moveaxis(np.stack((table, rest), -1), -2, -3))


def normalized_pmi(table: np.ndarray) -> np.ndarray:
    """Normalised pointwise mutual information (…, E, C): 1 only together, 0 independent, −1 never together."""
    joint = table / np.maximum(table.sum((-1, -2), keepdims=True), 1)
    apart = joint.sum(-1, keepdims=True) * joint.sum(-2, keepdims=True)
    together = (joint > 0) & (joint < 1)
    safe = np.where(together, joint, 0.5)
    ratio = np.log(safe / np.where(together, apart, 1)) / -np.log(safe)
    return np.where(together, ratio, np.where(joint >= 1, 1.0, -1.0))


def class_shares(table: np.ndarray) -> np.ndarray:
    """How a class's selections are spread over the experts (…, E, C); 0 for a class that never occurs."""
    return np.asarray(table / np.maximum(table.sum(-2, keepdims=True), 1))


class Arrangement:
    """Where the B blocks (one word in one story), W words and S stories of N tokens lie."""

    def __init__(self, tokens: np.ndarray, story: np.ndarray) -> None:
        """tokens and story (N,); the tokens of a story stand together."""
        places = np.arange(len(tokens))
        _, word, counts = np.unique(tokens, return_inverse=True, return_counts=True)
        self.story_start = np.flatnonzero(np.diff(story, prepend=story[0] - 1))  # (S,) first token of a story
        self.story_length = np.diff(self.story_start, append=len(story))  # (S,)
        self.story = np.repeat(np.arange(len(self.story_start)), self.story_length)  # (N,) numbered from 0
        # How far into its story each token stands (N,), from 0 to below 1.
        self.progress = (places - self.story_start[self.story]) / self.story_length[self.story]
        self.order = np.argsort(word, kind="stable")  # (N,) tokens sorted by word, then by place
        sorted_word, sorted_story = word[self.order], self.story[self.order]
        begins = (np.diff(sorted_word, prepend=-1) != 0) | (np.diff(sorted_story, prepend=-1) != 0)
        self.block_start = np.flatnonzero(begins)  # (B,) first place of a block in `order`
        self.block_length = np.diff(self.block_start, append=len(tokens))  # (B,)
        self.block_word = sorted_word[self.block_start]  # (B,)
        back = np.argsort(self.order, kind="stable")
        self.block = (np.cumsum(begins) - 1)[back]  # (N,) each token's block
        within = back - self.block_start[self.block]
        self.repeats = np.flatnonzero(within)  # tokens that are not the first of their block
        self.within = within[self.repeats]  # the place in its block of each of the repeats
        self.word_start = np.searchsorted(self.block_word, np.arange(len(counts)))  # (W,) first block of a word
        self.word_blocks = np.diff(self.word_start, append=len(self.block_word))  # (W,) how many it has
        rank = np.argsort(np.argsort(-counts, kind="stable"), kind="stable")
        # Words of like frequency share a bin (W,); a last handful of words joins the bin before it.
        self.bins = np.minimum(rank // BIN_SIZE, max(0, len(counts) // BIN_SIZE - 1))
        self.in_bins = np.argsort(self.bins, kind="stable")  # (W,) words sorted by bin


Shuffle = Callable[[np.ndarray, Arrangement, np.random.Generator], np.ndarray]


def shuffle_by_word(labels: np.ndarray, text: Arrangement, random: np.random.Generator) -> np.ndarray:
    """Labels (N,) after words of like frequency have exchanged theirs, block by block."""
    partner = np.empty(len(text.bins), dtype=np.int64)
    partner[text.in_bins] = np.argsort(text.bins + random.random(len(text.bins)))
    return _take_from(partner[text.block_word], labels, text, random)


def shuffle_within_words(labels: np.ndarray, text: Arrangement, random: np.random.Generator) -> np.ndarray:
    """Labels (N,) after the blocks of each word have exchanged theirs."""
    return _take_from(text.block_word, labels, text, random)


def _take_from(word: np.ndarray, labels: np.ndarray, text: Arrangement, random: np.random.Generator) -> np.ndarray:
    """Labels (N,) after each block has taken those of a random block of a word (B,)."""
    giver = text.word_start[word] + (random.random(len(word)) * text.word_blocks[word]).astype(np.int64)
    place = text.block_start[giver][text.block]
    place[text.repeats] += text.within % text.block_length[giver[text.block[text.repeats]]]
    return np.asarray(labels[text.order[place]])


def shuffle_by_story(labels: np.ndarray, text: Arrangement, random: np.random.Generator) -> np.ndarray:
    """Labels (N,) after stories have exchanged theirs whole, stretched to the length that is needed."""
    giver = random.permutation(len(text.story_start))
    place = (text.progress * text.story_length[giver][text.story] + 1e-6).astype(np.int64)
    return np.asarray(labels[place + text.story_start[giver][text.story]])


def rank_p_values(observed: np.ndarray, null: np.ndarray) -> np.ndarray:
    """Share of the null (P, …) that is at least as large as observed (…), counting the observed itself."""
    return np.asarray((1 + (null >= observed).sum(0)) / (1 + len(null)))


def standardize(observed: np.ndarray, null: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Observed (…) and null (P, …) in standard deviations from the mean of all P + 1; 0 where they never vary.

    The observed one is among them, as in its rank: else it alone would be measured by others, and stand out too much.
    """
    every = np.concatenate((null, np.asarray(observed)[None]))
    mean, deviation = every.mean(0), every.std(0, ddof=1)
    scale = np.where(deviation > 1e-9, deviation, np.inf)
    return (observed - mean) / scale, (null - mean) / scale


def adjust_by_maximum(observed: np.ndarray, nulls: np.ndarray) -> np.ndarray:
    """Family-wise p-values (M,): how often the largest of many standardised statistics of a shuffle reaches each.

    observed (M,), nulls (P, M). Each is compared with the largest among itself and all that stand out less (the
    step-down of Westfall and Young).
    """
    heights, chances = standardize(observed, nulls)
    order = np.argsort(-heights, kind="stable")
    largest = np.maximum.accumulate(chances[:, order[::-1]], axis=1)[:, ::-1]
    adjusted = np.empty(len(heights))
    adjusted[order] = np.maximum.accumulate(rank_p_values(heights[order], largest))
    return adjusted


def rank_together(tests: Sequence[tuple[np.ndarray, Sequence[np.ndarray]]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """p-values (M,) of each test, alone and corrected for all tests; by the null that is hardest to beat.

    A test is its statistics (M,) and one or several nulls (P, M) of them. Tests with shuffles of their own make the
    largest larger than a common shuffle would: the corrected p-values err on the safe side.
    """
    pairs = [(observed, null) for observed, nulls in tests for null in nulls]
    if not pairs:
        return []
    every = adjust_by_maximum(np.concatenate([one for one, _ in pairs]), np.concatenate([null for _, null in pairs], 1))
    adjusted = iter(np.split(every, np.cumsum([len(one) for one, _ in pairs])[:-1]))
    return [
        (np.max([rank_p_values(observed, null) for null in nulls], 0), np.max([next(adjusted) for _ in nulls], 0))
        for observed, nulls in tests
    ]


def false_discovery_rates(observed: np.ndarray, null: np.ndarray) -> np.ndarray:
    """q-values (M,) of standardised statistics (M,), given P shuffles of them (P, M).

    The rule of Benjamini and Hochberg with the number of false discoveries at each height counted in the shuffles
    instead of computed from a tail; so cells with long tails are paid for as such.
    """
    order = np.argsort(-observed, kind="stable")
    heights = np.sort(null, axis=None)
    expected = (1 + len(heights) - np.searchsorted(heights, observed[order], side="left")) / len(null)
    rates = np.minimum(1, expected / np.arange(1, len(observed) + 1))
    q_values = np.empty(len(observed))
    # The rate of a cell is the lowest at which it would still be found.
    q_values[order] = np.minimum.accumulate(rates[::-1])[::-1]
    return q_values


def cover(draws: np.ndarray, level: float) -> tuple[float, float]:
    """The interval that leaves out a share `level` of the draws (R,), half at each end."""
    low, high = np.quantile(draws, (level / 2, 1 - level / 2))
    return float(low), float(high)


def bootstrap_weights(num_stories: int, num_draws: int, random: np.random.Generator) -> np.ndarray:
    """How often each story is drawn (R, S) when as many stories as there are are drawn with replacement."""
    return random.multinomial(num_stories, np.full(num_stories, 1 / num_stories), size=num_draws)

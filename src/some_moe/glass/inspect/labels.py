"""What kind of token each token is: the classes that experts may or may not specialise on.

A label belongs to the token whose vector is routed, that is, to the input at a position. Generated stories
know the part of speech, role and plot part of every word; any text has the token itself, how frequent it is,
and its form. bos is no word and has no label.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from some_moe.config import DataConfig
from some_moe.data.sources import GENERATED_HELD_OUT, GENERATED_TRAIN, SPLITS
from some_moe.data.tokenizer import BOS, EOS, PAD, Tokenizer
from some_moe.stories.generator import PARTS, POS, ROLES, Story, tell_many

UNLABELLED = -1
NO_WORDS = (PAD, BOS, EOS)
OTHER = "other"
NUM_IDENTITIES = 24  # the most frequent tokens that are a class of their own
FREQUENCIES = ("most frequent", "frequent", "less frequent", "rare")  # a quarter of the text each
FORMS = ("word", "capitalised", "piece", "mark", "number", OTHER)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One way to sort tokens into classes.

    in_context: the class is not a matter of the word alone, so its shuffles must also keep stories whole.
    describes: the family only measures what experts know; its classes are not kinds that a guild could serve.
    """

    name: str
    classes: tuple[str, ...]
    labels: np.ndarray  # (N,) int64: place in `classes`, or UNLABELLED
    in_context: bool = False
    describes: bool = False


def label_tokens(
    tokens: np.ndarray, story: np.ndarray, tokenizer: Tokenizer, data: DataConfig, split: str
) -> list[Family]:
    """Every family that this text allows. tokens and story (N,): the ids and the story each belongs to, in order."""
    rows = np.split(tokens, np.flatnonzero(np.diff(story)) + 1)
    told = match_stories(rows, tokenizer, data, split)
    words = [] if told is None else label_words(tokens, rows, told, tokenizer)
    if not words:  # forms are all that can be said of the words of a text that has no tags
        form_of_id = {token: form_of(tokenizer.decode([token])) for token in np.unique(tokens).tolist()}
        words = [_sort_into("form", FORMS, [form_of_id[token] for token in tokens.tolist()], tokens)]
    return [*words, label_identities(tokens, tokenizer), label_frequencies(tokens)]


def match_stories(rows: Sequence[np.ndarray], tokenizer: Tokenizer, data: DataConfig, split: str) -> list[Story] | None:
    """Tell the stories behind rows of ids (bos first) again; None where they are not generated stories.

    The rows are the book's stories in order, but for the repeats that were left out, and some may be cut short.
    """
    if data.source != "stories" or split not in SPLITS:
        return None
    asked = data.train_subset_size if split == "train" else data.val_subset_size
    size = asked or (GENERATED_TRAIN if split == "train" else GENERATED_HELD_OUT)
    book = tell_many(size, seed=SPLITS.index(split))
    told = ((story, [BOS, *tokenizer.encode(story.text)]) for story in book)
    # Each search goes on where the one before it stopped.
    found = [next((story for story, ids in told if np.array_equal(ids[: len(row)], row)), None) for row in rows]
    return None if None in found else found  # type: ignore[return-value]


def label_words(
    tokens: np.ndarray, rows: Sequence[np.ndarray], told: Sequence[Story], tokenizer: Tokenizer
) -> list[Family]:
    """Part of speech, role and plot part of every token."""
    tags = [(OTHER, OTHER, OTHER)] * len(tokens)
    start = 0
    for row, story in zip(rows, told, strict=True):
        for place, number in enumerate(align_words(story, tokenizer), start + 1):
            if place < start + len(row) and number is not None:
                word = story.words[number]
                tags[place] = (word.pos or OTHER, word.role or OTHER, word.part or OTHER)
        start += len(row)
    kinds = (("part of speech", sorted(POS)), ("role", sorted(ROLES - {""})), ("plot part", PARTS))
    return [
        _sort_into(name, (*classes, OTHER), column, tokens, in_context=name != "part of speech")
        for (name, classes), column in zip(kinds, zip(*tags, strict=True), strict=True)
    ]


def align_words(story: Story, tokenizer: Tokenizer) -> Iterator[int | None]:
    """For each token of a story's text, the word with most of its characters; None for space alone."""
    words, first = story.words, 0
    for start, end in tokenizer.backend.encode(story.text).offsets:
        while first < len(words) and words[first].end <= start:
            first += 1
        shared = {
            number: min(end, words[number].end) - max(start, words[number].start)
            for number in takewhile(lambda number: words[number].start < end, range(first, len(words)))  # noqa: B023
        }
        yield max(shared, key=shared.__getitem__, default=None)


def _sort_into(
    name: str, classes: Sequence[str], names: Sequence[str], tokens: np.ndarray, *, in_context: bool = False
) -> Family:
    """A family whose tokens (N,) have the classes of these names."""
    labels = np.array([classes.index(one) for one in names], dtype=np.int64)
    labels[np.isin(tokens, NO_WORDS)] = UNLABELLED
    return Family(name=name, classes=tuple(classes), labels=labels, in_context=in_context)


def label_identities(tokens: np.ndarray, tokenizer: Tokenizer) -> Family:
    """The token itself, for the most frequent ones."""
    frequent = rank_words(tokens)[0][:NUM_IDENTITIES]
    table = np.full(int(tokens.max(initial=0)) + 1, len(frequent), dtype=np.int64)
    table[frequent] = np.arange(len(frequent))
    labels = np.where(np.isin(tokens, NO_WORDS), UNLABELLED, table[tokens])
    classes = (*(tokenizer.decode([token]) for token in frequent.tolist()), OTHER)
    return Family(name="identity", classes=classes, labels=labels, in_context=True, describes=True)


def label_frequencies(tokens: np.ndarray) -> Family:
    """How frequent the token is in this very text: four classes of about as many occurrences each."""
    ids, counts = rank_words(tokens)
    # A token belongs where the middle of its occurrences falls.
    middle = (np.cumsum(counts) - counts / 2) / max(1, counts.sum())
    table = np.full(int(tokens.max(initial=0)) + 1, UNLABELLED, dtype=np.int64)
    table[ids] = np.minimum((middle * len(FREQUENCIES)).astype(np.int64), len(FREQUENCIES) - 1)
    return Family(name="frequency", classes=FREQUENCIES, labels=table[tokens], in_context=True, describes=True)


def rank_words(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids that are text, the most frequent first, and how often each occurs."""
    ids, counts = np.unique(tokens[~np.isin(tokens, NO_WORDS)], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return ids[order], counts[order]


def form_of(text: str) -> str:
    """The form of a token's text; a leading space begins a word."""
    bare = text.strip()
    if bare.isdigit():
        return "number"
    if bare.replace("'", "").isalpha():
        if bare[0].isupper():
            return "capitalised"
        return "word" if text[0].isspace() else "piece"
    return "mark" if bare and not any(sign.isalnum() for sign in bare) else OTHER

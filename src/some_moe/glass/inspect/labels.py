"""What kind of token each token is: the classes that experts may or may not specialise on.

A label belongs to the token whose vector is routed, that is, to the input at a position. Generated stories
know the part of speech, role and plot part of every word; any text has the token itself, how frequent it is,
and its form. bos is no word and has no label.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from some_moe.config import DataConfig
from some_moe.data.sources import GENERATED_HELD_OUT, GENERATED_TRAIN, SPLITS
from some_moe.data.stories import PARTS, POS, ROLES, Story, tell_many
from some_moe.data.tokenizer import BOS, EOS, PAD, Tokenizer

UNLABELLED = -1
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
    tokens: np.ndarray, story: np.ndarray, *, tokenizer: Tokenizer, data: DataConfig, split: str
) -> list[Family]:
    """Every family that this text allows. tokens and story (N,): the ids and the story each belongs to, in order."""
    starts = np.flatnonzero(np.diff(story, prepend=-1))
    rows = np.split(tokens, starts[1:])
    told = match_stories(rows, tokenizer, data, split)
    words = [] if told is None else label_words(tokens, rows, told, tokenizer)
    kinds = words or [label_forms(tokens, tokenizer)]
    return [*kinds, label_identities(tokens, tokenizer), label_frequencies(tokens)]


def match_stories(rows: Sequence[np.ndarray], tokenizer: Tokenizer, data: DataConfig, split: str) -> list[Story] | None:
    """Tell the stories behind rows of ids (bos first) again; None where they are not generated stories.

    The rows are the book's stories in order, but for the repeats that were left out, and some may be cut short.
    """
    if data.source != "stories" or split not in SPLITS:
        return None
    asked = data.train_subset_size if split == "train" else data.val_subset_size
    size = asked or (GENERATED_TRAIN if split == "train" else GENERATED_HELD_OUT)
    book = tell_many(size, seed=SPLITS.index(split))
    found: list[Story] = []
    for row in rows:
        story = next((story for story in book if _begins_with(story, row, tokenizer)), None)
        if story is None:
            return None
        found.append(story)
    return found


def _begins_with(story: Story, row: np.ndarray, tokenizer: Tokenizer) -> bool:
    return np.array_equal([BOS, *tokenizer.encode(story.text)][: len(row)], row)


def label_words(
    tokens: np.ndarray, rows: Sequence[np.ndarray], told: Sequence[Story], tokenizer: Tokenizer
) -> list[Family]:
    """Part of speech, role and plot part of every token."""
    tags = [[OTHER] * len(tokens) for _ in range(3)]
    start = 0
    for row, story in zip(rows, told, strict=True):
        for place, word in enumerate(align_words(story, tokenizer), start + 1):
            if place < start + len(row) and word is not None:
                found = story.words[word]
                for column, tag in zip(tags, (found.pos, found.role, found.part), strict=True):
                    column[place] = tag or OTHER
        start += len(row)
    names = (("part of speech", sorted(POS)), ("role", sorted(ROLES - {""})), ("plot part", PARTS))
    return [
        Family(
            name=name,
            classes=(*classes, OTHER),
            labels=_number([*classes, OTHER], column, tokens),
            in_context=name != "part of speech",
        )
        for (name, classes), column in zip(names, tags, strict=True)
    ]


def align_words(story: Story, tokenizer: Tokenizer) -> Iterator[int | None]:
    """For each token of a story's text, the word with most of its characters; None for space alone."""
    word = 0
    for start, end in tokenizer.backend.encode(story.text).offsets:
        while word < len(story.words) and story.words[word].end <= start:
            word += 1
        best, most = None, 0
        for number in range(word, len(story.words)):
            candidate = story.words[number]
            if candidate.start >= end:
                break
            shared = min(end, candidate.end) - max(start, candidate.start)
            if shared > most:
                best, most = number, shared
        yield best


def _number(classes: Sequence[str], names: Sequence[str], tokens: np.ndarray) -> np.ndarray:
    places = {name: place for place, name in enumerate(classes)}
    labels = np.array([places[name] for name in names], dtype=np.int64)
    labels[np.isin(tokens, (PAD, BOS, EOS))] = UNLABELLED
    return labels


def label_identities(tokens: np.ndarray, tokenizer: Tokenizer) -> Family:
    """The token itself, for the most frequent ones."""
    ids, counts = _count_words(tokens)
    frequent = [int(i) for i in ids[np.argsort(-counts, kind="stable")][:NUM_IDENTITIES]]
    labels = np.full(len(tokens), len(frequent), dtype=np.int64)
    for place, token in enumerate(frequent):
        labels[tokens == token] = place
    labels[np.isin(tokens, (PAD, BOS, EOS))] = UNLABELLED
    classes = (*(tokenizer.decode([token]) for token in frequent), OTHER)
    return Family(name="identity", classes=classes, labels=labels, in_context=True, describes=True)


def label_frequencies(tokens: np.ndarray) -> Family:
    """How frequent the token is in this very text: four classes of about as many occurrences each."""
    ids, counts = _count_words(tokens)
    order = np.argsort(-counts, kind="stable")
    # A token belongs where the middle of its occurrences falls.
    middle = (np.cumsum(counts[order]) - counts[order] / 2) / max(1, counts.sum())
    quarter = np.minimum((middle * len(FREQUENCIES)).astype(np.int64), len(FREQUENCIES) - 1)
    table = np.full(int(tokens.max(initial=0)) + 1, UNLABELLED, dtype=np.int64)
    table[ids[order]] = quarter
    return Family(name="frequency", classes=FREQUENCIES, labels=table[tokens], in_context=True, describes=True)


def label_forms(tokens: np.ndarray, tokenizer: Tokenizer) -> Family:
    """What the token looks like: all that can be said of the words of a text that has no tags."""
    ids, inverse = np.unique(tokens, return_inverse=True)
    forms = [form_of(tokenizer.decode([int(token)])) for token in ids]
    labels = _number(FORMS, forms, ids)[inverse]
    return Family(name="form", classes=FORMS, labels=labels)


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


def _count_words(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids that are text, and how often each occurs."""
    ids, counts = np.unique(tokens[~np.isin(tokens, (PAD, BOS, EOS))], return_counts=True)
    return ids, counts

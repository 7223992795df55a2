"""What kind of token each token is: the classes that experts may or may not specialise on.

A label belongs to the token whose vector is routed, that is, to the input at a position. Generated stories
know the part of speech, role and plot part of every word. Words of any other English text are tagged, and have a
place in their story; those of any other text have a form. Every text has the token itself, and how frequent it is.
A piece of a word has its word's label; bos is no word and has none.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from some_moe.config import DataConfig
from some_moe.data.sources import GENERATED_HELD_OUT, GENERATED_TRAIN, SPLITS
from some_moe.data.tokenizer import BOS, EOS, PAD, Tokenizer
from some_moe.glass.inspect.tagger import ACCURACY, CLASSES, find_names, share_known, tag_text
from some_moe.stories.generator import PARTS, POS, ROLES, Story, tell_many

UNLABELLED = -1
NO_WORDS = (PAD, BOS, EOS)
OTHER = "other"
PLACE = "place in story"
PLACES = ("opening", "early", "middle", "late", "ending")  # a fifth of the story each
FEWEST_KNOWN = 0.5  # of the words of a text, for it to be English
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
    words = label_told(tokens, rows, told, tokenizer) if told else label_english(tokens, rows, tokenizer)
    if not words:  # forms are all that can be said of the words of a text that has no tags
        form_of_id = {token: form_of(tokenizer.decode([token])) for token in np.unique(tokens).tolist()}
        words = [_sort_into("form", FORMS, [form_of_id[token] for token in tokens.tolist()], tokens)]
    return [*words, label_identities(tokens, tokenizer), label_frequencies(tokens)]


def describe_labels(families: Sequence[Family]) -> str:
    """By whom the words were sorted, in one sentence."""
    names = {family.name for family in families}
    if "role" in names:
        return "Parts of speech, roles and plot parts are the stories' own tags."
    if "form" in names:
        return "This is no English text that the tagger knows, so words are sorted by their form alone."
    return f"Parts of speech are by the built-in tagger ({ACCURACY})."


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


def label_told(
    tokens: np.ndarray, rows: Sequence[np.ndarray], told: Sequence[Story], tokenizer: Tokenizer
) -> list[Family]:
    """Part of speech, role and plot part of every token."""
    tags = []
    for row, story in zip(rows, told, strict=True):
        words = [(word.start, word.end) for word in story.words]
        found = [None, *align_words(tokenizer.backend.encode(story.text).offsets, words)][: len(row)]
        every = [None if number is None else story.words[number] for number in found]
        tags += [(one.pos or OTHER, one.role or OTHER, one.part or OTHER) if one else (OTHER,) * 3 for one in every]
    kinds = (("part of speech", sorted(POS)), ("role", sorted(ROLES - {""})), ("plot part", PARTS))
    return [
        _sort_into(name, (*classes, OTHER), column, tokens, in_context=name != "part of speech")
        for (name, classes), column in zip(kinds, zip(*tags, strict=True), strict=True)
    ]


def label_english(tokens: np.ndarray, rows: Sequence[np.ndarray], tokenizer: Tokenizer) -> list[Family]:
    """Part of speech by the tagger, and place in the story, of every token; nothing where the text is not English."""
    piece_of = {token: tokenizer.decode([token]) for token in np.unique(tokens).tolist()}
    pieces = [["" if token in NO_WORDS else piece_of[token] for token in row.tolist()] for row in rows]
    texts = ["".join(one) for one in pieces]
    if share_known(texts) < FEWEST_KNOWN:
        return []
    names, tags = find_names(texts), []
    for text, one in zip(texts, pieces, strict=True):
        ends = np.cumsum([len(piece) for piece in one]).tolist()
        words = tag_text(text, names)
        found = align_words(zip([0, *ends[:-1]], ends, strict=True), [word[:2] for word in words])
        tags += [OTHER if number is None else words[number][2] for number in found]
    places = [PLACES[len(PLACES) * i // len(row)] for row in rows for i in range(len(row))]
    return [_sort_into("part of speech", (*CLASSES, OTHER), tags, tokens), _sort_into(PLACE, PLACES, places, tokens)]


def align_words(offsets: Iterable[tuple[int, int]], words: Sequence[tuple[int, int]]) -> Iterator[int | None]:
    """For each token, from where to where it goes, the word with most of its characters; None for space alone."""
    first = 0
    for start, end in offsets:
        while first < len(words) and words[first][1] <= start:
            first += 1
        shared = {
            number: min(end, words[number][1]) - max(start, words[number][0])
            for number in takewhile(lambda number: words[number][0] < end, range(first, len(words)))  # noqa: B023
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

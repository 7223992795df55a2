"""Part of speech of every word of any English text, in the classes of the generated stories.

A word's classes come from words.txt and from the stories' lexicon, else from its ending; which of them it has here is
decided along the sentence (Viterbi), by how classes follow each other in told stories. Nothing else is learned, and no
text but our own is in it. Names are what a text writes with a capital where no sentence begins.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from some_moe.stories.generator import LEXICON, POS, read_entries, read_sections, tell_many

CLASSES = tuple(sorted(POS))
# Measured on text that nobody looked at while the lists were made; the three agree with each other on 93 to 94 % of the
# words of TinyStories, and on 90 to 92 % of those of novels. See LOG.md.
ACCURACY = (
    "right on 98 % of the words of generated stories; as most of three library taggers say on 95 % of the words of "
    "TinyStories, and on 91 % of those of novels"
)
NUM_STORIES = 150  # from which the order of classes is learned
PREFERENCES = ((1.0,), (0.85, 0.15), (0.6, 0.3, 0.1), (0.5, 0.3, 0.15, 0.05))
# Endings of words that no list has, and what such words mostly are; the first that fits.
ENDINGS: tuple[tuple[str, dict[str, float]], ...] = (
    ("ly", {"adv": 0.9, "adj": 0.1}),
    ("ness ment tion sion ship hood ism ity ance ence age dom ist ogy ure", {"noun": 1.0}),
    ("ous ful less able ible ish ic ical ive ary ory y al ant ent", {"adj": 0.7, "noun": 0.3}),
    ("ing", {"verb": 0.8, "noun": 0.1, "adj": 0.1}),
    ("ed", {"verb": 0.8, "adj": 0.2}),
    ("est", {"adj": 0.8, "noun": 0.2}),
    ("er or", {"noun": 0.8, "adj": 0.2}),
    ("s", {"noun": 0.85, "verb": 0.15}),
    ("", {"noun": 0.75, "verb": 0.12, "adj": 0.12, "adv": 0.01}),
)
WORD = re.compile(
    r"(?P<word>(?:Mrs?|Ms|Dr|St)\.|[^\W\d_]+?(?=n['’]t\b)|n['’]t\b|[^\W\d_]+(?:-[^\W\d_]+)*|['’](?:s|m|d|re|ve|ll)\b)"
    r"|(?P<num>\d+(?:[.,:]\d+)*(?:st|nd|rd|th|s)?)|(?P<punct>[^\w\s]|_)"
)
SENTENCE_ENDS = frozenset(".!?:\"“”‘'…*—-")
Weights = dict[str, float]


@cache
def read_words() -> dict[str, Weights]:
    """The classes of every listed word, with their shares; names and "I" as they are written."""
    sections = read_sections(Path(__file__).with_name("words.txt").read_text(encoding="utf-8"))
    listed: dict[str, list[str]] = {}
    entries = [*read_entries(sections["words"]), *read_entries(LEXICON["words"])]
    entries += [("propn", names) for _, names in read_entries(LEXICON["names"])]
    for kind, words in entries:
        for word in words.split() if kind in POS else ():
            known = listed.setdefault(word, [])
            known += [kind] if kind not in known else []
    listed |= {word: kinds.split() for word, kinds in read_entries(sections["either"])}
    for kinds in listed.values():
        kinds += ["noun"] if kinds == ["verb"] else []  # nearly every verb is a noun somewhere
    return {word: dict(zip(kinds, PREFERENCES[len(kinds[:4]) - 1], strict=False)) for word, kinds in listed.items()}


@cache
def guess(word: str) -> Weights:
    """The classes of a word in small letters, with their shares, by the lists or by its ending."""
    words = read_words()
    if word in words:
        return words[word]
    if "-" in word:
        return {"adj": 0.5, "noun": 0.5}
    for ending, kinds in (("ing", ENDINGS[3][1]), ("ed", ENDINGS[4][1]), ("es", None), ("s", None)):
        stem = word.removesuffix(ending)
        tries = (stem, stem + "e", stem[:-1], stem.removesuffix("i") + "y") if stem != word else ()
        if any("verb" in words.get(one, ()) for one in tries):
            return kinds or {"verb": 0.75, "noun": 0.25}
    if re.fullmatch(r"\w+(er|est)", word):
        stem = re.sub("(er|est)$", "", word)
        if any("adj" in words.get(one, ()) for one in (stem, stem + "e", stem[:-1], stem.removesuffix("i") + "y")):
            return {"adj": 0.8, "adv": 0.2}
    return next(kinds for endings, kinds in ENDINGS if word.endswith(tuple(endings.split()) or ("",)))


@cache
def learn_order() -> tuple[np.ndarray, np.ndarray]:
    """Logarithms, from told stories, of the share of each class (C,), and of it behind two others (C + 1, C + 1, C).

    Place C stands for what comes before a sentence.
    """
    size = len(CLASSES)
    pairs, triples = np.zeros((size + 1, size)), np.zeros((size + 1, size + 1, size))
    for story in tell_many(NUM_STORIES, seed=0):
        before, last = size, size
        for word in story.words:
            kind = CLASSES.index(word.pos)
            triples[before, last, kind] += 1
            pairs[last, kind] += 1
            before, last = (size, size) if word.text in ".!?" else (last, kind)
    single = pairs.sum(0) + 1
    single /= single.sum()
    second = (pairs + 20 * single) / (pairs.sum(1, keepdims=True) + 20)
    third = (triples + 20 * second) / (triples.sum(2, keepdims=True) + 20)
    return np.log(single), np.log(third)


def share_known(texts: Iterable[str]) -> float:
    """The share of the words of these texts that stand in the lists, as they are written or in small letters."""
    words, found = read_words(), [match[0] for text in texts for match in WORD.finditer(text) if match["word"]]
    return sum(word in words or word.lower() in words for word in found) / max(1, len(found))


def find_names(texts: Iterable[str]) -> frozenset[str]:
    """Words that these texts write with a capital within sentences, and mostly so."""
    upper: Counter[str] = Counter()
    lower: Counter[str] = Counter()
    for text in texts:
        last = "."
        for match in WORD.finditer(text):
            word = match[0]
            if match["word"] and last not in SENTENCE_ENDS:
                (upper if word[0].isupper() else lower)[word.capitalize()] += 1
            elif match["word"] and word[0].islower():
                lower[word.capitalize()] += 1
            last = word[-1]
    return frozenset(word for word, count in upper.items() if count > lower[word] and word not in ("I", "God"))


def tag_text(text: str, names: frozenset[str] = frozenset()) -> list[tuple[int, int, str]]:
    """Every word and mark of a text: where it begins and ends, and its class. names: see `find_names`."""
    found, sentence = [], []
    for match in WORD.finditer(text):
        sentence.append(match)
        if match[0] in ".!?":
            found += _tag_sentence(sentence, names)
            sentence = []
    return found + _tag_sentence(sentence, names)


def _tag_sentence(matches: Sequence[re.Match[str]], names: frozenset[str]) -> list[tuple[int, int, str]]:
    """The likeliest classes of one sentence."""
    single, third = learn_order()
    Way = tuple[float, list[int]]
    ways: dict[tuple[int, int], Way] = {(len(CLASSES), len(CLASSES)): (0.0, [])}  # the best to each last two classes
    last = "."
    for match in matches:
        longer: dict[tuple[int, int], Way] = {}
        for kind, share in _weigh(match, last, names).items():
            here = CLASSES.index(kind)
            for (before, behind), (score, path) in ways.items():
                new = score + third[before, behind, here] + math.log(share) - single[here]
                if new > longer.get((behind, here), (-math.inf,))[0]:
                    longer[behind, here] = (new, [*path, here])
        ways, last = longer, match[0][-1]
    path = max(ways.values(), key=lambda way: way[0])[1]
    return [(match.start(), match.end(), CLASSES[kind]) for match, kind in zip(matches, path, strict=True)]


def _weigh(match: re.Match[str], last: str, names: frozenset[str]) -> Weights:
    """The classes that a word can have, with their shares. last: the sign before it."""
    word = match[0]
    if match["punct"] or match["num"]:
        return {"punct" if match["punct"] else "num": 1}
    words, small = read_words(), word.lower()
    if word[0].isupper() and word != "I":
        if word.capitalize() in names or (word in words and small not in words):
            return {"propn": 0.9} | guess(small) if small in words else {"propn": 1}
        if small not in words:
            return {"propn": 0.7} | {kind: share * 0.3 for kind, share in guess(small).items()}
        if last not in SENTENCE_ENDS:
            return {"propn": 0.5} | guess(small)
    return words.get(word) or guess(small)

"""The embedded corpus keeps its promises: endless, stable, varied, coherent and correctly tagged."""

import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from some_moe.stories import generator
from some_moe.stories.generator import LEXICON, PARTS, PLOTS, POS, ROLES, Story, Word, tell, tell_many

TEXTS_OF_FIRST_100 = "87f71693770d1bc5256bfc69870c87204d367c436b88a35f3c0d76f3b77af039"
TAGS_OF_FIRST_100 = "3d19e33eec841d7fde1f69b338fd532378abc7fec54e5650ca0d83230676191b"
PEOPLE = ("hero", "friend", "helper")
SPEAKERS = (*PEOPLE, "stranger")
FEMALE, MALE = {"she", "her", "herself"}, {"he", "him", "his", "himself"}


@pytest.fixture(scope="module")
def book() -> tuple[list[str], float]:
    """The texts of ten thousand stories, and ten times the processor seconds of the quickest thousand."""
    texts, seconds = [], []
    for start in range(0, 10_000, 1_000):
        clock = time.process_time()
        texts += [story.text for story in tell_many(1_000, start=start)]
        seconds.append(time.process_time() - clock)
    return texts, 10 * min(seconds)


@pytest.fixture(scope="module")
def tagged() -> list[Story]:
    return list(tell_many(1_500))


def split_sentences(text: str) -> list[str]:
    """A sentence ends at a mark before a space, or before a closing quotation mark and a capital letter."""
    return re.split(r'(?<=[.!?])\s+|(?<=[.!?]")\s+(?=[A-Z"])', text)


def write_tags(story: Story) -> str:
    return " ".join(f"{word.text}/{word.pos}/{word.role}/{word.part}" for word in story.words)


def pair_with_next(story: Story) -> Iterator[tuple[Word, Word]]:
    return zip(story.words, story.words[1:], strict=False)


def read_entries(text: str) -> list[tuple[str, str]]:
    """The "key = value" entries of the data files, read apart from the code under test."""
    return re.findall(r"^(\S+) = (.*(?:\n .*)*)", text, flags=re.M)


def list_plans() -> list[str]:
    """Every phrase of the lexicon and the plots."""
    blocks = [LEXICON[name] for name in ("helpers", "places", "spots", "facts", "turns")]
    phrases = [value for block in (*blocks, *PLOTS.values()) for _, value in read_entries(block)]
    return phrases + [table.partition("//")[2] for _, table in read_entries(LEXICON["tables"])]


def test_the_first_hundred_stories_are_the_same_on_every_machine() -> None:
    first = list(tell_many(100))
    assert hashlib.sha256("\n".join(story.text for story in first).encode()).hexdigest() == TEXTS_OF_FIRST_100
    assert hashlib.sha256("\n".join(map(write_tags, first)).encode()).hexdigest() == TAGS_OF_FIRST_100


def test_a_story_depends_on_its_number_and_its_book_only() -> None:
    forward = [tell(index, seed=3) for index in range(30)]
    backward = [tell(index, seed=3) for index in reversed(range(30))]
    assert forward == backward[::-1]
    assert list(tell_many(10, seed=3, start=20)) == forward[20:]


def test_two_books_share_no_story() -> None:
    assert not {story.text for story in tell_many(300)} & {story.text for story in tell_many(300, seed=1)}


def test_ten_thousand_stories_take_less_than_ten_seconds(book: tuple[list[str], float]) -> None:
    assert book[1] < 10


def test_ten_thousand_stories_never_repeat(book: tuple[list[str], float]) -> None:
    assert len(set(book[0])) == 10_000


def test_under_seven_percent_of_the_sentences_repeat_an_earlier_one(book: tuple[list[str], float]) -> None:
    sentences = [sentence for text in book[0] for sentence in split_sentences(text)]
    assert 1 - len(set(sentences)) / len(sentences) < 0.07


def test_the_vocabulary_is_rich_and_its_words_are_not_equally_common(book: tuple[list[str], float]) -> None:
    counts = Counter(word for text in book[0] for word in re.findall(r"[a-z]+(?:-[a-z]+)*", text.lower()))
    commonest = sum(count for _, count in counts.most_common(100))
    assert 1_200 < len(counts) < 1_900
    assert 0.5 < commonest / counts.total() < 0.75
    assert counts.most_common(1)[0][0] == "the"


def test_stories_are_between_ninety_and_two_hundred_and_twenty_words_long(tagged: list[Story]) -> None:
    lengths = sorted(len(story.text.split()) for story in tagged)
    assert lengths[0] >= 90
    assert lengths[int(0.95 * len(lengths))] <= 220
    assert lengths[-1] <= 260


def test_openings_and_endings_vary(book: tuple[list[str], float]) -> None:
    texts = book[0]
    assert sum(text.endswith("The end.") for text in texts) < 0.1 * len(texts)
    assert sum(text.startswith("Once upon a time") for text in texts) < 0.15 * len(texts)
    assert max(Counter(text.split()[0] for text in texts).values()) < 0.2 * len(texts)


def test_every_plot_is_told() -> None:
    marks = ("lost", "sorry", "brave", "share", "give up", "birthday", "hide", "Kindness", "learned to")
    texts = [story.text for story in tell_many(400)]
    assert len(PLOTS) >= 8
    for mark in marks:
        assert any(mark in text for text in texts), mark


def test_tags_cover_every_word_and_mark_exactly_once_and_in_order(tagged: list[Story]) -> None:
    for story in tagged:
        end = 0
        for word in story.words:
            assert story.text[end : word.start] in ("", " ")
            assert story.text[word.start : word.end] == word.text != ""
            assert re.fullmatch(r"[A-Za-z]+(-[a-z]+)*|'s|[.,!?:\"]", word.text)
            assert (word.pos == "punct") == (not word.text[-1].isalpha())
            end = word.end
        assert end == len(story.text)


def test_tags_are_the_documented_ones_and_all_in_use(tagged: list[Story]) -> None:
    words = [word for story in tagged for word in story.words]
    assert {word.pos for word in words} == POS
    assert {word.role for word in words} == ROLES
    assert {word.part for word in words} == set(PARTS)


def test_the_parts_of_the_plot_come_in_order_and_none_is_missing(tagged: list[Story]) -> None:
    for story in tagged:
        parts = [PARTS.index(word.part) for word in story.words]
        assert set(parts) == set(range(len(PARTS)))
        assert parts == sorted(parts)


def test_articles_and_punctuation_play_no_role(tagged: list[Story]) -> None:
    assert not any(word.role for story in tagged for word in story.words if word.pos in ("det", "punct"))


def test_the_names_of_hero_and_friend_stay_the_same(tagged: list[Story]) -> None:
    for story in tagged:
        for role in ("hero", "friend"):
            assert len({word.text for word in story.words if (word.role, word.pos) == (role, "propn")}) == 1


def test_pronouns_agree_with_the_person_all_through_the_story(tagged: list[Story]) -> None:
    girls = set(dict(read_entries(LEXICON["names"]))["she"].split())
    for story in tagged:
        for role in PEOPLE:
            spoken = {word.text.lower() for word in story.words if (word.role, word.pos) == (role, "pron")}
            assert not (spoken & FEMALE and spoken & MALE)
            names = {word.text for word in story.words if (word.role, word.pos) == (role, "propn")}
            if role != "helper":
                assert not spoken & (MALE if names <= girls else FEMALE)


def test_i_is_whoever_is_speaking(tagged: list[Story]) -> None:
    checked = 0
    for story in tagged:
        speech: list[Word] | None = None
        for index, word in enumerate(story.words):
            if word.text != '"':
                if speech is not None:
                    speech.append(word)
            elif speech is None:
                speech = []
            else:
                after = [said.role for said in story.words[index + 1 : index + 6] if said.role in SPEAKERS]
                if after and speech[-1].text != ".":
                    meant = {said.role for said in speech if said.text.lower() in ("i", "me", "my", "mine")}
                    assert meant <= {after[0]}, story.text
                    checked += len(meant)
                speech = None
        assert speech is None
    assert checked > 500


def test_a_stands_before_consonants_and_an_before_vowels(tagged: list[Story]) -> None:
    for story in tagged:
        for word, following in pair_with_next(story):
            if word.text.lower() in ("a", "an"):
                sounds_open = re.match("hour|[aeiou](?!ne$)", following.text)
                assert word.text.lower() == ("an" if sounds_open else "a"), f"{word.text} {following.text}"


def test_sentences_begin_with_a_capital_and_end_with_a_mark(tagged: list[Story]) -> None:
    for story in tagged:
        assert story.text.count('"') % 2 == 0
        assert not re.search(r"\s[.,!?:]|\s\s|,,|\.\.|[a-z][.,!?:][A-Za-z]", story.text)
        for sentence in split_sentences(story.text):
            assert re.match(r'"?[A-Z]', sentence), sentence
            assert re.search(r'[.!?]"?$', sentence), sentence


def test_no_word_stands_twice_in_a_row(tagged: list[Story]) -> None:
    for story in tagged:
        for word, following in pair_with_next(story):
            assert word.pos == "punct" or word.text.lower() != following.text.lower(), story.text


def test_every_thing_of_the_ending_was_there_before(tagged: list[Story]) -> None:
    """The describing noun in front of another, as in "village square", may be new."""
    for story in tagged:
        named = [
            (word.role, word.text, word.part)
            for word, following in pair_with_next(story)
            if word.pos in ("noun", "propn") and (word.role, word.pos) != (following.role, following.pos)
        ]
        before = {(role, text) for role, text, part in named if part != "ending"}
        for role, text, part in named:
            if part == "ending" and role in ("hero", "friend", "place", "object"):
                assert (role, text) in before, story.text


def test_a_want_meets_a_problem_and_hero_and_friend_are_there_at_the_end(tagged: list[Story]) -> None:
    for story in tagged:
        roles = {part: {word.role for word in story.words if word.part == part} for part in PARTS}
        assert {"hero", "trait"} <= roles["opening"]
        assert "want" in roles["want"]
        assert "problem" in roles["problem"]
        assert "hero" in roles["ending"]
        assert roles["ending"] & {"friend", "both"}


def test_every_word_of_every_plan_is_in_the_lexicon() -> None:
    lists = [value for name in ("names", "words") for _, value in read_entries(LEXICON[name])]
    known = set(" ".join(lists).split())
    for plan in list_plans():
        literal = re.sub(r"\{[^}]*\}|[hfex]>[hfex]?\"|<[a-z]+|/[a-z]+|'s|\+", " ", plan)
        words = re.findall(r"[A-Za-z]+(?:-[a-z]+)*", literal)
        assert not [word for word in words if not {word, word.lower()} & known], plan


def test_settings_are_of_plots_and_kinds_of_place_that_there_are() -> None:
    settings = dict(read_entries(LEXICON["settings"]))
    assert settings.keys() <= PLOTS.keys()
    assert set(" ".join(settings.values()).split()) <= dict(read_entries(LEXICON["places"])).keys()


def test_every_word_is_listed_under_one_part_of_speech() -> None:
    listed = Counter(word for _, value in read_entries(LEXICON["words"]) for word in value.split())
    assert not [word for word, count in listed.items() if count > 1]


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        ("a zorble", "lexicon"),
        ("walk/zorble", "no part of speech"),
        ("<want a kite", "at the end"),
        ("a [red|blue kite", "at the end"),
        ("a red] kite", "unexpected"),
        ("a kite; a ball", "cannot read"),
    ],
)
def test_a_mistake_in_a_plan_is_refused(plan: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        generator.parse_phrase(plan)


@pytest.mark.parametrize(
    ("word", "following", "pos"),
    [("to", "the", "prep"), ("to", "build", "part"), ("up", "the", "prep"), ("up", ",", "adv")],
)
def test_words_of_two_kinds_are_told_apart_by_the_next_word(word: str, following: str, pos: str) -> None:
    pairs = (pair for story in tell_many(2_000, seed=5) for pair in pair_with_next(story))
    found = (first.pos for first, second in pairs if (first.text, second.text) == (word, following))
    assert next(found) == pos

"""The tagger: what lists say, what endings say, what the sentence decides, and how often it is right."""

import pytest

from some_moe.glass.inspect.tagger import CLASSES, find_names, guess, read_words, share_known, tag_text
from some_moe.stories.generator import POS, tell_many


def tag(text: str, **options: frozenset[str]) -> list[tuple[str, str]]:
    return [(text[start:end], kind) for start, end, kind in tag_text(text, **options)]


def test_the_lists_name_known_classes_alone() -> None:
    assert all(kind in POS for kinds in read_words().values() for kind in kinds)
    assert all(0.99 < sum(kinds.values()) < 1.01 for kinds in read_words().values())


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        *(("extraordinarily", "adv"), ("ambassadorship", "noun"), ("mysterious", "adj"), ("grumbling", "verb")),
        *(("carried", "verb"), ("marmalade", "noun"), ("happier", "adj"), ("stopping", "verb"), ("well-known", "adj")),
    ],
)
def test_an_ending_says_what_a_word_mostly_is(word: str, kind: str) -> None:
    kinds = guess(word)
    assert max(kinds, key=lambda one: kinds[one]) == kind


def test_the_sentence_decides_what_a_word_is() -> None:
    assert ("play", "noun") in tag("The play was long.")
    assert ("play", "verb") in tag("They want to play.")
    assert ("to", "part") in tag("They want to play.")
    assert ("to", "prep") in tag("She went to the house.")


def test_contractions_and_titles_fall_into_their_words() -> None:
    assert tag("Mr. Fox didn't run.") == [
        *(("Mr.", "propn"), ("Fox", "noun"), ("did", "verb"), ("n't", "part"), ("run", "verb"), (".", "punct")),
    ]


def test_names_are_what_a_text_writes_with_a_capital_within_sentences() -> None:
    names = find_names(["Then Zorbel saw the dog. The dog saw Zorbel. I saw him."])
    assert names == {"Zorbel"}
    assert tag("Zorbel ran.", names=names)[0] == ("Zorbel", "propn")


def test_odd_text_is_tagged_without_a_complaint() -> None:
    for text in (
        "",
        " ",
        "\n\n",
        "…",
        "_",
        "''",
        "\u0301",
        "中文",
        "a" * 500,
        "x-",
        "-x",
        "n't",
        "\ufffd\ufffd",
        "3.4th",
    ):
        assert all(kind in CLASSES for _, kind in tag(text))


def test_english_is_known_and_other_languages_are_not() -> None:
    assert share_known(["The old man went to the window and looked out at the sea."]) > 0.9
    assert share_known(["Der alte Mann ging zum Fenster und sah auf das Meer hinaus."]) < 0.3


def test_words_of_stories_that_were_not_learned_from_are_right() -> None:
    words = right = 0
    for story in tell_many(10, seed=7):
        found = {(start, end): kind for start, end, kind in tag_text(story.text)}
        words += len(story.words)
        right += sum(found.get((word.start, word.end)) == word.pos for word in story.words)
    assert right / words > 0.97

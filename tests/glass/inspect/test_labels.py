"""Labels: every token of a generated story has the tags of the word it stands for; other text is tagged."""

import numpy as np
import pytest

from some_moe.config import DataConfig
from some_moe.data.batches import encode_rows
from some_moe.data.tokenizer import BOS, Tokenizer
from some_moe.glass.inspect.labels import (
    OTHER,
    PLACE,
    PLACES,
    UNLABELLED,
    align_words,
    describe_labels,
    form_of,
    label_frequencies,
    label_identities,
    label_tokens,
    match_stories,
)
from some_moe.stories.generator import Story, Word, tell_many

DATA = DataConfig(source="stories", seq_len=2000, val_subset_size=12)
STORIES = list(tell_many(12, seed=1))
TOKENIZER = Tokenizer.train([story.text for story in STORIES], 400)


def find_offsets(text: str) -> list[tuple[int, int]]:
    return list(TOKENIZER.backend.encode(text).offsets)


def lay_out(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    rows = encode_rows(texts, TOKENIZER, DATA.seq_len)
    tokens = np.concatenate([rows[i][:-1] for i in range(len(rows))]).astype(np.int64)
    return tokens, np.repeat(np.arange(len(rows)), rows.lengths)


def test_a_token_takes_the_word_with_most_of_its_characters() -> None:
    story = Story("Go up!", (Word("Go", 0, 2, "verb", "", "turn"), Word("up!", 3, 6, "adv", "", "turn")))
    offsets = TOKENIZER.backend.encode(story.text).offsets
    for (start, end), word in zip(offsets, align_words(offsets, [(0, 2), (3, 6)]), strict=True):
        text = story.text[start:end]
        assert word == (None if text == " " else 0 if start < 2 else 1)


def test_every_word_of_a_story_labels_its_tokens() -> None:
    tokens, story = lay_out([one.text for one in STORIES])
    families = {f.name: f for f in label_tokens(tokens, story, tokenizer=TOKENIZER, data=DATA, split="valid")}
    assert set(families) == {"part of speech", "role", "plot part", "identity", "frequency"}
    place = 1  # behind bos
    every = TOKENIZER.backend.encode(STORIES[0].text).offsets
    words = [(word.start, word.end) for word in STORIES[0].words]
    for offsets, word in zip(every, align_words(every, words), strict=True):
        found = {name: f.classes[f.labels[place]] for name, f in families.items()}
        if word is not None:
            tagged = STORIES[0].words[word]
            assert tagged.start < offsets[1]
            assert offsets[0] < tagged.end
            assert found["part of speech"] == tagged.pos
            assert found["role"] == (tagged.role or OTHER)
            assert found["plot part"] == tagged.part
        place += 1
    for family in families.values():
        assert (family.labels[tokens == BOS] == UNLABELLED).all()
        assert (family.labels[tokens != BOS] >= 0).all()


def test_stories_that_were_left_out_as_repeats_do_not_shift_the_tags() -> None:
    kept = [STORIES[i] for i in (0, 2, 3, 7)]
    tokens, story = lay_out([one.text for one in kept])
    rows = np.split(tokens, np.flatnonzero(np.diff(story)) + 1)
    rows[-1] = rows[-1][:20]  # a collection may end in the middle of a story
    assert match_stories(rows, TOKENIZER, DATA, "valid") == kept


def test_english_that_was_not_generated_is_tagged_and_has_places() -> None:
    text = "A red fox ran. It had 7 kits."
    tokens, story = lay_out([text])
    for data, split in ((DATA, "valid"), (DATA, "file a.txt"), (DataConfig(source="a.txt"), "valid")):
        found = label_tokens(tokens, story, tokenizer=TOKENIZER, data=data, split=split)
        assert [family.name for family in found] == ["part of speech", PLACE, "identity", "frequency"]
        kinds = [found[0].classes[label] for label in found[0].labels]
        of_sign = {i: kind for (a, b), kind in zip(find_offsets(text), kinds[1:], strict=True) for i in range(a, b)}
        for word, kind in {"A": "det", "red": "adj", "fox": "noun", "ran": "verb", "7": "num", ".": "punct"}.items():
            assert of_sign[text.index(word)] == kind
        places = found[1].labels[1:]
        assert (np.diff(places) >= 0).all()
        assert set(places) == set(range(len(PLACES)))
        assert "95 %" in describe_labels(found)


def test_pieces_of_a_word_have_its_class() -> None:
    text = "The extraordinary marmalade disappeared when I was on my way to the house."
    tokens, story = lay_out([text])
    family = label_tokens(tokens, story, tokenizer=TOKENIZER, data=DATA, split="file a.txt")[0]
    kinds = dict(zip(find_offsets(text), (family.classes[label] for label in family.labels[1:]), strict=True))
    assert {kind for (start, _), kind in kinds.items() if 4 <= start < 17} == {"adj"}
    assert {kind for (start, end), kind in kinds.items() if start >= 18 and end <= 27} == {"noun"}
    assert {kind for (start, end), kind in kinds.items() if start >= 28 and end <= 39} == {"verb"}


def test_text_that_is_not_english_is_sorted_by_form() -> None:
    tokens, story = lay_out(["Der rote Fuchs lief davon und hatte sieben junge Kinder."])
    found = label_tokens(tokens, story, tokenizer=TOKENIZER, data=DATA, split="file a.txt")
    assert [family.name for family in found] == ["form", "identity", "frequency"]
    assert "form alone" in describe_labels(found)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        *((" the", "word"), ("ing", "piece"), (" Tom", "capitalised"), (".", "mark"), (' "', "mark")),
        *(("12", "number"), (" ", OTHER), ("a1", OTHER), ("", OTHER)),
    ],
)
def test_the_form_of_a_token_is_what_it_looks_like(text: str, form: str) -> None:
    assert form_of(text) == form


def test_frequency_classes_share_the_text_evenly_and_rank_words() -> None:
    tokens, _ = lay_out([story.text for story in STORIES])
    labels = label_frequencies(tokens).labels
    shares = np.bincount(labels[labels >= 0]) / (labels >= 0).sum()
    assert len(shares) == 4
    assert shares.min() > 0.15
    counts = np.bincount(tokens)
    mean = [counts[tokens[labels == label]].mean() for label in range(4)]
    assert mean == sorted(mean, reverse=True)


def test_identity_names_the_most_frequent_tokens() -> None:
    tokens = np.array([BOS, *TOKENIZER.encode(".... ,, !")])
    family = label_identities(tokens, TOKENIZER)
    assert family.labels[0] == UNLABELLED
    most = np.bincount(tokens[1:]).argmax()
    assert family.classes[0] == TOKENIZER.decode([int(most)])
    assert (family.labels[tokens == most] == 0).all()

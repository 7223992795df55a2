"""Byte-level BPE: every text comes back, control ids never come from text, bytes are counted exactly."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from some_moe.config import ConfigError
from some_moe.data import tokenizer as module
from some_moe.data.tokenizer import BOS, EOS, LONGEST_WORD, PAD, Tokenizer, cut_words, in_chunks

TEXTS = ["Tim had a red ball. He loved the red ball.", "Mia saw a big dog. The dog was kind."] * 20
TOKENIZER = Tokenizer.train(TEXTS, 300)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_every_text_comes_back_and_its_bytes_are_counted(text: str) -> None:
    text = text.encode("utf-8", "replace").decode("utf-8")
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.token_bytes()[ids].sum() == len(text.encode())
    assert not {PAD, BOS, EOS} & {*ids}


def test_special_tokens_written_in_a_text_stay_text() -> None:
    text = "a <|eos|> b <|pad|><|bos|>"
    reloaded = Tokenizer.from_json(TOKENIZER.to_json())
    for tokenizer in (TOKENIZER, reloaded):
        ids = tokenizer.encode(text)
        assert not {PAD, BOS, EOS} & {*ids}
        assert tokenizer.decode(ids) == text


def test_training_is_deterministic_and_json_keeps_everything() -> None:
    assert Tokenizer.train(TEXTS, 300).to_json() == TOKENIZER.to_json()
    assert Tokenizer.from_json(TOKENIZER.to_json()).encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])


def test_special_tokens_are_left_out_of_decoded_text() -> None:
    assert TOKENIZER.decode([BOS, *TOKENIZER.encode("hi"), EOS, PAD]) == "hi"


def test_vocabulary_is_at_most_what_was_asked() -> None:
    assert 259 < TOKENIZER.vocab_size <= 300
    with pytest.raises(ConfigError, match="vocab_size 200 cannot hold the 256 bytes"):
        Tokenizer.train(TEXTS, 200)


def test_a_file_that_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer file cannot be read"):
        Tokenizer.from_json("{}")
    other = TOKENIZER.to_json().replace("<|pad|>", "<|other|>")
    with pytest.raises(ConfigError, match=r"no <\|pad\|> at id 0"):
        Tokenizer.from_json(other)


@given(st.text(alphabet="ab \n", max_size=60))
def test_words_are_cut_without_loss_and_only_where_they_are_long(text: str) -> None:
    endless = text + "x" * (2 * LONGEST_WORD + 1)
    assert "".join(cut_words(endless)) == endless
    assert max(len(word) for piece in cut_words(endless) for word in piece.split()) <= LONGEST_WORD
    ordinary = f"{text} {'x' * LONGEST_WORD} {text}{' ' * 10}"
    assert [*cut_words(ordinary)] == [ordinary]


@pytest.mark.parametrize("letters", ["ACGT", "a", " ", "é0-"])
def test_a_word_without_end_is_learned_and_comes_back(letters: str) -> None:
    """Uncut, 200,000 characters took a quarter of a minute, and twice as many four times as long."""
    endless = "".join(random.Random(0).choices(letters, k=200_000))
    tokenizer = Tokenizer.train([*TEXTS, endless], 600)
    assert tokenizer.decode(tokenizer.encode(endless)) == endless


def test_texts_give_the_same_ids_however_many_are_encoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{text} {number}" for number, text in enumerate(TEXTS)]
    whole = TOKENIZER.encode_many(texts)
    monkeypatch.setattr(module, "CHUNK", 100)
    chunks = [*in_chunks(iter(texts), len)]
    assert len(chunks) > 1
    assert [ids for chunk in chunks for ids in TOKENIZER.encode_many(chunk)] == TOKENIZER.encode_many(texts) == whole
    assert [*in_chunks([], len)] == []


def change_tokenizer(part: str, value: Any) -> str:
    changed = json.loads(TOKENIZER.to_json())
    place, _, field = part.partition(".")
    if field:
        changed[place][field] = value
    else:
        changed[place] = value
    return json.dumps(changed)


SPECIAL = json.loads(TOKENIZER.to_json())["added_tokens"][0]
VOCABULARY = json.loads(TOKENIZER.to_json())["model"]["vocab"]


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("model.vocab", VOCABULARY | {"zz": 10**6}, "ids have gaps"),
        ("model.vocab", VOCABULARY | {"zz": 5}, "ids have gaps"),
        ("model.vocab", {**VOCABULARY, "zz": 2**40}, "cannot be read"),
        ("model.merges", [["zz", "qq"]], "cannot be read"),
        ("model.dropout", 0.5, "the tokenizer's model is none of this program"),
        ("model", 5, "cannot be read"),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+b"}}, "pre_tokenizer is none of this program"),
        ("normalizer", {"type": "NFC"}, "has a normalizer, which loses text"),
        ("added_tokens", [{**SPECIAL, "id": 5, "content": "a"}], "has other special tokens than"),
    ],
)
def test_a_tokenizer_that_is_none_of_this_program_is_refused(part: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Tokenizer.from_json(change_tokenizer(part, value))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "cannot be read"),
        (b"", "cannot"),
    ],
)
def test_a_file_that_holds_no_tokenizer_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        Tokenizer.load(tmp_path / "tokenizer.json")

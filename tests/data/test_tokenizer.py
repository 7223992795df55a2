"""Byte-level BPE: every text comes back, control ids never come from text, bytes are counted exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from some_moe.config import ConfigError
from some_moe.data.tokenizer import BOS, EOS, PAD, Tokenizer

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

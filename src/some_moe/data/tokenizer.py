"""Byte-level BPE: any text in, ids out, and back to the same text. Trained on the training split alone."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from some_moe.config import ConfigError
from some_moe.system.progress import listen
from some_moe.system.reading import RESTORE, clean, parse_json, read_text

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
LONGEST_WORD = 256  # characters; learning takes the square of a word's length
ENDLESS = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD + 1},}}|(?<!\s)\s{{{LONGEST_WORD + 1},}}")
CHUNK = 1 << 20  # characters that are encoded at a time: the backend keeps a hundred bytes of each token
OWN = "use one that this program trained"
# What a tokenizer.json of this program says; others would lose text, or take any time for it.
PARTS: dict[str, dict[str, Any]] = {
    "model": {"type": "BPE"}
    | dict.fromkeys(
        (
            "dropout",
            "unk_token",
            "continuing_subword_prefix",
            "end_of_word_suffix",
            "fuse_unk",
            "byte_fallback",
            "ignore_merges",
        )
    ),
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "decoder": {"type": "ByteLevel"},
}
T = TypeVar("T")
ABSENT = ("normalizer", "post_processor", "truncation", "padding")


def cut_words(text: str) -> Iterator[str]:
    """The text in pieces, cut where a word (or a gap) is longer than LONGEST_WORD; any other text is one piece."""
    start = 0
    for word in ENDLESS.finditer(text):
        for end in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
            yield text[start:end]
            start = end
    yield text[start:]


def in_chunks(texts: Iterable[T], length_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Any number of texts, as many at a time as are encoded at a time."""
    chunk, size = [], 0
    for text in texts:
        chunk.append(text)
        size += length_of(text)
        if size > CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class Tokenizer:
    """Text to ids and back. Ids 0, 1, 2 are pad, bos and eos, which no text can produce."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        # A special token that is written out in a text is text, and never becomes a control id.
        backend.encode_special_tokens = True
        for token_id, token in enumerate(SPECIAL_TOKENS):
            if backend.token_to_id(token) != token_id:
                raise ConfigError(f"the tokenizer has no {token} at id {token_id}; {OWN}")
        vocabulary, alphabet = backend.get_vocab(), pre_tokenizers.ByteLevel.alphabet()
        if {*vocabulary.values()} != {*range(len(vocabulary))} or not {*alphabet} <= {*vocabulary}:
            raise ConfigError(f"the tokenizer's ids have gaps, or not every byte has one; {OWN}")
        if len(vocabulary) > 1 << 16:
            raise ConfigError(f"the tokenizer has {len(vocabulary)} ids, more than 16 bits hold; use a smaller one")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn a vocabulary of at most vocab_size from texts; a small corpus may give fewer."""
        if vocab_size < SMALLEST_VOCABULARY:
            reason = f"vocab_size {vocab_size} cannot hold the 256 bytes and 3 special tokens"
            raise ConfigError(f"{reason}; use at least {SMALLEST_VOCABULARY}")
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        pieces = (piece for text in texts for piece in cut_words(text))
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        listen(lambda: backend.train_from_iterator(pieces, trainer))
        return cls(backend)

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        try:
            found = parse_json(text)
            for part, fields in PARTS.items():
                if any((found[part].get(name) or None) != (value or None) for name, value in fields.items()):
                    raise ConfigError(f"the tokenizer's {part} is none of this program; {OWN}")
            for part in ABSENT:
                if found.get(part) is not None:
                    raise ConfigError(f"the tokenizer has a {part}, which loses text; {OWN}")
            tokenizer = cls(Backend.from_str(text))
            if [token["content"] for token in found["added_tokens"]] != [*SPECIAL_TOKENS]:
                raise ConfigError(f"the tokenizer has other special tokens than {', '.join(SPECIAL_TOKENS)}; {OWN}")
            return tokenizer
        except (ConfigError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # The backend raises bare Exceptions, and panics are none; whatever it says, the file is not a tokenizer.
            raise ConfigError(f"the tokenizer file cannot be read ({clean(str(error))[:200]}); {RESTORE}") from None

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        return cls.from_json(read_text(path))

    def to_json(self) -> str:
        return self.backend.to_str()

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without bos and eos."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        encode = partial(self.backend.encode_batch_fast, list(texts))
        takes_long = sum(map(len, texts)) > CHUNK
        return [encoding.ids for encoding in (listen(encode) if takes_long else encode())]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; special tokens are left out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each id stands for: (vocab_size,); 0 for special tokens."""
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, token_id in self.backend.get_vocab().items():
            # In the byte-level alphabet one character stands for one byte.
            sizes[token_id] = 0 if token in SPECIAL_TOKENS else len(token)
        return sizes

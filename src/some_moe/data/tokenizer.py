"""Byte-level BPE: any text in, ids out, and back to the same text. Trained on the training split alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from some_moe.config import ConfigError

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)


class Tokenizer:
    """Text to ids and back. Ids 0, 1, 2 are pad, bos and eos, which no text can produce."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        # A special token that is written out in a text is text, and never becomes a control id.
        backend.encode_special_tokens = True
        for token_id, token in enumerate(SPECIAL_TOKENS):
            if backend.token_to_id(token) != token_id:
                raise ConfigError(f"the tokenizer has no {token} at id {token_id}; use one that this program trained")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn a vocabulary of at most vocab_size from texts; a small corpus may give fewer."""
        if vocab_size < SMALLEST_VOCABULARY:
            reason = f"vocab_size {vocab_size} cannot hold the 256 bytes and 3 special tokens"
            raise ConfigError(f"{reason}; use at least {SMALLEST_VOCABULARY}")
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        try:
            return cls(Backend.from_str(text))
        except ConfigError:
            raise
        except Exception as error:
            # The backend raises bare Exceptions; whatever it says, the file is not a tokenizer.
            raise ConfigError(f"the tokenizer file cannot be read ({error}); restore it from its run") from None

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def to_json(self) -> str:
        return self.backend.to_str()

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without bos and eos."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch(list(texts))]

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

"""A source made ready to train on: tokenizer and encoded splits, kept in a cache by a hash of their content."""

import hashlib
import json
import os
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from some_moe.config import ConfigError, DataConfig, RunConfig
from some_moe.data.batches import Rows, encode_rows
from some_moe.data.sources import SPLITS, Corpus, load_corpus
from some_moe.data.tokenizer import Tokenizer
from some_moe.errors import in_a_sentence
from some_moe.stories import generator
from some_moe.system import cache
from some_moe.system.progress import Say, announce, say_nothing

CACHE_VERSION = 2


@dataclass(frozen=True)
class Dataset:
    """Everything that training reads."""

    tokenizer: Tokenizer
    train: Rows
    valid: Rows
    test: Rows
    _: KW_ONLY
    duplicates: int  # documents that were left out as repeats
    unused: int = 0  # training documents that data.train_subset_size leaves out

    @cached_property
    def digest(self) -> str:
        """A hash of the ids of all splits: a resumed run must find the same."""
        total = hashlib.sha256()
        for rows in (self.train, self.valid, self.test):
            total.update(rows.ids.tobytes())
            total.update(rows.starts.tobytes())
        return total.hexdigest()


def settle_data(config: RunConfig) -> RunConfig:
    """The config of a new run, which says what is done with long documents."""
    return config.override({"data.long": "split" if config.splits_long else "cut"})


@in_a_sentence()
def prepare(
    config: DataConfig,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    *,
    offline: bool = False,
    say: Say = say_nothing,
) -> Dataset:
    """Load, tokenize and encode what the config asks for; from the cache where the same was made before.

    tokenizer: use this one (a run's own, on resume) instead of data.tokenizer or a newly trained one. offline: read a
    dataset of the hub only where it lies on this machine. say: hears of what takes long.
    """
    if config.source == "stories" and os.path.lexists("stories"):
        say("data.source 'stories' means the generated ones; what is called so in this folder is './stories'")
    if tokenizer is None and config.tokenizer is not None:
        try:
            tokenizer = Tokenizer.load(config.tokenizer)
        except OSError as error:
            raise ConfigError(f"cannot read data.tokenizer {config.tokenizer!r}: {error.strerror}") from None
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but model.vocab_size is {vocab_size}; raise vocab_size"
        )
    corpus = None if config.source == "stories" else load_corpus(config, say, offline=offline)
    content = _digest_generator(config) if corpus is None else corpus.digest()
    fixed = "" if tokenizer is None else tokenizer.to_json()
    # A saved "auto" is of a run from before long documents could be split.
    split = config.long == "split"
    wanted = json.dumps([CACHE_VERSION, content, vocab_size, config.seq_len, fixed] + ["split"] * split)
    cached = cache.load(wanted, partial(_open, config, vocab_size, fixed), say)
    if cached is not None:
        return replace(cached, unused=corpus.unused if corpus else 0)
    dataset = _encode(corpus or load_corpus(config, say), config, vocab_size, tokenizer, say)
    splits = {split: getattr(dataset, split) for split in SPLITS}
    arrays = {f"{split}.{part}": getattr(rows, part) for split, rows in splits.items() for part in ("ids", "starts")}
    left_out = [dataset.duplicates, *(rows.num_cut for rows in splits.values())]
    label = {"source": config.source, "tokens": str(sum(len(rows.ids) for rows in splits.values()))}
    cache.store(wanted, arrays, json.dumps([dataset.tokenizer.to_json(), *left_out]), label)
    return dataset


def _digest_generator(config: DataConfig) -> str:
    """A hash of what decides the generated stories: the generator's source, its words and the sizes."""
    files = [Path(generator.__file__), *generator.FILES]
    sizes = f"{config.train_subset_size} {config.val_subset_size}".encode()
    return hashlib.sha256(b"\0".join([*(file.read_bytes() for file in files), sizes])).hexdigest()


def _encode(corpus: Corpus, config: DataConfig, vocab_size: int, tokenizer: Tokenizer | None, say: Say) -> Dataset:
    for split in SPLITS:
        if not getattr(corpus, split):
            found = sum(len(getattr(corpus, one)) for one in SPLITS)
            raise ConfigError(
                f"data.source {config.source!r} leaves no {split} story: it has {found} documents; give it more, or "
                "say where they end by data.separator, such as '\\n' for one a line (blank lines are the default)"
            )
    if tokenizer is None:
        with announce(say, f"learning a vocabulary of {vocab_size:,} from {len(corpus.train):,} stories …"):
            tokenizer = Tokenizer.train(corpus.train, vocab_size)
    texts = {split: getattr(corpus, split) for split in SPLITS}
    with announce(say, f"encoding {sum(map(len, texts.values())):,} stories …"):
        long = {"split": config.long == "split"}
        splits = {split: encode_rows(texts[split], tokenizer, config.seq_len, **long) for split in SPLITS}
    return Dataset(tokenizer, *splits.values(), duplicates=corpus.duplicates, unused=corpus.unused)


def _open(config: DataConfig, vocab_size: int, fixed: str, arrays: cache.Arrays, about: str) -> Dataset:
    """What was prepared before; an error where it is not of the kind that this config asks for."""
    words, duplicates, *num_cut = json.loads(about)
    tokenizer = Tokenizer.from_json(words)
    if fixed not in ("", words) or tokenizer.vocab_size > vocab_size:
        raise ValueError("another tokenizer")
    splits = {}
    for split, cut in zip(SPLITS, num_cut, strict=True):
        ids, starts = arrays[f"{split}.ids"], arrays[f"{split}.starts"]
        sizes = np.diff(starts)
        if ids.ndim != 1 or ids.dtype != np.uint16 or ids.max() >= tokenizer.vocab_size:
            raise ValueError("ids out of range")
        if (
            starts.dtype != np.int64
            or starts[0] != 0
            or starts[-1] != len(ids)
            or sizes.min() < 2
            or sizes.max() > config.seq_len + 1
        ):
            raise ValueError("rows of another length")
        splits[split] = Rows(ids, starts, int(cut))
    return Dataset(tokenizer, *splits.values(), duplicates=int(duplicates))

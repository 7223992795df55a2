"""A source made ready to train on: tokenizer and encoded splits, kept in a cache by a hash of their content.

Splits are encoded in a stream, into files that are mapped into memory: neither takes more of it for a larger source.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from some_moe.config import ConfigError, DataConfig, RunConfig
from some_moe.data.batches import Rows, RowWriter
from some_moe.data.sources import LEFT_OUT, SPLITS, Corpus, Files, Part, find_parts, identify, stamp, survey
from some_moe.data.tokenizer import Tokenizer, in_chunks
from some_moe.errors import in_a_sentence
from some_moe.stories import generator
from some_moe.system import cache
from some_moe.system.progress import Say, Track, announce, say_nothing, track_nothing, tracked
from some_moe.system.streams import GrowingFile, begins_with, read_pieces, refuse_full_disk

CACHE_VERSION = 3
SHARD = 1 << 26  # bytes of text after whose encoding a kill costs nothing of it
LEARNED = 1 << 28  # bytes of text that a vocabulary is learned from: of more, every second story, or every third …
MOST_NAMED = 100  # files that a record names
KINDS = {"ids": np.uint16, "starts": np.int64}
FILES = [f"{split}.{kind}" for split in SPLITS for kind in KINDS]


@dataclass(frozen=True)
class Dataset:
    """Everything that training reads."""

    tokenizer: Tokenizer
    train: Rows
    valid: Rows
    test: Rows
    _: KW_ONLY
    digest: str  # a hash of the ids of all splits and of where rows start: a resumed run must find the same
    duplicates: int  # documents that were left out as repeats
    unused: int = 0  # training documents that data.train_subset_size leaves out
    files: Files = ()

    def describe(self) -> dict[str, Any]:
        """What a record keeps of the data: enough to know it again, and no path."""
        words = hashlib.sha256(self.tokenizer.to_json().encode()).hexdigest()
        return {
            "digest": self.digest,
            "files": [{"name": name, "digest": digest} for name, digest in self.files[:MOST_NAMED]],
            "num_files": len(self.files),
            "documents": {split: getattr(self, split).num_stories for split in SPLITS},
            "tokenizer": {"digest": words[:16], "vocab_size": self.tokenizer.vocab_size},
        }


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
    track: Track = track_nothing,
) -> Dataset:
    """Load, tokenize and encode what the config asks for; from the cache where the same was made before.

    tokenizer: use this one (a run's own, on resume) instead of data.tokenizer or a newly trained one. offline: read a
    dataset of the hub only where it lies on this machine. say, track: hear of what takes long.
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
    parts = find_parts(config, offline=offline)
    before = stamp(parts)
    own = config.source == "stories"
    content, files = _digest_generator(config) if own else identify(parts, config)
    fixed = "" if tokenizer is None else tokenizer.to_json()
    # A saved "auto" is of a run from before long documents could be split.
    split = config.long == "split"
    wanted = json.dumps([CACHE_VERSION, content, vocab_size, config.seq_len, fixed] + ["split"] * split)
    make = partial(_make, parts, before, config, vocab_size, tokenizer, say, track)
    return replace(cache.obtain(wanted, partial(_open, config, vocab_size, fixed), make, say), files=files)


def _digest_generator(config: DataConfig) -> tuple[str, Files]:
    """A hash of what decides the generated stories: the generator's source, its words and the sizes."""
    files = [Path(generator.__file__), *generator.FILES]
    sizes = f"{config.train_subset_size} {config.val_subset_size}".encode()
    found = hashlib.sha256(b"\0".join([*(file.read_bytes() for file in files), sizes])).hexdigest()
    return found, (("stories", found[:16]),)


def _make(
    parts: list[Part],
    before: list[tuple[int, int]],
    config: DataConfig,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    say: Say,
    track: Track,
    folder: Path,
    half: cache.About,
    save: Callable[[cache.About], None],
) -> cache.About:
    """Encode a source into files of a folder, going on where a process before was stopped; what there is to tell."""
    corpus = survey(parts, config, say)
    for split in SPLITS:
        if not corpus.count(split):
            found = sum(map(corpus.count, SPLITS))
            raise ConfigError(
                f"data.source {config.source!r} leaves no {split} story: it has {found} documents; give it more, or "
                "say where they end by data.separator, such as '\\n' for one a line (blank lines are the default)"
            )
    with closing(Shards(folder, half, config)) as shards, tracked(track):
        if tokenizer is None:
            tokenizer = Tokenizer.from_json(shards.words) if shards.words else _learn(corpus, vocab_size, say)
        # Ids have about half the bytes of their text, and seldom as many.
        refuse_full_disk(folder, corpus.count_bytes(*SPLITS), f"data.source {config.source!r}")
        about: cache.About = {"source": config.source, "tokenizer": tokenizer.to_json(), "files": FILES}
        about |= {"duplicates": corpus.duplicates, "unused": corpus.unused}
        sizes = np.cumsum(np.where(corpus.splits == LEFT_OUT, 0, corpus.sizes))
        documents = (document for document in corpus.walk() if document[0] >= shards.next)
        saved = int(sizes[shards.next - 1]) if shards.next else 0
        for chunk in in_chunks(documents, lambda document: len(document[2])):
            shards.append(chunk, tokenizer.encode_many([text for _, _, text in chunk]))
            done = int(sizes[shards.next - 1])
            track("encoding", done, int(sizes[-1]))
            if done - saved >= SHARD:
                saved = done
                save(about | shards.tell())
        about |= shards.tell()
    if stamp(parts) != before:
        raise ConfigError(f"data.source {config.source!r} was changed while it was read; run it again")
    return about


def _learn(corpus: Corpus, vocab_size: int, say: Say) -> Tokenizer:
    """A vocabulary of the training split, or of an even share of it where it is large."""
    every = -(-corpus.count_bytes("train") // LEARNED)
    with announce(say, f"learning a vocabulary of {vocab_size:,} from {corpus.count('train') // every:,} stories …"):
        return Tokenizer.train(islice(corpus.read("train"), 0, None, every), vocab_size)


class Shards:
    """The files that splits are encoded into: they grow at their ends, and one process goes on where another ended."""

    def __init__(self, folder: Path, told: cache.About, config: DataConfig) -> None:
        """told: what `tell` told of the files that are there; else they are begun anew."""
        told = told if told and all(begins_with(folder / name, *told["sizes"][name]) for name in FILES) else {}
        self.next: int = told.get("next", 0)  # number of the first document that is not in them
        self.words: str = told.get("tokenizer", "")
        self.files = {name: GrowingFile(folder / name, *told.get("sizes", {}).get(name, ())) for name in FILES}
        pairs = [(self.files[f"{split}.ids"], self.files[f"{split}.starts"]) for split in SPLITS]
        self.writers = [RowWriter(*pair, config.seq_len, split=config.long == "split") for pair in pairs]
        for writer, counts in zip(self.writers, told.get("counts", ()), strict=False):
            writer.num_ids, writer.num_cut, writer.num_stories = counts

    def append(self, documents: list[tuple[int, int, str]], ids: list[list[int]]) -> None:
        for number, writer in enumerate(self.writers):
            writer.append(one for (_, split, _), one in zip(documents, ids, strict=True) if split == number)
        self.next = documents[-1][0] + 1

    def tell(self) -> cache.About:
        """What there is, once it is on the disk."""
        counts = [(writer.num_ids, writer.num_cut, writer.num_stories) for writer in self.writers]
        sizes = {name: file.sync() for name, file in self.files.items()}
        return {"next": self.next, "sizes": sizes, "counts": counts, "tokens": sum(num_ids for num_ids, *_ in counts)}

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _open(config: DataConfig, vocab_size: int, fixed: str, folder: Path, about: cache.About) -> Dataset:
    """What was prepared before; an error where it is not of the kind that this config asks for."""
    words, duplicates, unused = about["tokenizer"], int(about["duplicates"]), int(about["unused"])
    tokenizer = Tokenizer.from_json(words)
    if fixed not in ("", words) or tokenizer.vocab_size > vocab_size:
        raise ValueError("another tokenizer")
    splits = []
    for split, (_, num_cut, num_stories) in zip(SPLITS, about["counts"], strict=True):
        # Mapped pages that were looked at count as memory: a file is looked through by reading it.
        pieces = read_pieces(folder / f"{split}.ids")
        if max(np.frombuffer(piece, np.uint16).max() for piece in pieces) >= tokenizer.vocab_size:
            raise ValueError("ids out of range")
        ids, starts = (np.memmap(folder / f"{split}.{kind}", KINDS[kind], "r").view(np.ndarray) for kind in KINDS)
        sizes = np.diff(starts)
        if starts[0] != 0 or starts[-1] != len(ids) or sizes.min() < 2 or sizes.max() > config.seq_len + 1:
            raise ValueError("rows of another length")
        splits.append(Rows(ids, starts, int(num_cut), int(num_stories)))
    return Dataset(tokenizer, *splits, digest=about["digest"], duplicates=duplicates, unused=unused)

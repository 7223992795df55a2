"""A source made ready to train on: tokenizer and encoded splits, kept in a cache by a hash of their content."""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from some_moe.config import ConfigError, DataConfig
from some_moe.data import lexicon, stories
from some_moe.data.batches import Rows, encode_rows
from some_moe.data.sources import SPLITS, Corpus, load_corpus
from some_moe.data.tokenizer import Tokenizer

CACHE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Everything that training reads."""

    tokenizer: Tokenizer
    train: Rows
    valid: Rows
    test: Rows
    digest: str  # a hash of the ids of all splits: a resumed run must find the same
    duplicates: int  # documents that were left out as repeats


def cache_folder() -> Path:
    """Where prepared data is kept: $SOME_CACHE, or ~/.cache/some-moe."""
    return Path(os.environ.get("SOME_CACHE") or Path.home() / ".cache" / "some-moe")


def prepare(config: DataConfig, vocab_size: int, tokenizer: Tokenizer | None = None) -> Dataset:
    """Load, tokenize and encode what the config asks for; from the cache where the same was made before.

    tokenizer: use this one (a run's own, on resume) instead of data.tokenizer or a newly trained one.
    """
    if tokenizer is None and config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but model.vocab_size is {vocab_size}; raise vocab_size"
        )
    corpus, content = None, _generator_digest(config)
    if content is None:
        corpus = load_corpus(config)
        content = corpus.digest()
    fixed = "" if tokenizer is None else tokenizer.to_json()
    wanted = json.dumps([CACHE_VERSION, content, vocab_size, config.seq_len, fixed])
    place = cache_folder() / hashlib.sha256(wanted.encode()).hexdigest()[:32]
    cached = _read_cache(place)
    if cached is not None:
        return cached
    dataset = _encode(corpus or load_corpus(config), config, vocab_size, tokenizer)
    _write_cache(place, dataset)
    return dataset


def load_tokenizer(path: str) -> Tokenizer:
    try:
        return Tokenizer.load(path)
    except OSError as error:
        raise ConfigError(f"cannot read data.tokenizer {path!r}: {error.strerror}") from None


def _generator_digest(config: DataConfig) -> str | None:
    """What decides the generated stories: the generator's source, its words and the sizes. None for other sources."""
    if config.source != "stories":
        return None
    files = [Path(lexicon.__file__), *lexicon.FILES, Path(stories.__file__)]
    sizes = f"{config.train_subset_size} {config.val_subset_size}".encode()
    return hashlib.sha256(b"\0".join([*(file.read_bytes() for file in files), sizes])).hexdigest()


def _encode(corpus: Corpus, config: DataConfig, vocab_size: int, tokenizer: Tokenizer | None) -> Dataset:
    for split in SPLITS:
        if not getattr(corpus, split):
            found = sum(len(getattr(corpus, one)) for one in SPLITS)
            raise ConfigError(
                f"data.source {config.source!r} leaves no {split} story: it has {found} documents; give it more, or "
                "say where they end by data.separator, such as '\\n' for one a line (blank lines are the default)"
            )
    tokenizer = tokenizer or Tokenizer.train(corpus.train, vocab_size)
    splits = {split: encode_rows(getattr(corpus, split), tokenizer, config.seq_len) for split in SPLITS}
    total = hashlib.sha256()
    for rows in splits.values():
        total.update(rows.ids.tobytes())
        total.update(rows.starts.tobytes())
    return Dataset(tokenizer=tokenizer, **splits, digest=total.hexdigest(), duplicates=corpus.duplicates)


def _write_cache(place: Path, dataset: Dataset) -> None:
    """Write whole and rename; a cache that cannot be written is done without."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=place.parent, prefix=".making-"))
    except OSError:
        return
    try:
        (scratch / "tokenizer.json").write_text(dataset.tokenizer.to_json(), encoding="utf-8")
        arrays: dict[str, np.ndarray] = {}
        for split in SPLITS:
            rows: Rows = getattr(dataset, split)
            arrays |= {f"{split}.ids": rows.ids, f"{split}.starts": rows.starts}
        save_file(arrays, scratch / "rows.safetensors")
        info = {
            "digest": dataset.digest,
            "duplicates": dataset.duplicates,
            "num_cut": {split: getattr(dataset, split).num_cut for split in SPLITS},
        }
        (scratch / "info.json").write_text(json.dumps(info), encoding="utf-8")
        os.replace(scratch, place)
    except OSError:
        # Another process was first, or the disk is full: either way this process has what it needs.
        shutil.rmtree(scratch, ignore_errors=True)


def _read_cache(place: Path) -> Dataset | None:
    if not place.is_dir():
        return None
    try:
        info = json.loads((place / "info.json").read_text(encoding="utf-8"))
        arrays: dict[str, np.ndarray] = load_file(place / "rows.safetensors")
        splits = {
            split: Rows(arrays[f"{split}.ids"], arrays[f"{split}.starts"], info["num_cut"][split]) for split in SPLITS
        }
        tokenizer = Tokenizer.load(place / "tokenizer.json")
        return Dataset(tokenizer=tokenizer, **splits, digest=info["digest"], duplicates=info["duplicates"])
    except Exception:
        # A damaged entry is made again, whatever is wrong with it.
        shutil.rmtree(place, ignore_errors=True)
        return None

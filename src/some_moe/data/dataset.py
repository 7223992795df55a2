"""A source made ready to train on: tokenizer and encoded splits, kept in a cache by a hash of their content."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from some_moe.config import ConfigError, DataConfig
from some_moe.data.batches import Rows, encode_rows
from some_moe.data.sources import SPLITS, Corpus, load_corpus
from some_moe.data.tokenizer import Tokenizer
from some_moe.stories import generator

CACHE_VERSION = 2


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
        try:
            tokenizer = Tokenizer.load(config.tokenizer)
        except OSError as error:
            raise ConfigError(f"cannot read data.tokenizer {config.tokenizer!r}: {error.strerror}") from None
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but model.vocab_size is {vocab_size}; raise vocab_size"
        )
    corpus = None if config.source == "stories" else load_corpus(config)
    content = _digest_generator(config) if corpus is None else corpus.digest()
    fixed = "" if tokenizer is None else tokenizer.to_json()
    wanted = json.dumps([CACHE_VERSION, content, vocab_size, config.seq_len, fixed])
    file = cache_folder() / f"{hashlib.sha256(wanted.encode()).hexdigest()[:32]}.safetensors"
    cached = _read_cache(file)
    if cached is not None:
        return cached
    dataset = _encode(corpus or load_corpus(config), config, vocab_size, tokenizer)
    _write_cache(file, dataset)
    return dataset


def _digest_generator(config: DataConfig) -> str:
    """A hash of what decides the generated stories: the generator's source, its words and the sizes."""
    files = [Path(generator.__file__), *generator.FILES]
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


def _write_cache(file: Path, dataset: Dataset) -> None:
    """Write whole and rename; a cache that cannot be written is done without."""
    rows = {split: getattr(dataset, split) for split in SPLITS}
    arrays = {f"{split}.{part}": getattr(rows[split], part) for split in SPLITS for part in ("ids", "starts")}
    about = {
        "tokenizer": dataset.tokenizer.to_json(),
        "digest": dataset.digest,
        "duplicates": dataset.duplicates,
        "num_cut": {split: rows[split].num_cut for split in SPLITS},
    }
    scratch = file.with_name(f".{file.name}.{os.getpid()}")  # another process may be making the same
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, scratch, {"about": json.dumps(about)})
        os.replace(scratch, file)
    except (OSError, SafetensorError):
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def _read_cache(file: Path) -> Dataset | None:
    """What was made before; None where there is none, and where it is damaged, whatever is wrong with it."""
    try:
        with safe_open(file, "numpy") as stored:
            about = json.loads(stored.metadata()["about"])
            splits = {
                split: Rows(stored.get_tensor(f"{split}.ids"), stored.get_tensor(f"{split}.starts"), num_cut)
                for split, num_cut in about["num_cut"].items()
            }
        tokenizer = Tokenizer.from_json(about["tokenizer"])
        return Dataset(tokenizer=tokenizer, **splits, digest=about["digest"], duplicates=about["duplicates"])
    except Exception:
        return None

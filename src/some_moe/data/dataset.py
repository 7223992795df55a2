"""A source made ready to train on: tokenizer and encoded splits, kept in a cache by a hash of their content."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from some_moe.config import ConfigError, DataConfig, RunConfig
from some_moe.data.batches import Rows, encode_rows
from some_moe.data.sources import SPLITS, Corpus, load_corpus
from some_moe.data.tokenizer import Tokenizer
from some_moe.errors import in_a_sentence
from some_moe.progress import Say, announce, say_nothing
from some_moe.stories import generator

CACHE_VERSION = 2


@dataclass(frozen=True)
class Dataset:
    """Everything that training reads."""

    tokenizer: Tokenizer
    train: Rows
    valid: Rows
    test: Rows
    digest: str  # a hash of the ids of all splits: a resumed run must find the same
    duplicates: int  # documents that were left out as repeats
    unused: int = 0  # training documents that data.train_subset_size leaves out


def cache_folder() -> Path:
    """Where prepared data is kept: $SOME_CACHE, or ~/.cache/some-moe."""
    return Path(os.environ.get("SOME_CACHE") or Path.home() / ".cache" / "some-moe")


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
    file = cache_folder() / f"{hashlib.sha256(wanted.encode()).hexdigest()[:32]}.safetensors"
    cached = _read_cache(file)
    if cached is not None:
        return replace(cached, unused=corpus.unused if corpus else 0)
    dataset = _encode(corpus or load_corpus(config, say), config, vocab_size, tokenizer, say)
    _write_cache(file, dataset)
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
    total = hashlib.sha256()
    for rows in splits.values():
        total.update(rows.ids.tobytes())
        total.update(rows.starts.tobytes())
    left_out = (corpus.duplicates, corpus.unused)
    return Dataset(tokenizer, splits["train"], splits["valid"], splits["test"], total.hexdigest(), *left_out)


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
        train, valid, test = (splits[split] for split in SPLITS)
        return Dataset(tokenizer, train, valid, test, about["digest"], about["duplicates"])
    except Exception:
        return None

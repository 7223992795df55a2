"""Where stories come from: generated ones, text files, or a dataset of the Hugging Face hub.

Every source ends as three lists of documents that share none: choose by valid, report by test.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError, DataConfig
from some_moe.data.readers import READERS, kind_of, read_documents, refuse_absent, strip, text_of
from some_moe.errors import in_a_sentence
from some_moe.stories.generator import tell_many
from some_moe.system.progress import Say, announce, say_nothing
from some_moe.system.reading import clean, refuse_irregular, refuse_unprintable

GENERATED_TRAIN, GENERATED_HELD_OUT = 20_000, 500
HELD_OUT_PERCENT = 5  # of a source without its own splits, for valid and for test each
SPLITS = ("train", "valid", "test")
SOURCES = "give 'stories', a file, a folder, or hf:OWNER/NAME"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents by split; no document is in two of them, or twice in one."""

    train: list[str]
    valid: list[str]
    test: list[str]
    duplicates: int = 0  # documents left out because they stood there already
    unused: int = 0  # training documents that data.train_subset_size leaves out

    def digest(self) -> str:
        """A hash of every document, its place and its split."""
        total = hashlib.sha256()
        for split in SPLITS:
            for document in getattr(self, split):
                total.update(hashlib.sha256(document.encode()).digest())
            total.update(split.encode())
        return total.hexdigest()


@in_a_sentence()
def load_corpus(config: DataConfig, say: Say = say_nothing, *, offline: bool = False) -> Corpus:
    """Read the source that the config names, split it, leave out repeats, and cut it to the subset sizes."""
    source = config.source
    if source == "stories":
        held_out = config.val_subset_size or GENERATED_HELD_OUT
        sizes = (config.train_subset_size or GENERATED_TRAIN, held_out, held_out)
        with announce(say, f"telling {sum(sizes):,} stories …"):
            # Books 1 and 2 are for valid and test, so that asking for more training stories never reaches them.
            books = ([story.text for story in tell_many(size, seed=book)] for book, size in enumerate(sizes))
            return _deduplicate(dict(zip(SPLITS, books, strict=True)), config)
    if source.startswith("hf:"):
        with announce(say, f"reading {source} …"):
            splits = _read_hub(source.removeprefix("hf:"), config.text_field, offline=offline)
    else:
        splits = read_path(source, config, say)
    if not splits.get("train") and not splits.get("all"):
        raise ConfigError(
            f"data.source {source!r} has text for {' and '.join(splits) or 'nothing'} alone; put a file to train on "
            "beside it, with train in its name, or give the file itself"
        )
    return _deduplicate(_complete_splits(splits), config)


# --- reading ----------------------------------------------------------------------------------------------


@in_a_sentence()
def read_path(source: str | Path, config: DataConfig, say: Say = say_nothing) -> dict[str, list[str]]:
    """Read a file, or a folder whose file names may tell the splits. {"all": …} where nothing tells them."""
    text = str(source)
    refuse_unprintable(text, "data.source")
    if not text.strip():
        raise ConfigError(f"data.source is {text!r}, which names nothing; {SOURCES}")
    if "://" in text:
        raise ConfigError(f"data.source {text!r} is an address, and none is fetched; download it, and give the file")
    path = Path(source)
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        raise ConfigError(f"data.source {text!r} does not exist; {SOURCES}") from None
    splits: dict[str, list[str]] = {}
    files = find_files(path) if is_folder else [path]
    if not files:
        raise ConfigError(f"data.source {text!r} has no {', '.join(READERS)} file; put the texts there")
    for file in files:
        with announce(say, f"reading {file} …"):
            split = split_of(file.relative_to(path)) if is_folder else "all"
            splits.setdefault(split, []).extend(read_documents(file, config))
    return splits


def find_files(folder: Path) -> list[Path]:
    """The files of a folder and its subfolders that can be read, in order; hidden ones are left out."""
    found, pending = [], [folder]
    while pending:
        for entry in list(os.scandir(pending.pop())):
            path = Path(entry.path)
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
            elif entry.is_symlink() and path.is_dir():
                raise ConfigError(f"{str(path)!r} is a link to a folder; put a copy there, or leave it out")
            elif kind_of(path) in READERS:
                refuse_irregular(path)  # before anything is read
                found.append(path)
    return sorted(found)


def split_of(name: Path) -> str:
    """The split that a file's name tells, or its folder's, such as stories_valid or train/00001; else "all"."""
    for part in reversed(name.parts):
        words = set(re.split(r"[^a-z]+", part.lower()))
        if words & {"valid", "val", "validation", "dev"}:
            return "valid"
        for split in ("test", "train"):
            if split in words:
                return split
    return "all"


def _read_hub(name: str, field: str, *, offline: bool) -> dict[str, list[str]]:
    """Read a dataset of the Hugging Face hub, e.g. roneneldan/TinyStories; offline: only where it was read before."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"hf:{name} needs the datasets library; run pip install 'datasets>=4'") from None
    if int(datasets.__version__.split(".")[0]) < 4:  # those before may run a dataset's own code
        raise ConfigError(
            f"hf:{name} needs a newer datasets library than {datasets.__version__}: pip install 'datasets>=4'"
        )
    try:
        with _without_network() if offline else nullcontext():
            found = datasets.load_dataset(name)
    except Exception as error:
        # The library raises many kinds: not found, no network, no permission. All mean: not this source, not now.
        reason = clean(str(error).splitlines()[0] if str(error) else type(error).__name__)
        cure = "train or evaluate on it first" if offline else "check the name and the network"
        raise ConfigError(f"hf:{name} could not be loaded ({reason}); {cure}") from None
    splits: dict[str, list[str]] = {}
    for split, rows in found.items():
        where = f"hf:{name}, {split}"
        refuse_absent(field, rows.column_names, f"{where},")
        texts = (text_of({field: text}, f"{where}, row {row},", field) for row, text in enumerate(rows[field]))
        splits.setdefault(split_of(Path(split)), []).extend(strip(texts))
    return splits


@contextmanager
def _without_network() -> Iterator[None]:
    """Let the datasets library find what it has on disk, and ask nobody."""
    import datasets
    import huggingface_hub

    places: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


# --- splitting --------------------------------------------------------------------------------------------


def _percent_of(document: str) -> int:
    """A number from 0 to 99 that follows from the text alone: the same document always lands in the same split."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") % 100


def _complete_splits(splits: dict[str, list[str]]) -> dict[str, list[str]]:
    """Make train, valid and test out of what there is, by a hash of each document."""
    rest = splits.get("all", [])
    train, valid, test = ([*splits.get(split, [])] for split in SPLITS)
    if not train:
        train, rest = rest, []
    train += rest
    if valid and not test:
        # Half of a lone validation set becomes the test set.
        test = [document for document in valid if _percent_of(document) < 50]
        valid = [document for document in valid if _percent_of(document) >= 50]
    for held_out, first in ((valid, 0), (test, HELD_OUT_PERCENT)):
        if not held_out and len(train) > 1:
            chosen = {d for d in train if first <= _percent_of(d) < first + HELD_OUT_PERCENT}
            # A handful of documents may have none in that range: one must do.
            chosen = chosen or {min(train, key=_percent_of)}
            held_out += [d for d in train if d in chosen]
            train = [d for d in train if d not in chosen]
    return {"train": train, "valid": valid, "test": test}


def _deduplicate(splits: dict[str, list[str]], config: DataConfig) -> Corpus:
    """Keep each document once, and at most so many as the config says; what is held out stays held out."""
    seen: set[bytes] = set()
    kept: dict[str, list[str]] = {split: [] for split in SPLITS}
    for split in ("test", "valid", "train"):
        for document in splits[split]:
            digest = hashlib.sha256(document.encode()).digest()
            if digest not in seen:
                seen.add(digest)
                kept[split].append(document)
    duplicates, found = sum(map(len, splits.values())) - len(seen), len(kept["train"])
    for split in SPLITS:
        kept[split] = kept[split][: config.train_subset_size if split == "train" else config.val_subset_size]
    return Corpus(**kept, duplicates=duplicates, unused=found - len(kept["train"]))

"""Where stories come from: generated ones, text files, or a dataset of the Hugging Face hub.

Every source ends as three splits that share no document: choose by valid, report by test. A source may have any size:
it is read from its begin to its end several times, and in memory is one document, and some bytes about each.
"""

import hashlib
import json
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from some_moe.config import ConfigError, DataConfig
from some_moe.data.readers import READERS, kind_of, read_documents, refuse_absent, strip, text_of
from some_moe.errors import in_a_sentence
from some_moe.stories.generator import tell_many
from some_moe.system.progress import Say, announce, say_nothing
from some_moe.system.reading import clean, refuse_irregular, refuse_unprintable
from some_moe.system.streams import Kept, read_pieces

GENERATED_TRAIN, GENERATED_HELD_OUT = 20_000, 500
HELD_OUT_PERCENT = 5  # of a source without its own splits, for valid and for test each
SPLITS = ("train", "valid", "test")
LEFT_OUT = len(SPLITS)
IN_ORDER = ("train", "all", "valid", "test")  # files whose names tell no split are read after those to train on
Files = tuple[tuple[str, str], ...]  # name, without its folder, and a hash of the bytes
SOURCES = "give 'stories', a file, a folder, or hf:OWNER/NAME"


@dataclass(frozen=True)
class Part:
    """Documents that can be read as often as need be, and the split that their name tells ("all": it tells none)."""

    split: str
    name: str
    read: Callable[[], Iterable[str]]
    file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents by split; no document is in two of them, or twice in one."""

    parts: list[Part]
    splits: np.ndarray  # (documents,) uint8: which of SPLITS each one is of, or LEFT_OUT
    sizes: np.ndarray  # (documents,) uint64: bytes
    duplicates: int = 0  # documents left out because they stood there already
    unused: int = 0  # training documents that data.train_subset_size leaves out

    def walk(self) -> Iterator[tuple[int, int, str]]:
        """Every document that is used: its number in the source, that of its split, and its text."""
        documents = chain.from_iterable(part.read() for part in self.parts)
        end = int(np.flatnonzero(self.splits != LEFT_OUT)[-1]) + 1
        for number, (split, text) in enumerate(zip(self.splits[:end].tobytes(), documents, strict=False)):
            if split != LEFT_OUT:
                yield number, split, text

    def read(self, split: str) -> Iterator[str]:
        """The documents of a split, in order."""
        return (text for _, one, text in self.walk() if SPLITS[one] == split)

    def count(self, split: str) -> int:
        return int((self.splits == SPLITS.index(split)).sum())

    def count_bytes(self, *splits: str) -> int:
        return sum(int(self.sizes[self.splits == SPLITS.index(split)].sum()) for split in splits)


@in_a_sentence()
def load_corpus(config: DataConfig, say: Say = say_nothing, *, offline: bool = False) -> Corpus:
    """Read the source that the config names, split it, leave out repeats, and cut it to the subset sizes."""
    return survey(find_parts(config, offline=offline), config, say)


def survey(parts: list[Part], config: DataConfig, say: Say = say_nothing) -> Corpus:
    """Read everything once, and decide which split each document is of by its place and by a hash of it."""
    marks, sizes = array("Q"), array("Q")
    counts: list[int] = []
    for part in parts:
        with announce(say, f"reading {part.name} …"):
            for document in part.read():
                encoded = document.encode()
                marks.append(int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big"))
                sizes.append(len(encoded))
        counts.append(len(marks) - sum(counts))
    told = np.repeat([IN_ORDER.index(part.split) for part in parts], counts)
    if not (told < IN_ORDER.index("valid")).any():
        there = " and ".join(name for number, name in enumerate(IN_ORDER) if (told == number).any()) or "nothing"
        raise ConfigError(
            f"data.source {config.source!r} has text for {there} alone; put a file to train on beside it, with train "
            "in its name, or give the file itself"
        )
    splits, hashes = (np.maximum(told, 1) - 1).astype(np.uint8), np.frombuffer(marks, np.uint64)
    _hold_out(splits, hashes)
    duplicates, unused = _deduplicate(splits, hashes, config)
    sized = np.frombuffer(sizes, np.uint64)
    return Corpus(parts=parts, splits=splits, sizes=sized, duplicates=duplicates, unused=unused)


def identify(parts: list[Part], config: DataConfig) -> tuple[str, Files]:
    """A hash of all that decides a corpus, the bytes of its files and what is made of them; and that of each file."""
    told: list[Any] = [config.text_field, config.separator, config.train_subset_size, config.val_subset_size]
    files = []
    for part in parts:
        one = hashlib.sha256()
        texts = read_pieces(part.file, unpacked=False) if part.file else (f"{text}\0".encode() for text in part.read())
        for text in texts:
            one.update(text)
        told.append([part.split, kind_of(part.file) if part.file else "", one.hexdigest()])
        files.append((part.file.name if part.file else part.name, one.hexdigest()[:16]))
    return hashlib.sha256(json.dumps(told).encode()).hexdigest(), tuple(files)


def stamp(parts: list[Part]) -> list[tuple[int, int]]:
    """What changes when somebody writes to a file."""
    return [(one.st_size, one.st_mtime_ns) for one in (os.stat(part.file) for part in parts if part.file)]


# --- reading ----------------------------------------------------------------------------------------------


def find_parts(config: DataConfig, *, offline: bool = False) -> list[Part]:
    """What there is to read. offline: of the hub only what lies on this machine."""
    source = config.source
    if source == "stories":
        held_out = config.val_subset_size or GENERATED_HELD_OUT
        sizes = (config.train_subset_size or GENERATED_TRAIN, held_out, held_out)
        # Books 1 and 2 are for valid and test, so that asking for more training stories never reaches them.
        books = (partial(_tell, size, book) for book, size in enumerate(sizes))
        return [Part(split, f"{split} stories", Kept(book).read) for split, book in zip(SPLITS, books, strict=True)]
    parts = _find_in_hub(source, config.text_field, offline=offline) if source.startswith("hf:") else find_path(config)
    return sorted(parts, key=lambda part: IN_ORDER.index(part.split))


def _tell(size: int, book: int) -> Iterator[str]:
    return (story.text for story in tell_many(size, seed=book))


def read_texts(source: str | Path, config: DataConfig) -> Iterator[str]:
    """All texts of a file, a folder or hf:OWNER/NAME, whatever split they are of, one after another."""
    whole = config.override({"source": str(source), "train_subset_size": None, "val_subset_size": None})
    if str(source).startswith("hf:"):
        corpus = load_corpus(whole)
        return chain.from_iterable(corpus.read(split) for split in SPLITS)
    files = find_path(whole)
    told = [file.split for file in files]
    return chain.from_iterable(file.read() for file in sorted(files, key=lambda file: told.index(file.split)))


def find_path(config: DataConfig) -> list[Part]:
    """A file, or a folder whose file names may tell the splits."""
    text = config.source
    refuse_unprintable(text, "data.source")
    if not text.strip():
        raise ConfigError(f"data.source is {text!r}, which names nothing; {SOURCES}")
    if "://" in text:
        raise ConfigError(f"data.source {text!r} is an address, and none is fetched; download it, and give the file")
    path = Path(text)
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        raise ConfigError(f"data.source {text!r} does not exist; {SOURCES}") from None
    files = find_files(path) if is_folder else [path]
    if not files:
        raise ConfigError(f"data.source {text!r} has no {', '.join(READERS)} file; put the texts there")
    splits = [split_of(file.relative_to(path)) if is_folder else "all" for file in files]
    return [
        Part(split, str(file), partial(read_documents, file, config), file)
        for split, file in zip(splits, files, strict=True)
    ]


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


def _find_in_hub(source: str, field: str, *, offline: bool) -> list[Part]:
    """A dataset of the Hugging Face hub, e.g. hf:roneneldan/TinyStories; offline: only where it was read before."""
    name = source.removeprefix("hf:")
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
    parts = []
    for split, rows in found.items():
        where = f"{source}, {split}"
        refuse_absent(field, rows.column_names, f"{where},")
        parts.append(Part(split_of(Path(split)), where, partial(_read_rows, rows, field, where)))
    return parts


def _read_rows(rows: Any, field: str, where: str) -> Iterator[str]:
    return strip(text_of({field: text}, f"{where}, row {row},", field) for row, text in enumerate(rows[field]))


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


def _hold_out(splits: np.ndarray, marks: np.ndarray) -> None:
    """Make train, valid and test out of what there is, by a hash of each document."""
    train, valid, test = range(len(SPLITS))
    percent = marks % 100
    if (splits == valid).any() and not (splits == test).any():
        # Half of a lone validation set becomes the test set.
        splits[(splits == valid) & (percent < 50)] = test
    for held_out, first in ((valid, 0), (test, HELD_OUT_PERCENT)):
        left = np.flatnonzero(splits == train)
        if not (splits == held_out).any() and len(left) > 1:
            chosen = left[(percent[left] >= first) & (percent[left] < first + HELD_OUT_PERCENT)]
            if not len(chosen):
                # A handful of documents may have none in that range: one must do.
                chosen = left[marks[left] == marks[left[percent[left].argmin()]]]
            splits[chosen] = held_out


def _deduplicate(splits: np.ndarray, marks: np.ndarray, config: DataConfig) -> tuple[int, int]:
    """Keep each document once, held out where it can be, and as many as are asked for; count repeats, and unused."""
    order = np.lexsort((-splits.astype(np.int8), marks))  # like ones together: of test, of valid, of train; by place
    repeats = order[1:][marks[order[1:]] == marks[order[:-1]]]
    splits[repeats] = LEFT_OUT
    unused = 0
    for split, name in enumerate(SPLITS):
        most = config.train_subset_size if name == "train" else config.val_subset_size
        beyond = np.flatnonzero(splits == split)[most or len(splits) :]
        splits[beyond] = LEFT_OUT
        unused += len(beyond) if name == "train" else 0
    return len(repeats), unused

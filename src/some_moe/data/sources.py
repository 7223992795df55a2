"""Where stories come from: generated ones, text files, or a dataset of the Hugging Face hub.

Every source ends as three lists of documents that share none: choose by valid, report by test.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError, DataConfig
from some_moe.stories.generator import tell_many

GENERATED_TRAIN, GENERATED_HELD_OUT = 20_000, 500
HELD_OUT_PERCENT = 5  # of a source without its own splits, for valid and for test each
END_OF_TEXT = "<|endoftext|>"
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents by split; no document is in two of them, or twice in one."""

    train: list[str]
    valid: list[str]
    test: list[str]
    duplicates: int = 0  # documents left out because they stood there already

    def digest(self) -> str:
        """A hash of every document, its place and its split."""
        total = hashlib.sha256()
        for split in SPLITS:
            for document in getattr(self, split):
                total.update(hashlib.sha256(document.encode()).digest())
            total.update(split.encode())
        return total.hexdigest()


def load_corpus(config: DataConfig) -> Corpus:
    """Read the source that the config names, split it, leave out repeats, and cut it to the subset sizes."""
    source = config.source
    if source == "stories":
        held_out = config.val_subset_size or GENERATED_HELD_OUT
        sizes = (config.train_subset_size or GENERATED_TRAIN, held_out, held_out)
        # Books 1 and 2 are for valid and test, so that asking for more training stories never reaches them.
        books = ([story.text for story in tell_many(size, seed=book)] for book, size in enumerate(sizes))
        return _deduplicate(dict(zip(SPLITS, books, strict=True)), config)
    splits = _read_hub(source.removeprefix("hf:")) if source.startswith("hf:") else read_path(Path(source), config)
    return _deduplicate(_complete_splits(splits), config)


# --- reading ----------------------------------------------------------------------------------------------


def read_path(path: Path, config: DataConfig) -> dict[str, list[str]]:
    """Read a file, or a folder whose file names may tell the splits. {"all": …} where nothing tells them."""
    if not path.exists():
        raise ConfigError(
            f"data.source {str(path)!r} does not exist; give 'stories', a file, a folder, or hf:OWNER/NAME"
        )
    if path.is_file():
        return {"all": read_documents(path, config)}
    files = sorted(file for file in path.iterdir() if file.suffix in READERS)
    if not files:
        raise ConfigError(f"data.source {str(path)!r} has no {', '.join(READERS)} file; put the texts there")
    splits: dict[str, list[str]] = {}
    for file in files:
        splits.setdefault(_split_of(file.stem), []).extend(read_documents(file, config))
    return splits


def _split_of(stem: str) -> str:
    """The split that a file's name tells, such as stories_valid or train-00001; else "all"."""
    words = set(re.split(r"[^a-z]+", stem.lower()))
    if words & {"valid", "val", "validation", "dev"}:
        return "valid"
    return "test" if "test" in words else "train" if "train" in words else "all"


def read_documents(path: Path, config: DataConfig) -> list[str]:
    """Read one file's documents, stripped of outer white space; empty ones are left out."""
    reader = READERS.get(path.suffix)
    if reader is None:
        raise ConfigError(f"data.source {str(path)!r} ends in {path.suffix!r}; supported are {', '.join(READERS)}")
    documents = _strip(reader(path, config))
    if not documents:
        raise ConfigError(f"data.source {str(path)!r} holds no text; give a file with at least one document")
    return documents


def _strip(documents: Iterable[str]) -> list[str]:
    return [text for text in (document.strip() for document in documents) if text]


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.source {str(path)!r} is not UTF-8 text (byte {error.start}); convert it or give another file"
        ) from None
    if "\0" in text:
        raise ConfigError(f"data.source {str(path)!r} is binary, not text; give a text file")
    return text


def _read_txt(path: Path, config: DataConfig) -> Iterator[str]:
    """Documents end at data.separator; by default at <|endoftext|> where that occurs, else at blank lines."""
    text = _read_text(path)
    if config.separator:
        yield from text.split(config.separator.replace("\\n", "\n").replace("\\t", "\t"))  # as a shell leaves them
    elif END_OF_TEXT in text:
        yield from text.split(END_OF_TEXT)
    else:
        yield from re.split(r"\n\s*\n", text)


def _read_jsonl(path: Path, config: DataConfig) -> Iterator[str]:  # noqa: ARG001
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            raise ConfigError(f"{str(path)!r}, line {number}, is not JSON; mend or remove that line") from None
        yield _text_of(record, f"{str(path)!r}, line {number},")


def _text_of(record: Any, where: str) -> str:
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        fields = f"has the fields {sorted(record)}" if isinstance(record, dict) else "is no object"
        raise ConfigError(f"{where} has no text: it {fields}; each record needs a 'text' field with a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ConfigError(f"{where} has half a character, {half}, in its text; mend or remove that record") from None
    return text


def _read_parquet(path: Path, config: DataConfig) -> Iterator[str]:  # noqa: ARG001
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError("reading .parquet needs pyarrow: pip install 'some-moe[data]'") from None
    try:
        table = parquet.read_table(path)
    except Exception as error:
        raise ConfigError(f"{str(path)!r} is not a parquet file ({type(error).__name__}); give another file") from None
    if "text" not in table.column_names:
        raise ConfigError(f"{str(path)!r} has the columns {table.column_names}; it needs a 'text' column")
    for row, text in enumerate(table.column("text").to_pylist()):
        yield _text_of({"text": text}, f"{str(path)!r}, row {row},")


READERS: dict[str, Callable[[Path, DataConfig], Iterable[str]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _read_hub(name: str) -> dict[str, list[str]]:
    """Read a dataset of the Hugging Face hub, e.g. roneneldan/TinyStories."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigError(f"hf:{name} needs the datasets library: pip install 'some-moe[data]'") from None
    try:
        found = load_dataset(name)
    except Exception as error:
        # The library raises many kinds: not found, no network, no permission. All mean: not this source, not now.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"hf:{name} could not be loaded ({reason}); check the name and the network") from None
    splits: dict[str, list[str]] = {}
    for split, rows in found.items():
        where = f"hf:{name}, {split}"
        if "text" not in rows.column_names:
            raise ConfigError(f"{where}, has the columns {rows.column_names}; it needs a 'text' column")
        texts = (_text_of({"text": text}, f"{where}, row {row},") for row, text in enumerate(rows["text"]))
        splits.setdefault(_split_of(split), []).extend(_strip(texts))
    return splits


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
        kept[split] = kept[split][: config.train_subset_size if split == "train" else config.val_subset_size]
    return Corpus(**kept, duplicates=sum(map(len, splits.values())) - len(seen))

"""The study's texts: files of the reader's, laid out as a folder each with train, valid and test, and read as rows.

Shapes: R rows.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import numpy as np

from some_moe.config import ConfigError, DataConfig
from some_moe.data.batches import Rows
from some_moe.data.dataset import Dataset, prepare
from some_moe.data.readers import read_documents
from some_moe.data.tokenizer import Tokenizer
from some_moe.errors import UsageError
from some_moe.system.files import write_whole

SPLITS = ("train", "valid", "test")
PASSAGE = 1000  # characters: shorter documents are joined to passages, so that a row holds one kind of text
HELD_OUT = 0.05  # of a text without its own splits, for valid and for test each
BASE = "base"  # the folder of all texts that bases learn


def parse_texts(words: list[str], flag: str) -> dict[str, str]:
    """NAME=FILES, as they stand on the command line; FILES is a path or a pattern such as 'law_*.jsonl.gz'."""
    texts = {}
    for word in words:
        name, sign, files = word.partition("=")
        if not (sign and name.isidentifier() and files):
            raise UsageError(f"{flag} {word!r} names no text; write NAME=FILES, as law=texts/law_*.jsonl.gz")
        if name in texts or name in (BASE, "mixed", "gained"):
            raise UsageError(f"{flag} {word!r} takes a name that is taken; choose another")
        texts[name] = files
    return texts


def lay_out(texts: dict[str, str], base: list[str], folder: Path) -> None:
    """Write every text as folder/NAME/SPLIT.jsonl, and those of the base together as folder/base."""
    for name, files in texts.items():
        for split, documents in read_splits(name, files).items():
            write_documents(folder / name / f"{split}.jsonl", documents)
            if name in base:
                write_documents(folder / BASE / f"{name}-{split}.jsonl", documents)


def write_documents(path: Path, documents: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps({"text": text}) + "\n" for text in documents))


def read_splits(name: str, files: str) -> dict[str, list[str]]:
    """The documents of a text by split: as the files' names say, or cut in order where they say nothing."""
    paths = sorted(map(Path, glob(files)))
    if not paths:
        raise ConfigError(f"{name}={files} matches no file; give files that are there")
    found: dict[str, list[str]] = {split: [] for split in SPLITS}
    for path in paths:
        told = [split for split in SPLITS if split in path.name.split(".")[0].split("_")]
        documents = list(join_short(read_any(path)))
        if len(told) == 1 and len(paths) > 1:
            found[told[0]] += documents
            continue
        held = max(1, int(HELD_OUT * len(documents)))
        cuts = {"train": documents[: -2 * held], "valid": documents[-2 * held : -held], "test": documents[-held:]}
        found = {split: found[split] + cuts[split] for split in SPLITS}
    for split, documents in found.items():
        if not documents:
            raise ConfigError(f"{name}={files} has no text for {split}; give more text, or files for each split")
    return found


def read_any(path: Path) -> Iterator[str]:
    """The documents of a file; of records that have a question and an answer, these two."""
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines if line.strip()]
        if all(isinstance(one, dict) and {"question", "answer"} <= one.keys() for one in records):
            yield from (f"{one['question']}\n{one['answer']}" for one in records)
            return
    yield from read_documents(path, DataConfig())


def join_short(documents: Iterator[str]) -> Iterator[str]:
    """Documents as they are, if they are long: else several, joined to passages."""
    passage = ""
    for text in documents:
        passage = f"{passage}\n\n{text}" if passage else text
        if len(text) >= PASSAGE // 4 or len(passage) >= PASSAGE:  # speeches are shorter, and stories are not
            yield passage
            passage = ""
    if passage:
        yield passage


def learn_words(place: Path, texts: Path, vocab_size: int) -> Tokenizer:
    """The vocabulary of the base's training text, kept at `place`."""
    if not place.is_file():
        files = sorted((texts / BASE).glob("*-train.jsonl"))
        documents = (text for path in files for text in read_documents(path, DataConfig()))
        write_whole(place, Tokenizer.train(documents, vocab_size).to_json())
    return Tokenizer.load(place)


# --- rows -----------------------------------------------------------------------------------------------------


def data_config(source: Path, seq_len: int, batch_size: int, tokenizer: Path | None) -> DataConfig:
    return DataConfig(
        source=str(source),
        seq_len=seq_len,
        batch_size=batch_size,
        batching="packed",
        long="split",
        tokenizer=None if tokenizer is None else str(tokenizer),
    )


def open_text(config: DataConfig, vocab_size: int, tokenizer: Tokenizer, source: Path) -> Dataset:
    return prepare(config.override({"source": str(source)}), vocab_size, tokenizer)


def take_rows(rows: Rows, chosen: np.ndarray) -> Rows:
    """Some rows, in that order."""
    return join([rows[int(row)] for row in chosen])


def join(pieces: list[np.ndarray]) -> Rows:
    return Rows(np.concatenate(pieces), np.cumsum([0, *map(len, pieces)]))


def add_rows(new: Rows, old: Rows, share: float, seed: int) -> Rows:
    """New rows and as many of the old, drawn at random, as make `share` of all ids."""
    if not share:
        return new
    wanted = share / (1 - share) * len(new.ids)
    draw = np.random.default_rng(seed)
    pieces, held = [new[row] for row in range(len(new))], 0
    while held < wanted:
        for row in draw.permutation(len(old)):
            pieces.append(old[int(row)])
            held += len(pieces[-1])
            if held >= wanted:
                break
    return join(pieces)


@dataclass(frozen=True)
class MixedRows:
    """Rows that change from one text to another half-way."""

    rows: Rows
    first: np.ndarray  # (R,) number of each row's first text
    second: np.ndarray  # (R,)


def mix_rows(texts: list[Rows], count: int, seq_len: int, seed: int = 0) -> MixedRows:
    """Rows whose first half is of one text, and whose second of another, both drawn."""
    draw = np.random.default_rng(seed)
    half = seq_len // 2
    long = [np.flatnonzero(rows.lengths >= half) for rows in texts]
    usable = [number for number, rows in enumerate(long) if len(rows)]
    if len(usable) < 2:
        raise ConfigError(f"fewer than two texts have rows of {half} tokens; give longer documents")
    pieces, pairs = [], []
    for _ in range(count):
        a, b = draw.choice(usable, 2, replace=False)
        begin, end = (texts[text][int(draw.choice(long[text]))] for text in (a, b))
        pieces.append(np.concatenate([begin[: half + 1], end[1 : seq_len - half + 1]]))
        pairs.append((a, b))
    return MixedRows(join(pieces), *np.array(pairs).T)

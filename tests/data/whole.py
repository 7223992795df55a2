"""The obvious preparation of data, with all of it in memory: what the one that reads in a stream must equal."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from some_moe.config import DataConfig
from some_moe.data.readers import END_OF_TEXT
from some_moe.data.sources import HELD_OUT_PERCENT, SPLITS, Corpus
from some_moe.data.tokenizer import BOS, EOS, Tokenizer


@dataclass(frozen=True)
class Lists:
    """A corpus in memory."""

    train: list[str]
    valid: list[str]
    test: list[str]
    duplicates: int
    unused: int


def in_lists(corpus: Corpus) -> Lists:
    return Lists(*([*corpus.read(split)] for split in SPLITS), corpus.duplicates, corpus.unused)


def read_whole(path: Path, config: DataConfig) -> list[str]:
    """The documents of a .txt, .json or .jsonl file."""
    text = path.read_bytes().decode("utf-8-sig")
    if path.suffix == ".json":
        texts = [record["text"] for record in json.loads(text)]
    elif path.suffix == ".jsonl":
        texts = [json.loads(line)["text"] for line in text.split("\n") if line.strip()]
    elif config.separator:
        texts = text.split(config.separator)
    else:
        texts = text.split(END_OF_TEXT) if END_OF_TEXT in text else re.split(r"\n\s*\n", text)
    return [text.strip() for text in texts if text.strip()]


def percent_of(document: str) -> int:
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") % 100


def split_whole(splits: dict[str, list[str]], config: DataConfig) -> Lists:
    """Documents by the split that their files' names tell, or "all"."""
    train, valid, test = ([*splits.get(split, [])] for split in SPLITS)
    train += splits.get("all", [])
    if valid and not test:
        test = [document for document in valid if percent_of(document) < 50]
        valid = [document for document in valid if percent_of(document) >= 50]
    for held_out, first in ((valid, 0), (test, HELD_OUT_PERCENT)):
        if not held_out and len(train) > 1:
            chosen = {d for d in train if first <= percent_of(d) < first + HELD_OUT_PERCENT}
            chosen = chosen or {min(train, key=percent_of)}
            held_out += [d for d in train if d in chosen]
            train = [d for d in train if d not in chosen]
    seen: set[str] = set()
    kept: dict[str, list[str]] = {}
    for split, documents in (("test", test), ("valid", valid), ("train", train)):
        kept[split] = [d for d in documents if not (d in seen or seen.add(d))]  # type: ignore[func-returns-value]
    duplicates = len(train) + len(valid) + len(test) - len(seen)
    sizes = [config.train_subset_size, config.val_subset_size, config.val_subset_size]
    used = [kept[split][:size] for split, size in zip(SPLITS, sizes, strict=True)]
    return Lists(*used, duplicates, len(kept["train"]) - len(used[0]))


def encode_whole(texts: list[str], tokenizer: Tokenizer, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all rows, and where each starts."""
    rows: list[list[int]] = []
    for text in texts:
        whole, step = [BOS, *tokenizer.encode(text), EOS], config.seq_len
        kept = whole if config.long == "split" else whole[: step + 1]
        rows += [kept[start : start + step + 1] for start in range(0, len(kept) - 1, step)]
    return np.array([one for row in rows for one in row], np.uint16), np.cumsum([0, *map(len, rows)])


def digest_whole(lists: Lists, tokenizer: Tokenizer, config: DataConfig) -> str:
    """What state.json calls the data's digest."""
    total = hashlib.sha256()
    for split in SPLITS:
        for array in encode_whole(getattr(lists, split), tokenizer, config):
            total.update(array.tobytes())
    return total.hexdigest()


def pack_whole(lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    """Rows filled with whole stories, longest first, each into the fullest row that has room."""
    by_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
    groups: list[list[int]] = []
    for story in np.argsort(-lengths, kind="stable").tolist():
        need = int(lengths[story])
        room = next((r for r in range(need, seq_len + 1) if by_room[r]), None)
        if room is None:
            row, room = len(groups), seq_len
            groups.append([])
        else:
            row = by_room[room].pop()
        groups[row].append(story)
        by_room[room - need].append(row)
    return groups

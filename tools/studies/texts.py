"""The folders of text that travel with a slice: every story, and the novels, packed, under 45 MiB together."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from some_moe.config import ConfigError, DataConfig
from some_moe.data.readers import read_documents
from some_moe.memory import format_bytes
from some_moe.system.files import write_whole

MOST_BYTES = 45 << 20
SPLITS = ("train", "valid", "test")
# In this order: published runs take the first 10,000 stories, among which is the whole first sample.
STORIES: dict[str, tuple[str, ...]] = {
    "train": ("tinystories_train.jsonl", "tinystories_more_train.jsonl"),
    "valid": ("tinystories_more_valid.jsonl",),
    "test": ("tinystories_more_test.jsonl",),
}
NOVELS: dict[str, tuple[str, ...]] = {split: (f"domains/novels_{split}.jsonl",) for split in SPLITS}
FOLDERS: dict[str, dict[str, tuple[str, ...]]] = {"tinystories": STORIES, "novels": NOVELS}


def lay_out(source: Path, out: Path, say: Callable[[str], None]) -> int:
    """Write OUT/NAME/SPLIT.jsonl.gz of every folder, once all is read; return their bytes."""
    packed: dict[Path, bytes] = {}
    for folder, splits in FOLDERS.items():
        for split, names in splits.items():
            texts = [text for name in names for text in read(source, name)]
            lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            packed[out / folder / f"{split}.jsonl.gz"] = gzip.compress(lines.encode(), 9, mtime=0)
            say(f"{folder}, {split}: {len(texts):,} documents")
    total = sum(map(len, packed.values()))
    if total > MOST_BYTES:
        raise ConfigError(f"the texts take {format_bytes(total)}, more than the {format_bytes(MOST_BYTES)} that travel")
    for path, contents in packed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, contents)
    return total


def read(source: Path, name: str) -> Iterator[str]:
    """A file's documents, be it packed or not."""
    for path in (source / name, source / f"{name}.gz"):
        if path.is_file():
            return read_documents(path, DataConfig())
    raise ConfigError(f"{str(source)!r} has no {name}, packed or not; give the folder that holds the texts")

"""Records of the studies: small JSON files below results/, and the one file in which they come home from a machine."""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError
from some_moe.system.files import write_whole
from some_moe.system.reading import parse_json

Record = Mapping[str, Any]
Records = Mapping[str, Record]
"""By their place below results, such as studies/ladder/gravity-v4_r6_d0_w0.1-seed0.json."""

FOLDERS = ("published", "studies")
HOME = "records.jsonl.gz"
# Of each layer and each epoch a study's record keeps what its pages show: a run has some 8 to 24 of the former.
KEPT_EPOCH = ("epoch", "step", "tokens", "train_loss", "val_loss")
KEPT_LAYER = ("layer", "gini", "entropy_bits", "experts_used", "num_experts", "respawns")
LARGEST_HOME = 1 << 26  # bytes, unpacked


def read_records(results: Path) -> dict[str, Record]:
    """All records of the studies that lie below `results`."""
    found: dict[str, Record] = {}
    for folder in FOLDERS:
        for file in sorted((results / folder).rglob("*.json")):
            try:
                record = parse_json(file.read_bytes())
            except (OSError, ValueError) as error:
                raise ConfigError(f"{str(file)!r} cannot be read ({error}); remove it, or measure it again") from None
            if isinstance(record, dict):
                found[file.relative_to(results).as_posix()] = record
    return found


def slim(record: Record) -> dict[str, Any]:
    """A record without what no page of the studies shows."""
    kept = dict(record)
    for name, fields in (("epochs", KEPT_EPOCH), ("layers", KEPT_LAYER)):
        rows = kept.get(name)
        if isinstance(rows, list):
            kept[name] = [{one: row.get(one) for one in fields} for row in rows]
    kept.pop("published_epochs", None)
    return kept


def write_json(record: Record) -> str:
    """A record as it is kept: a line a field, so that a thousand stories are one line."""
    lines = [f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in record.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def pack(records: Records) -> bytes:
    """One line a record, with its place; the same bytes for the same records."""
    lines = [json.dumps({"place": place, "record": record}) + "\n" for place, record in records.items()]
    return gzip.compress("".join(lines).encode(), mtime=0)


def unpack(file: Path) -> dict[str, Record]:
    cure = "bring it home again"
    try:
        with gzip.open(file) as stream:
            text = stream.read(LARGEST_HOME + 1)
        if len(text) > LARGEST_HOME:
            raise ValueError(f"more than {LARGEST_HOME} bytes")
        lines = [parse_json(line) for line in text.splitlines()]
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} holds no records ({error}); {cure}") from None
    found = {}
    for line in lines:
        place = line.get("place") if isinstance(line, dict) else None
        if not isinstance(place, str) or not isinstance(line.get("record"), dict) or not is_place(place):
            raise ConfigError(f"{str(file)!r} holds something else than records; {cure}")
        found[place] = line["record"]
    return found


def is_place(place: str) -> bool:
    """Whether it is a place of a record, within the results."""
    path = Path(place)
    return path.parts[:1] in {(one,) for one in FOLDERS} and path.suffix == ".json" and ".." not in path.parts


def take(file: Path, results: Path) -> tuple[list[str], list[str]]:
    """Put the records of a file where they belong; return the places that are new, and those that were there.

    One that is there already stays: a run that was measured is not measured again, unless its record is removed first.
    """
    new, old = [], []
    for place, record in unpack(file).items():
        path = results / place
        if path.exists():
            old.append(place)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write_json(record))
        new.append(place)
    return new, old


def count_with_stories(records: Iterable[Record]) -> int:
    """How many records have the loss of every story of test."""
    found = [record.get("stories") for record in records]
    return sum(isinstance(one, dict) and isinstance(one.get("test"), dict) for one in found)

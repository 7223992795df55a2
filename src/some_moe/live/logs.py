"""The logs of a run as they grow: read by bytes, in pieces of whole lines. Anybody may have written them.

A *place* is where a reader is: the byte that comes next, and a sum over the few bytes before it. A log that was cut
back, as by a resumed run, or is another one now, no longer has these bytes there: then it is read from its beginning.
"""

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from some_moe.system.files import inside
from some_moe.system.reading import clean, parse_json, refuse_irregular
from some_moe.system.records import LARGEST_LOG

PIECE = 1 << 20  # bytes that are read at once
MARK = 64  # bytes before a place by which it is recognised
WHOLE = 1 << 24  # a longer log is thinned out when it is first read
LONGEST_SAMPLE = 4_000  # characters

STEP = ("step", "tokens", "train_loss", "gradient_norm", "learning_rate", "top_k", "gini_middle", "tokens_per_second")
EVALUATION = ("step", "tokens", "val_loss", "perplexity", "bits_per_byte", "val_loss_padded")
LAYER = ("gini", "entropy_bits", "experts_used", "max_load", "respawns")


@dataclass(frozen=True)
class Place:
    byte: int = 0
    mark: int = 0

    @classmethod
    def parse(cls, text: str) -> "Place":
        """What `str` made; anything else is the beginning."""
        byte, _, mark = text.partition("-")
        whole = byte.isdecimal() and mark.isdecimal() and len(text) < 30
        return cls(int(byte), int(mark)) if whole else cls()

    def __str__(self) -> str:
        return f"{self.byte}-{self.mark}"


@dataclass(frozen=True)
class Piece:
    """Some lines, where the next ones begin, and whether all that was read before is void."""

    lines: list[bytes]
    place: Place
    again: bool = False


def read_piece(folder: Path, name: str, place: Place) -> Piece:
    """What follows a place in a log; nothing where nothing does, or where there is no log at the moment."""
    path = inside(folder, name)
    try:
        refuse_irregular(path)
        with path.open("rb") as file:
            again = place.byte > 0 and not _recognise(file, place)
            start = 0 if again else place.byte
            file.seek(start)
            data = file.read(min(PIECE, LARGEST_LOG - start)) if start < LARGEST_LOG else b""
            end = data.rfind(b"\n") + 1
            if end == 0 and len(data) == PIECE:
                end = PIECE  # no line is so long: what it is, is left out
            if end == 0:
                return Piece([], Place() if again else place, again)
            file.seek(max(0, start + end - MARK))
            mark = zlib.crc32(file.read(min(MARK, start + end)))
    except (FileNotFoundError, NotADirectoryError):
        return Piece([], place)
    return Piece(data[:end].splitlines(), Place(start + end, mark), again)


def _recognise(file: Any, place: Place) -> bool:
    file.seek(max(0, place.byte - MARK))
    before = file.read(min(MARK, place.byte))
    return len(before) == min(MARK, place.byte) and zlib.crc32(before) == place.mark


def number(value: Any) -> float | None:
    """A number that JSON and JavaScript know; else None."""
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) >= 2**53:
        return None
    return value  # type: ignore[no-any-return]


def parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(number(found.get("step")), int) else None


def pick_metrics(lines: list[bytes]) -> dict[str, list[list[Any]]]:
    """Lines of metrics.jsonl as rows of numbers: of steps (STEP), and of evaluations (EVALUATION and its layers)."""
    steps, evaluations = [], []
    for line in lines:
        found = parse_line(line)
        if found is None:
            continue
        if "val_loss" in found:
            layers = found.get("layers")
            layers = [one for one in layers if isinstance(one, dict)] if isinstance(layers, list) else []
            by_layer = [[number(one.get(name)) for name in LAYER] for one in layers[:1024]]
            evaluations.append([*(number(found.get(name)) for name in EVALUATION), by_layer])
        elif "train_loss" in found:
            steps.append([number(found.get(name)) for name in STEP])
    return {"steps": steps, "evaluations": evaluations}


def pick_samples(lines: list[bytes]) -> list[dict[str, Any]]:
    found = [one for one in map(parse_line, lines) if one is not None and isinstance(one.get("text"), str)]
    return [{"step": one["step"], "text": clean(one["text"][:LONGEST_SAMPLE])} for one in found]


def thin(lines: list[bytes], every: int) -> list[bytes]:
    """Every n-th line."""
    return lines if every <= 1 else lines[::every]

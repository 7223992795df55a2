"""Files of any size, some of their bytes at a time: unpacked, as text, cut into documents, and written at their ends.

Imports no torch.
"""

import codecs
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from some_moe.errors import ConfigError, FailureError
from some_moe.system.reading import refuse_bomb, refuse_irregular

PIECE = 1 << 20  # bytes that are read at a time
KEPT_IN_MEMORY = 1 << 26  # bytes; more wait in a temporary file
PACKED_PIECE = 1 << 12  # those of a packed file, which may give 32,768 times as many
BLANK_LINES = re.compile(r"\n\s*\n")
GAP = re.compile(r"[ \t\r\n]*")  # between the values of a JSON text
LONGEST_LITERAL = 16  # JSON that ends within so many signs may go on: -Infinity, an escaped sign


def read_pieces(path: str | Path, *, unpacked: bool = True) -> Iterator[bytes]:
    """A file's bytes, some at a time; of a .gz or .zst file what it holds, and no more of it than it may give."""
    refuse_irregular(path)
    packing = Path(path).suffix.lower() if unpacked else ""
    with open(path, "rb") as file:
        if packing not in PACKINGS:
            yield from iter(partial(file.read, PIECE), b"")
        else:
            try:
                yield from _unpack(path, file, *PACKINGS[packing]())
            except EOFError:
                kind = {".gz": "gzip", ".zst": "zstd"}[packing]
                reason = f"{str(path)!r} is no whole {kind} file"
                raise ConfigError(f"{reason}; pack it again, or give it unpacked") from None


def _unpack(path: str | Path, file: BinaryIO, make: Callable[[], Any], broken: type[Exception]) -> Iterator[bytes]:
    """What a packed file holds, however many parts of its own it was packed in; EOFError where it is not whole."""
    part, given, data = make(), 0, b""
    while data := data or file.read(PACKED_PIECE):
        if part.eof:
            data = data.lstrip(b"\0")  # some pad with them
            if not data:
                continue
            part = make()
        try:
            piece = part.decompress(data)
        except broken:
            raise EOFError from None
        data, given = part.unused_data, given + len(piece)
        refuse_bomb(path, given)
        yield piece
    if not part.eof:
        raise EOFError


def begins_with(path: Path, size: int, check: int) -> bool:
    """Whether a file's first so many bytes have this checksum."""
    found, left = 0, size
    for piece in read_pieces(path, unpacked=False) if path.is_file() else ():
        found, left = zlib.crc32(piece[:left], found), left - len(piece[:left])
    return left == 0 and found == check


def _gzip() -> tuple[Callable[[], Any], type[Exception]]:
    return partial(zlib.decompressobj, 16 + zlib.MAX_WBITS), zlib.error


def _zstd() -> tuple[Callable[[], Any], type[Exception]]:
    try:
        zstd = import_module("compression.zstd")  # of Python 3.14
        return zstd.ZstdDecompressor, zstd.ZstdError
    except ImportError:
        pass
    try:
        zstandard = import_module("zstandard")
    except ImportError:
        raise ConfigError("reading .zst needs zstandard; run pip install zstandard") from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


PACKINGS = {".gz": _gzip, ".zst": _zstd}


def read_text(path: Path) -> Iterator[str]:
    """A file's text, some at a time; a mark at its begin, as some editors write it, is left out."""
    decode, size = codecs.getincrementaldecoder("utf-8")(), 0
    for piece in chain(read_pieces(path), [b""]):
        held = len(decode.getstate()[0])
        try:
            text = decode.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            place = size - held + error.start
            raise ConfigError(f"data.source {str(path)!r} is not UTF-8 text (byte {place}); convert it") from None
        if "\0" in text:
            raise ConfigError(f"data.source {str(path)!r} is binary, not text; give a text file")
        yield text.removeprefix("\ufeff") if size - held <= 0 else text
        size += len(piece)


def cut(pieces: Iterable[str], separator: str | None) -> Iterator[str]:
    """A text that comes in pieces, cut at a separator; None: at blank lines."""

    def split(text: str) -> list[str]:
        if separator is not None:
            return text.split(separator)
        whole = text.rstrip()  # the gap at the end may go on
        *documents, last = BLANK_LINES.split(whole)
        return [*documents, last + text[len(whole) :]]

    rest, waiting, size = "", [""], 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size > len(rest):  # so that the pieces of a long document are joined and searched a few times, not each time
            *documents, rest = split(rest + "".join(waiting))
            yield from documents
            waiting, size = [], 0
    yield from split(rest + "".join(waiting))


def occurs(words: bytes, path: Path) -> bool:
    end = b""
    for piece in read_pieces(path):
        if words in (end := end + piece):
            return True
        end = end[-len(words) :]
    return False


def read_list(text: str, pieces: Iterator[str], where: str) -> Iterator[Any]:
    """The values of a JSON list whose text begins with `text`, and goes on in pieces."""
    decode, state, place, line, is_all = json.JSONDecoder().raw_decode, "begin", 0, 1, False
    follows = {("begin", "["): "first", ("first", "]"): "end", ("next", ","): "value", ("next", "]"): "end"}
    while True:
        place = GAP.match(text, place).end()  # type: ignore[union-attr]
        sign, wrong, last = text[place : place + 1], len(text), len(text) - LONGEST_LITERAL
        if is_all or place < last:
            if (state, sign) in follows:
                state, place = follows[state, sign], place + 1
                continue
            if state == "end" and not sign:
                return
            wrong = place
            if state in ("first", "value"):
                try:
                    value, end = decode(text, place)
                    if is_all or end < last:
                        yield value
                        state, place = "next", end
                        continue
                except json.JSONDecodeError as error:
                    wrong = len(text) if error.msg.startswith("Unterminated") and not is_all else error.pos
                except (ValueError, RecursionError):
                    raise ConfigError(f"{where} has numbers or nesting beyond all measure; mend it") from None
                else:
                    wrong = end
        if is_all or wrong < last:
            line += text.count("\n", 0, wrong)
            raise ConfigError(f"{where} is not JSON{f' (its line {line})' if line > 1 else ''}; mend it")
        line, text, place = line + text.count("\n", 0, place), text[place:], 0
        more = [next(pieces, None)]
        while more[-1] is not None and sum(len(piece or "") for piece in more) <= len(text):
            more.append(next(pieces, None))
        is_all = more[-1] is None
        text += "".join(piece or "" for piece in more)


class GrowingFile:
    """A file that is written at its end. size, check: of what it has already, and goes on with; 0 begins it anew."""

    def __init__(self, path: Path, size: int = 0, check: int = 0) -> None:
        if not size:
            path.unlink(missing_ok=True)  # another process may have mapped what lies there into its memory
        self.file, self.size, self.check = path.open("r+b" if size else "xb"), size, check
        self.file.truncate(size)
        self.file.seek(size)

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.size, self.check = self.size + len(data), zlib.crc32(data, self.check)

    def tell(self) -> int:
        return self.size

    def sync(self) -> tuple[int, int]:
        """Bring it to the disk; its size, and a checksum of its bytes."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.size, self.check

    def close(self) -> None:
        self.file.close()


class Kept:
    """Texts that take long to make: they are made once, and then read from where they were kept."""

    def __init__(self, make: Callable[[], Iterable[str]]) -> None:
        self.make, self.kept, self.is_all = make, tempfile.SpooledTemporaryFile(KEPT_IN_MEMORY), False  # noqa: SIM115

    def __del__(self) -> None:
        self.kept.close()

    def read(self) -> Iterator[str]:
        self.kept.seek(0)
        if self.is_all:
            yield from map(json.loads, self.kept)
            return
        for text in self.make():
            self.kept.write(json.dumps(text).encode() + b"\n")
            yield text
        self.is_all = True


def refuse_full_disk(folder: Path, need: int, what: str) -> None:
    """Refuse what needs so many bytes in a folder, with what it has already, where the disk has fewer."""
    need -= sum(file.stat().st_size for file in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise FailureError(
            f"{what} needs up to {need / 1e9:,.1f} GB in {str(folder.parent)!r}, and {free / 1e9:,.1f} GB are free; "
            "make room, or name a folder on another disk by SOME_CACHE"
        )

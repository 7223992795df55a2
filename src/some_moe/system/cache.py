"""Arrays that can be made again, kept in a folder: each file sealed, all bounded in sum, done without where need be.

Imports no torch.
"""

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from some_moe.errors import ConfigError
from some_moe.system.files import clear_scratch, is_stream, write_beside
from some_moe.system.progress import Say
from some_moe.system.reading import clean, read_tensors

LIMIT_GIB = "10"
NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
SECONDS_A_DAY = 86_400
Arrays = Mapping[str, Any]  # numpy's
T = TypeVar("T")


def cache_folder() -> Path:
    """Where prepared data is kept: $SOME_CACHE, or ~/.cache/some-moe."""
    try:
        return Path(os.environ.get("SOME_CACHE") or Path.home() / ".cache" / "some-moe")
    except RuntimeError:  # nobody's home: below a device nothing can be written, and so it is done without
        return Path(os.devnull) / "cache"


def cache_limit() -> float:
    """How many bytes the cache may have: $SOME_CACHE_LIMIT in GiB, or 10 GiB."""
    given = os.environ.get("SOME_CACHE_LIMIT") or LIMIT_GIB
    try:
        gib = float(given)
    except ValueError:
        gib = math.nan
    if not gib >= 0:
        raise ConfigError(f"SOME_CACHE_LIMIT {clean(given)!r} is not a size in GiB; give a number such as {LIMIT_GIB}")
    return gib * (1 << 30)


def file_of(wanted: str) -> Path:
    """The file for what is asked for by these words."""
    return cache_folder() / f"{hashlib.sha256(wanted.encode()).hexdigest()[:32]}.safetensors"


def seal(wanted: str, about: str, arrays: Arrays) -> str:
    """A hash of all that a file holds, and of what it was made for."""
    total = hashlib.sha256(f"{len(wanted)} {len(about)} {wanted}{about}".encode())
    for name, array in sorted(arrays.items()):
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(array.data if array.flags.c_contiguous else array.tobytes())
    return total.hexdigest()


def load(wanted: str, build: Callable[[Arrays, str], T], say: Say) -> T | None:
    """What `build` makes of the arrays and words that were stored; None where there are none, or not the same.

    `build` raises an error where they do not fit.
    """
    cache_limit()  # a wrong one is refused before the work, not after it
    file = file_of(wanted)
    try:
        arrays, words = read_tensors(file)
        if words["seal"] != seal(wanted, words["about"], arrays):
            raise ValueError("its seal is broken")
        built = build(arrays, words["about"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # whatever is wrong with it, it can be made again
        reason = error.strerror if isinstance(error, OSError) else "it is not what was stored"
        say(f"prepared data in {clean(str(file))} cannot be used ({reason}), and is made again")
        return None
    with suppress(OSError):
        os.utime(file)
    return built


def store(wanted: str, arrays: Arrays, about: str, label: Mapping[str, str]) -> None:
    """Keep arrays and words, and let go of what was not used for longest. label: what `list_entries` tells."""
    from safetensors.numpy import save_file

    file = file_of(wanted)
    with suppress(Exception):  # a cache that cannot be written is done without
        file.parent.mkdir(parents=True, exist_ok=True)
        clear_scratch(file.parent)
        if is_stream(file):
            file.unlink()  # it would be written through
        with write_beside(file) as scratch:
            save_file(dict(arrays), scratch, {**label, "about": about, "seal": seal(wanted, about, arrays)})
        _make_room(cache_limit(), file.name)


def _make_room(limit: float, newest: str) -> None:
    found = sorted(_find_files(), key=lambda entry: entry.stat().st_mtime, reverse=True)
    total = 0
    for entry in sorted(found, key=lambda entry: entry.name != newest):  # the one just written stays
        total += entry.stat().st_size
        if total > limit and entry.name != newest:
            with suppress(OSError):
                os.unlink(entry.path)


def _find_files() -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(cache_folder()) as entries:
        yield from (entry for entry in entries if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False))


@dataclass(frozen=True)
class Entry:
    """One file of the cache."""

    name: str
    source: str | None  # None: it cannot be read
    tokens: int | None
    bytes: int
    last_used: float  # seconds since 1970


def list_entries() -> list[Entry]:
    """What there is, the last used first."""
    found = []
    for entry in _find_files():
        size, used = entry.stat().st_size, entry.stat().st_mtime
        found.append(Entry(entry.name, *_read_label(entry.path), size, used))
    return sorted(found, key=lambda entry: -entry.last_used)


def _read_label(path: str) -> tuple[str | None, int | None]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            words: dict[str, Any] = file.metadata()
        return str(clean(words["source"])), int(words["tokens"])
    except Exception:
        return None, None


def clear(older_than_days: float = 0) -> list[Entry]:
    """Remove what was not used for so many days, and return it."""
    found = list_entries()
    latest = time.time() - older_than_days * SECONDS_A_DAY
    old = [entry for entry in found if not older_than_days or entry.last_used < latest]
    for entry in old:
        (cache_folder() / entry.name).unlink(missing_ok=True)
    if found:
        clear_scratch(cache_folder())
    return old

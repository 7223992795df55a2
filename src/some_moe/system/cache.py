"""Files that can be made again, in a folder for each thing that they were made for: sealed, bounded in sum.

A folder's about.json tells of the files beside it. It is written last, or, before a long making is done, now and then
without its seal: whoever makes the same again then goes on from there. Imports no torch.
"""

import hashlib
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from some_moe.errors import ConfigError
from some_moe.system.files import clear_scratch, remove_whole, write_whole
from some_moe.system.processes import take_lock
from some_moe.system.progress import Say, say_nothing
from some_moe.system.reading import clean, parse_json, read_text
from some_moe.system.streams import read_pieces

LIMIT_GIB = "10"
NAME = re.compile(r"[0-9a-f]{32}(\.safetensors)?")  # files are what older versions kept
ABOUT, LOCK = "about.json", "lock"
SECONDS_A_DAY = 86_400
WAIT_SECONDS = 0.2
About = dict[str, Any]  # "source", "tokens" and "files" (their names), and what those need to know who read them
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


def folder_of(wanted: str) -> Path:
    """The folder for what is asked for by these words."""
    return cache_folder() / hashlib.sha256(wanted.encode()).hexdigest()[:32]


def digest_files(folder: Path, names: list[str]) -> str:
    """A hash of the bytes of all files, end to end."""
    total = hashlib.sha256()
    for name in names:
        for piece in read_pieces(folder / Path(name).name, unpacked=False):
            total.update(piece)
    return total.hexdigest()


def seal(wanted: str, about: About) -> str:
    """A hash of what files were made for, and of all that is told of them."""
    told = json.dumps({name: value for name, value in about.items() if name != "seal"}, sort_keys=True)
    return hashlib.sha256(f"{len(wanted)} {wanted}{told}".encode()).hexdigest()


def obtain(
    wanted: str,
    build: Callable[[Path, About], T],
    make: Callable[[Path, About, Callable[[About], None]], About],
    say: Say,
) -> T:
    """What `build` makes of the files that are there; where there are none that can be used, `make` makes them first.

    `build` gets their folder and what is told of them, and raises an error where they do not fit. `make` gets a folder,
    what was told last of files that were not finished, and a function that tells of such files.
    """
    cache_limit()  # a wrong one is refused before the work, not after it
    found = _load(wanted, build, say)
    if found is not None:
        return found
    with _own_folder(folder_of(wanted), say) as folder:
        found = _load(wanted, build, say_nothing)  # another process may have made it just now
        if found is not None:
            return found

        def save(about: About) -> None:
            write_whole(folder / ABOUT, json.dumps(about | {"seal": seal(wanted, about)}))

        about = make(folder, _read_half(wanted, folder), lambda half: save(half | {"is_half": True}))
        about["digest"] = digest_files(folder, about["files"])
        save(about)
        built = build(folder, about)
        with suppress(OSError):
            _make_room(cache_limit(), folder.name)
    return built


def _load(wanted: str, build: Callable[[Path, About], T], say: Say) -> T | None:
    folder = folder_of(wanted)
    try:
        about = parse_json(read_text(folder / ABOUT))
        if "is_half" in about:
            return None
        if about["seal"] != seal(wanted, about) or about["digest"] != digest_files(folder, about["files"]):
            raise ValueError("its seal is broken")
        built = build(folder, about)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # whatever is wrong with it, it can be made again
        reason = error.strerror if isinstance(error, OSError) else "it is not what was stored"
        say(f"prepared data in {clean(str(folder))} cannot be used ({reason}), and is made again")
        return None
    with suppress(OSError):
        os.utime(folder)
    return built


def _read_half(wanted: str, folder: Path) -> About:
    """What was told last of files that were not finished; nothing where they cannot be gone on with."""
    try:
        about = parse_json(read_text(folder / ABOUT))
        return about if about["is_half"] and about["seal"] == seal(wanted, about) else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


@contextmanager
def _own_folder(folder: Path, say: Say) -> Iterator[Path]:
    """The folder, once no other process writes to it; where it cannot be written, another, for this use alone."""
    waited, lock = False, None
    while lock is None:
        try:
            with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                folder.unlink()  # a link, or whatever is no folder
            folder.mkdir(parents=True, exist_ok=True)
            clear_scratch(folder.parent)
            lock = _lock(folder)
        except (OSError, ValueError, NotImplementedError):
            break  # full or read-only, a name that cannot be, no locks: the work goes on without what is kept
        if lock is None:
            if not waited:
                say("another process is preparing the same data; waiting for it …")
            waited = True
            time.sleep(WAIT_SECONDS)
    if lock is None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    try:
        yield folder
    finally:
        lock.release()


def _lock(folder: Path) -> Any:
    """The folder's lock; None where another process has it, or has removed the folder just now."""
    try:
        lock = take_lock(folder / LOCK, "")
    except (ConfigError, FileNotFoundError):
        return None
    if (folder / LOCK).exists():
        return lock
    lock.release()
    return None


def _make_room(limit: float, newest: str) -> None:
    found = sorted(_find(), key=lambda entry: entry.stat().st_mtime, reverse=True)
    total = 0
    for entry in sorted(found, key=lambda entry: entry.name != newest):  # the one just written stays
        total += _count_bytes(entry)
        if total > limit and entry.name != newest:
            with suppress(OSError):
                _remove(Path(entry.path))


def _find() -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(cache_folder()) as entries:
        for entry in entries:
            found = NAME.fullmatch(entry.name)
            if found and (entry.is_file if found[1] else entry.is_dir)(follow_symlinks=False):
                yield entry


def _count_bytes(entry: os.DirEntry[str]) -> int:
    if entry.is_file(follow_symlinks=False):
        return entry.stat().st_size
    with os.scandir(entry.path) as inner:
        return sum(one.stat(follow_symlinks=False).st_size for one in inner)


def _remove(path: Path) -> bool:
    """Remove what is kept, unless a process is making it now."""
    lock = _lock(path) if path.is_dir() else None
    if lock is None and path.is_dir():
        return False
    remove_whole(path)
    if lock is not None:
        lock.release()
    return True


@dataclass(frozen=True)
class Entry:
    """What was made for one purpose."""

    name: str
    source: str | None  # None: it cannot be read
    tokens: int | None
    bytes: int
    last_used: float  # seconds since 1970
    is_whole: bool  # or half-made, and gone on with when it is needed


def list_entries() -> list[Entry]:
    """What there is, the last used first."""
    found = []
    for entry in _find():
        source, tokens, is_whole = _read_label(Path(entry.path))
        found.append(Entry(entry.name, source, tokens, _count_bytes(entry), entry.stat().st_mtime, is_whole))
    return sorted(found, key=lambda entry: -entry.last_used)


def _read_label(path: Path) -> tuple[str | None, int | None, bool]:
    try:
        about = parse_json(read_text(path / ABOUT))
        return str(clean(about["source"])), int(about["tokens"]), "is_half" not in about
    except FileNotFoundError:
        return None, None, False
    except Exception:
        return None, None, True


def clear(older_than_days: float = 0) -> list[Entry]:
    """Remove what was not used for so many days, and return it; what a process is making now stays."""
    found = list_entries()
    latest = time.time() - older_than_days * SECONDS_A_DAY
    old = [entry for entry in found if not older_than_days or entry.last_used < latest]
    removed = [entry for entry in old if _remove(cache_folder() / entry.name)]
    if found:
        clear_scratch(cache_folder())
    return removed

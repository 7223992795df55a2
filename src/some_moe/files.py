"""Files that are there whole or not at all, whenever the program or the machine stops. Imports no torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_beside(path: Path) -> Iterator[Path]:
    """Give a scratch file beside `path` to write to; then bring it to the disk and rename it into place.

    Where anything fails on the way, the scratch file is removed, and what `path` held before stays.
    """
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        yield scratch
        # Renamed first, a file could be found empty after a power cut.
        sync(scratch)
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise


def write_whole(path: Path, contents: str | bytes) -> None:
    """Write a small file, text as UTF-8."""
    with write_beside(path) as scratch:
        scratch.write_bytes(contents.encode() if isinstance(contents, str) else contents)

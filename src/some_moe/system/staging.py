"""Places to write: within a folder through no link out of it, and folders whose files are renewed all together."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from some_moe.errors import MACHINE, ConfigError, FailureError
from some_moe.system.files import clear_scratch, inside, name_scratch
from some_moe.system.reading import clean, refuse_irregular


@contextmanager
def writing(path: Path, cure: str = "choose another place") -> Iterator[None]:
    """Where something cannot be written, say so in one sentence."""
    try:
        yield
    except BrokenPipeError:  # whoever reads what is printed has gone
        raise
    except OSError as error:
        sentence = f"{clean(str(path))!r} cannot be written ({error.strerror or error})"
        if error.errno in MACHINE:
            raise FailureError(f"{sentence}; make room, and run it again") from None
        raise ConfigError(f"{sentence}; {cure}") from None


def own_place(folder: Path, name: str) -> Path:
    """A file of the folder that is to be written: no link leads out, and no pipe waits for a reader."""
    path = inside(folder, name)
    if path.exists():
        refuse_irregular(path)
    return path


@contextmanager
def stage(folder: Path, cure: str) -> Iterator[Path]:
    """A scratch folder within the one that `publish` then brings its files to."""
    with writing(folder, cure):
        folder.mkdir(parents=True, exist_ok=True)
        clear_scratch(folder)
        scratch = name_scratch(folder / "new")
        shutil.rmtree(scratch, ignore_errors=True)  # of a process of the same number
        scratch.mkdir()
    try:
        with writing(folder, cure):
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish(scratch: Path, folder: Path, *, last: str = "", outdated: tuple[str, ...] = ()) -> None:
    """Let staged files take the places of older ones: names alone change, so that a full disk leaves no mixture.

    last: the file that tells of the others. outdated: patterns of older files that go where no new one replaces them.
    Links are replaced or removed, never followed.
    """
    with writing(folder):
        new = [file.relative_to(scratch) for file in scratch.rglob("*") if file.is_file()]
        for file in sorted(new, key=lambda file: file.name == last):
            inside(folder, file.parent).mkdir(exist_ok=True)
            os.replace(scratch / file, folder / file)
        for file in [file for pattern in outdated for file in folder.glob(pattern)]:
            if file.relative_to(folder) not in new:
                file.unlink()

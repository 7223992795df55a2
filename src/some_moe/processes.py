"""Other processes of this program: locks between them, and children that import nothing from the current folder."""

import os
import sys
import warnings
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from some_moe.errors import ConfigError


def take_lock(file: Path, refusal: str) -> BaseFileLock:
    """Lock a file, made where it is missing; `release`, or the end of the process, unlocks. The file stays.

    Where another process holds it, `refusal` is raised.
    """
    lock = FileLock(file, timeout=0, mode=0o644, thread_local=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where the file system has no locks, the file's being there is the lock
            lock.acquire()
    except Timeout:
        raise ConfigError(refusal) from None
    return lock


def python_command(*words: str) -> list[str]:
    """Start Python so that no file of the current folder is taken for a module."""
    return [sys.executable, "-P", *words]


def python_environment() -> dict[str, str]:
    """The environment for `python_command`: it finds the modules that this process finds."""
    here = os.path.realpath(os.curdir)
    package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    places = [place for place in sys.path if place and (os.path.realpath(place) != here or package == here)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(places)}

"""A lock on a folder that the system gives back whenever its process ends, however it ends."""

import os
from pathlib import Path

from some_moe.config import ConfigError


def take_lock(file: Path, refusal: str) -> int:
    """Lock a file, made where it is missing, and return its descriptor: closing that gives the lock back.

    Where another process holds it, `refusal` is raised. The file stays: one that were removed could be held twice.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(refusal) from None
    except (ImportError, OSError):
        pass  # Windows, and a file system without locks, cannot say who else is there
    return lock

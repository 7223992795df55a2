"""Processes: locks between them, how they are asked to end, and children that import nothing from where they are."""

import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from filelock import BaseFileLock, FileLock, Timeout

from some_moe.errors import ConfigError

ECHO_SECONDS = 2.0  # a signal that follows the first so soon is the same one, passed on


def take_lock(file: Path, refusal: str, timeout: float = 0) -> BaseFileLock:
    """Lock a file, made where it is missing; `release`, or the end of the process, unlocks. The file stays.

    Where another process holds it, for longer than `timeout` seconds, `refusal` is raised.
    """
    lock = FileLock(file, timeout=timeout, mode=0o644, thread_local=False)
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
    here, package = os.path.realpath(os.curdir), str(Path(__file__).resolve().parents[2])
    places = [place for place in sys.path if place and (os.path.realpath(place) != here or package == here)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, places))}  # the child may stand elsewhere


def quote_command(words: Sequence[str]) -> str:
    """A command as it can be pasted into a shell."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def list_endings() -> list[int]:
    """The signals that ask a process to save and end: Ctrl-C, a polite kill, a terminal that closes, and the two by
    which a cluster tells that the time is over. One that is ignored, as by nohup, stays so; Windows has but two."""
    names = ("SIGHUP", "SIGUSR1", "SIGUSR2")
    others = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [signal.SIGINT, signal.SIGTERM, *(one for one in others if signal.getsignal(one) != signal.SIG_IGN)]


class Interrupts:
    """Ctrl-C, a polite kill and the like are noted, for a loop to stop after its present step.

    A second Ctrl-C stops it now, as a KeyboardInterrupt; more change nothing, nor do other signals: a cluster sends
    several, and whoever started this process may pass one on. launched: by torchrun, which sends its processes what the
    terminal has sent them already.
    """

    def __init__(self, say: Callable[[str], None], *, launched: bool = False) -> None:
        self.say, self.echo_seconds = say, ECHO_SECONDS if launched else 0.0
        self.noted = False  # whether any signal has come
        self.pressed: float | None = None  # when the first Ctrl-C came
        self.at_once = False  # whether a second has come
        self.previous: dict[int, Any] = {}

    def note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        now, noted, self.noted = time.monotonic(), self.noted, True
        if not noted:
            with suppress(OSError):  # the terminal may be gone
                self.say("stopping after this step; press Ctrl-C again to stop at once")
        if number != signal.SIGINT:
            return
        if self.pressed is None:
            self.pressed = now
        elif now - self.pressed >= self.echo_seconds and not self.at_once:
            self.at_once = True
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        try:
            self.previous = {number: signal.signal(number, self.note) for number in list_endings()}
        except ValueError:
            self.previous = {}  # not in the main thread: signals belong to somebody else
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def git_commit() -> str | None:
    """The commit of the source that runs, with + where it has changes; None outside a checkout."""
    here = Path(__file__).parents[1]
    try:
        # Installed inside another project's repository, it is no file of that project's commits.
        subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "."], cwd=here, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.returncode else "")

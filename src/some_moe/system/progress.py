"""Words for whoever waits while data is prepared, and an ear for Ctrl-C meanwhile."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Say = Callable[[str], None]
Track = Callable[[str, int, int], None]  # what is being done, how much of it, and of how much
T = TypeVar("T")
PATIENCE_SECONDS = 1.0  # what takes no longer is done without a word
LISTEN_SECONDS = 0.2


def say_nothing(text: str) -> None:
    """For those who do not want to hear."""


def track_nothing(text: str, done: int, total: int) -> None:
    """For those who do not want to see."""


@contextmanager
def tracked(track: Track) -> Iterator[None]:
    """Whatever happens within, whoever tracks it is told of its end."""
    try:
        yield
    finally:
        track("", 0, 0)


@contextmanager
def announce(say: Say, text: str) -> Iterator[None]:
    """Say what is being done, unless it is done soon."""
    timer = threading.Timer(PATIENCE_SECONDS, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def listen(work: Callable[[], T]) -> T:
    """What `work` returns. Libraries that compute for long without Python are deaf to Ctrl-C; this thread is not."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LISTEN_SECONDS)
    if failed:
        raise failed[0]
    return done[0]

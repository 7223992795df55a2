"""How a run is asked to end before its time: signals that wait for the present step."""

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

ECHO_SECONDS = 2.0  # a signal that follows the first so soon is the same one, passed on


class Interrupts:
    """Ctrl-C and a polite kill are noted, for the loop to stop after the present step; a second one stops it now.

    launched: by torchrun, which sends its processes what the terminal has sent them already.
    """

    def __init__(self, say: Callable[[str], None], *, launched: bool = False) -> None:
        self.say, self.echo_seconds = say, ECHO_SECONDS if launched else 0.0
        self.first: float | None = None  # when the first signal came
        self.previous: dict[int, Any] = {}

    @property
    def noted(self) -> bool:
        return self.first is not None

    def note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        now = time.monotonic()
        if self.first is None:
            self.first = now
            self.say("stopping after this step; press Ctrl-C again to stop at once")
        elif now - self.first >= self.echo_seconds:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        try:
            self.previous = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:
            self.previous = {}  # not in the main thread: signals belong to somebody else
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

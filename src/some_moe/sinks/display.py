"""What a person sees while a model trains."""

import time
from contextlib import suppress
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from some_moe.system.progress import PATIENCE_SECONDS

SILENCE_SECONDS = 10.0  # at most, while data is prepared


class Display:
    """A live bar on a terminal, a plain line for each logged step elsewhere, or nothing where it does not speak."""

    first_step, total_steps, begun, spoke, tracked = 0, 0, 0.0, 0.0, ""
    is_heard, is_live = False, False

    def __init__(self, *, speaks: bool = False) -> None:
        console = Console()
        self.is_heard, self.is_live = speaks, speaks and console.is_terminal
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
        self.progress = Progress("{task.description}", *columns, TimeRemainingColumn(compact=True), console=console)
        self.task = self.progress.add_task("training", total=None, figures="")

    def __enter__(self) -> Self:
        if self.is_live:
            self.progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self.is_live:
            with suppress(OSError):  # the terminal may have been closed
                self.progress.stop()

    def begin(self, step: int, total_steps: int) -> None:
        """Training goes from `step` to `total_steps`."""
        self.first_step, self.total_steps, self.begun = step, total_steps, time.monotonic()
        if self.is_live:
            self.progress.reset(self.task, total=total_steps, completed=step, figures="", description="training")

    def track(self, text: str, done: int, total: int) -> None:
        """So many bytes of so many are done, before training begins; without a text, that is all."""
        if text != self.tracked:
            if self.tracked:
                self.__exit__()
            self.tracked, self.first_step, self.begun, self.spoke = text, done, time.monotonic(), time.monotonic()
        waited = time.monotonic() - self.spoke
        if text and self.is_live and waited > PATIENCE_SECONDS:
            self.__enter__()
            self.progress.update(self.task, description=text, completed=done // 10**6, total=total // 10**6 or 1)
        elif text and self.is_heard and not self.is_live and waited > SILENCE_SECONDS:
            self.spoke = time.monotonic()
            left = self.estimate(done - self.first_step, total - done)
            self.say(f"{text}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB{left}")

    def advance(self, step: int) -> None:
        """One step is done."""
        if self.is_live:
            self.progress.update(self.task, completed=step)

    def show(self, step: int, loss: float, tokens_per_second: float, gini: float | None) -> None:
        """The figures of a logged step; gini: of the middle layer."""
        usage = "" if gini is None else f"  gini {gini:.3f}"
        figures = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s{usage}"
        if self.is_live:
            self.progress.update(self.task, figures=figures)
        elif self.is_heard:
            self.say(f"step {step}/{self.total_steps}  {figures}{self.time_left(step)}")

    def time_left(self, step: int) -> str:
        """How long the other steps take at the pace of those so far; "" where there is none yet, or none left."""
        return self.estimate(step - self.first_step, self.total_steps - step)

    def estimate(self, done: int, left: int) -> str:
        if done < 1 or left < 1:
            return ""
        seconds = round((time.monotonic() - self.begun) / done * left)
        return f"  {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"

    def say(self, text: str) -> None:
        """A line that stays."""
        try:
            if self.is_live:
                self.progress.console.print(text, highlight=False, markup=False)
            elif self.is_heard:
                print(text, flush=True)
        except OSError:
            self.is_heard = self.is_live = False  # the reader has gone, as with `| head`: training goes on without it

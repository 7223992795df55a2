"""What a person sees while a model trains: a live bar on a terminal, plain lines in a pipe, or nothing."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Says nothing. The base of the two that do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def begin(self, step: int, total_steps: int) -> None:
        """Training goes from `step` to `total_steps`."""

    def advance(self, step: int) -> None:
        """One step is done."""

    def show(self, step: int, loss: float, tokens_per_second: float, gini: float | None) -> None:
        """The figures of a logged step."""

    def say(self, text: str) -> None:
        """A line that stays."""


class PlainDisplay(Display):
    """One line per logged step, for pipes and log files."""

    def __init__(self) -> None:
        self.total_steps = 0
        self.is_heard = True

    def begin(self, step: int, total_steps: int) -> None:  # noqa: ARG002
        self.total_steps = total_steps

    def show(self, step: int, loss: float, tokens_per_second: float, gini: float | None) -> None:
        usage = "" if gini is None else f"  gini {gini:.3f}"
        self.say(f"step {step}/{self.total_steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s{usage}")

    def say(self, text: str) -> None:
        if not self.is_heard:
            return
        try:
            print(text, flush=True)
        except OSError:
            self.is_heard = False  # the reader has gone, as with `| head`: training goes on without it


class LiveDisplay(Display):
    """A progress bar with loss, speed, gini of the middle layer and the time left."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self.task = self.progress.add_task("training", total=None, figures="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.progress.stop()

    def begin(self, step: int, total_steps: int) -> None:
        self.progress.reset(self.task, total=total_steps, completed=step, figures="")

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def show(self, step: int, loss: float, tokens_per_second: float, gini: float | None) -> None:  # noqa: ARG002
        usage = "" if gini is None else f"  gini {gini:.2f}"
        self.progress.update(self.task, figures=f"loss {loss:.3f}  {tokens_per_second:,.0f} tok/s{usage}")

    def say(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False)


def choose_display() -> Display:
    console = Console()
    return LiveDisplay(console) if console.is_terminal else PlainDisplay()

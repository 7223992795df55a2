"""What analyze, trace and report return: plain data, the paths that were written, and how both are shown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from some_moe.glass.page.blocks import Block, Code
from some_moe.glass.page.render import render_fragment
from some_moe.layout import Style

PLAIN = Style()


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """One look into a run. `str()` gives what the command prints; a notebook shows tables and figures."""

    title: str  # what it is, in a few words
    findings: dict[str, Any]  # plain data, ready for JSON
    paths: tuple[Path, ...]  # what was written
    blocks: Sequence[Block]  # what a notebook shows under the title
    text: Callable[[int | None, Style], str]  # what the command prints, for a width and a style

    def format(self, *, width: int | None = None, style: Style = PLAIN) -> str:
        """The text that the command prints, no wider than `width`."""
        return self.text(width, style)

    def __str__(self) -> str:
        return self.format()

    def __repr__(self) -> str:
        places = ", ".join(map(str, self.paths)) or "nothing written"
        return f"<Result {self.title!r}: {places}>"

    def _repr_html_(self) -> str:
        written = [Code("\n".join(map(str, self.paths)))] if self.paths else []
        return render_fragment(self.title, [*self.blocks, *written])

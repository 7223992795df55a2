"""What analyze, trace and report return: plain data, the paths that were written, and how both are shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from some_moe.glass.page.blocks import Block, Code, TraceView
from some_moe.glass.page.render import render_fragment
from some_moe.glass.page.terminal import format_blocks, make_trace_table
from some_moe.layout import Style, wrap
from some_moe.system.reading import clean

PLAIN = Style()
SHOWN_TOKENS = 200  # of a trace in a notebook


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """One look into a run. `str()` gives what the command prints; a notebook shows tables and figures."""

    title: str  # what it is, in a few words
    findings: dict[str, Any]  # plain data, ready for JSON
    paths: tuple[Path, ...]  # what was written
    blocks: Sequence[Block]  # what is shown under the title
    notebook: Sequence[Block] = ()  # what a notebook alone shows

    def format(self, *, width: int | None = None, style: Style = PLAIN) -> str:
        """The text that the command prints, no wider than `width`."""
        title = wrap(str(clean(self.title)), width=width or 10_000)
        lines = [*map(style.bold, title), *format_blocks(self.blocks, width=width, style=style)]
        lines += ["", *map(clean, map(str, self.paths))] if self.paths else []
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.format()

    def __repr__(self) -> str:
        places = ", ".join(map(str, self.paths)) or "nothing written"
        return f"<Result {self.title!r}: {places}>"

    def _repr_html_(self) -> str:
        written = [Code("\n".join(map(str, self.paths)))] if self.paths else []
        blocks = [*self.blocks, *self.notebook, *written]
        still = [make_trace_table(one.trace, SHOWN_TOKENS) if isinstance(one, TraceView) else one for one in blocks]
        return render_fragment(self.title, still)

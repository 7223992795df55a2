"""What analyze, trace and report return: plain data, the paths that were written, and how both are shown."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from some_moe.glass.inspect.traces import Trace
from some_moe.glass.page.blocks import Block, Code, Figure, Fold, Gallery, Notice, Page, Text
from some_moe.glass.page.findings_table import describe_guilds, describe_pass, format_findings, make_layer_table
from some_moe.glass.page.render import render_fragment
from some_moe.glass.page.trace_text import format_trace, make_trace_table
from some_moe.layout import Style

SHOWN_TOKENS = 200  # of a trace in a notebook
PLAIN = Style()


@dataclass(frozen=True, kw_only=True, repr=False)
class Result(ABC):
    """One look into a run. `str()` gives what the command prints; a notebook shows tables."""

    findings: dict[str, Any]  # plain data, ready for JSON
    paths: tuple[Path, ...]  # what was written, the most telling first

    @property
    @abstractmethod
    def title(self) -> str:
        """What this is, in a few words."""

    @abstractmethod
    def format(self, *, width: int | None = None, style: Style = PLAIN) -> str:
        """The text that the command prints, no wider than `width`."""

    @abstractmethod
    def make_blocks(self) -> Sequence[Block]:
        """What a notebook shows of it, under the title."""

    def __str__(self) -> str:
        return self.format()

    def __repr__(self) -> str:
        places = ", ".join(map(str, self.paths)) or "nothing written"
        return f"<{type(self).__name__} {self.title!r}: {places}>"

    def _repr_html_(self) -> str:
        written = [Code("\n".join(map(str, self.paths)))] if self.paths else []
        return render_fragment(self.title, [*self.make_blocks(), *written])


@dataclass(frozen=True, kw_only=True, repr=False)
class CollectionResult(Result):
    """A run that was replayed and not yet drawn. findings: the step, the split, the loss and the like."""

    @property
    def title(self) -> str:
        meta = self.findings
        return f"step {meta['step']:,} on {meta['num_tokens']:,} tokens of {meta['split']}: loss {meta['loss']:.4f}"

    def format(self, *, width: int | None = None, style: Style = PLAIN) -> str:  # noqa: ARG002
        return "\n".join([self.title, *self.findings["notes"], *map(str, self.paths)]) + "\n"

    def make_blocks(self) -> Sequence[Block]:
        return [Notice(note) for note in self.findings["notes"]]


@dataclass(frozen=True, kw_only=True, repr=False)
class AnalysisResult(Result):
    """A run looked into. findings: what analysis.json holds, with the guilds in a few numbers under "guilds"."""

    @property
    def title(self) -> str:
        return describe_pass(self.findings)

    def format(self, *, width: int | None = None, style: Style = PLAIN) -> str:
        return format_findings(self.findings, self.paths, width=width, style=style)

    def make_blocks(self) -> Sequence[Block]:
        found = self.findings
        blocks: list[Block] = [make_layer_table(found)] if found["layers"] else []
        if "guilds" in found:
            blocks.append(Text(describe_guilds(found["guilds"])))
        blocks += [Notice(sentence) for sentence in found["missing"]]
        folder = self.paths[0].parent
        figures = [Figure(folder / one["png"], one["title"], one["caption"]) for one in found["figures"]]
        figures = [figure for figure in figures if figure.file.is_file()]
        return [*blocks, Fold(f"{len(figures)} figures", [Gallery(figures)])] if figures else blocks


@dataclass(frozen=True, kw_only=True, repr=False)
class TraceResult(Result):
    """The path of every token of a text. findings: the trace as plain data; `trace` is the same as an object."""

    trace: Trace

    @property
    def title(self) -> str:
        return f"{self.trace.run}, step {self.trace.step:,}: {len(self.trace.tokens)} tokens"

    def format(self, *, width: int | None = None, style: Style = PLAIN) -> str:
        pages = [f"\nas a page: {path}\n" for path in self.paths]
        return "".join([format_trace(self.trace, width=width, style=style), *pages])

    def make_blocks(self) -> Sequence[Block]:
        return [make_trace_table(self.trace, SHOWN_TOKENS)]


@dataclass(frozen=True, kw_only=True, repr=False)
class ReportResult(Result):
    """A page and its Markdown twin. findings: the final figures of every run, and what is missing."""

    page: Page
    num_bytes: int  # of the page

    @property
    def title(self) -> str:
        return f"{self.page.kicker}: {self.page.title}"

    def format(self, *, width: int | None = None, style: Style = PLAIN) -> str:  # noqa: ARG002
        html, markdown = self.paths
        return f"{html} ({self.num_bytes / 1e6:.1f} MB), and {markdown}\n"

    def make_blocks(self) -> Sequence[Block]:
        return [Text(self.page.summary), *self.page.sections[0].blocks]

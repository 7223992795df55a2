"""What a page is made of. A page is built once, from these parts, and written twice: as HTML and as Markdown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from some_moe.glass.inspect.traces import Trace
from some_moe.layout import Column


class Block:
    """One part of a page."""

    @property
    def kind(self) -> str:
        """What a template knows it by."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Text(Block):
    """A paragraph. Words between backticks are set as code; nothing else is markup."""

    text: str


@dataclass(frozen=True)
class Notice(Block):
    """A sentence that stands out: something is missing, or must be read with care."""

    text: str


@dataclass(frozen=True)
class Number:
    """One headline figure."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Numbers(Block):
    """The figures that a reader looks for first."""

    items: Sequence[Number]


@dataclass(frozen=True)
class Table(Block):
    """Rows of short texts under named columns."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Facts(Block):
    """Names and values, in no need of a header."""

    pairs: Sequence[tuple[str, str]]
    title: str = ""


@dataclass(frozen=True)
class Figure(Block):
    """An image file with its caption; HTML takes the file in, Markdown points to it."""

    file: Path
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Gallery(Block):
    """Figures side by side, where there is room."""

    figures: Sequence[Figure]


@dataclass(frozen=True)
class Frame(Block):
    """A page of its own, shown within this one."""

    file: Path
    title: str


@dataclass(frozen=True)
class Story(Block):
    """A text that a model wrote, or read."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class Code(Block):
    """Text to be shown letter by letter."""

    text: str


@dataclass(frozen=True)
class TraceView(Block):
    """A trace that can be explored; a table of its first tokens where nothing can move."""

    trace: Trace


@dataclass(frozen=True)
class Card:
    """One guild: what it is said to be, the evidence, and what the evidence is worth."""

    title: str
    verdict: str
    tone: str  # good, bad or open: how the verdict is coloured, beside its word
    subtitle: str
    experts: Sequence[int]
    reason: str
    evidence: Table
    words: Sequence[tuple[str, int]]
    excerpts: Sequence[tuple[str, str, str]]  # a word, between what stood before and after it


@dataclass(frozen=True)
class Cards(Block):
    """Guilds side by side."""

    items: Sequence[Card]


@dataclass(frozen=True)
class Fold(Block):
    """Parts that are there for who asks."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """One heading and what stands under it."""

    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str
    kicker: str  # a few words above the title
    summary: str  # a sentence under it
    sections: Sequence[Section]

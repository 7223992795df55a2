"""What a page is made of. A page is built once, from these parts, and written twice: as HTML and as Markdown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from some_moe.glass.inspect.traces import Trace
from some_moe.layout import Column


@dataclass(frozen=True)
class Text:
    """A paragraph. Words between backticks are set as code; nothing else is markup."""

    kind: ClassVar = "text"
    text: str


@dataclass(frozen=True)
class Notice:
    """A sentence that stands out: something is missing, or must be read with care."""

    kind: ClassVar = "notice"
    text: str


@dataclass(frozen=True)
class Number:
    """One headline figure."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Numbers:
    """The figures that a reader looks for first."""

    kind: ClassVar = "numbers"
    items: Sequence[Number]


@dataclass(frozen=True)
class Table:
    """Rows of short texts under named columns."""

    kind: ClassVar = "table"
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Facts:
    """Names and values, in no need of a header."""

    kind: ClassVar = "facts"
    pairs: Sequence[tuple[str, str]]
    title: str = ""


@dataclass(frozen=True)
class Figure:
    """An image file with its caption; HTML takes the file in, Markdown points to it."""

    kind: ClassVar = "figure"
    file: Path
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Gallery:
    """Figures side by side, where there is room."""

    kind: ClassVar = "gallery"
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Frame:
    """A page of its own, shown within this one."""

    kind: ClassVar = "frame"
    file: Path
    title: str


@dataclass(frozen=True)
class Story:
    """A text that a model wrote, or read."""

    kind: ClassVar = "story"
    text: str
    note: str = ""


@dataclass(frozen=True)
class Code:
    """Text to be shown letter by letter."""

    kind: ClassVar = "code"
    text: str


@dataclass(frozen=True)
class TraceView:
    """A trace that can be explored; a table of its first tokens where nothing can move."""

    kind: ClassVar = "trace"
    trace: Trace


@dataclass(frozen=True)
class Excerpt:
    """A word with what stood around it."""

    before: str
    word: str
    after: str


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
    excerpts: Sequence[Excerpt]


@dataclass(frozen=True)
class Cards:
    """Guilds side by side."""

    kind: ClassVar = "cards"
    items: Sequence[Card]


@dataclass(frozen=True)
class Fold:
    """Parts that are there for who asks."""

    kind: ClassVar = "fold"
    summary: str
    blocks: "Sequence[Block]"


Block = Text | Notice | Numbers | Table | Facts | Figure | Gallery | Frame | Story | Code | TraceView | Cards | Fold


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

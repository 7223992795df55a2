"""What a page is made of. It is built once, from these parts, and written as HTML, as Markdown and for a terminal."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from some_moe.glass.inspect.traces import Trace
from some_moe.layout import ABSENT, Column, make_table

Record = dict[str, Any]


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


class Notice(Text):
    """A sentence that stands out: something is missing, or must be read with care."""


class Code(Text):
    """Text to be shown letter by letter."""


@dataclass(frozen=True)
class Story(Text):
    """A text that a model wrote, or read."""

    note: str = ""


class Number(NamedTuple):
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

    @classmethod
    def of(cls, columns: Sequence[Column], records: Sequence[Record], caption: str = "") -> "Table":
        """A row a record; columns that no record fills are left out."""
        return cls(*make_table(columns, records, silence=ABSENT), caption)


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
class Svg(Block):
    """A drawing that is part of the page itself; Markdown leaves it out, and keeps its caption."""

    markup: Any  # markupsafe.Markup: whoever draws has escaped every text in it
    caption: str = ""


@dataclass(frozen=True)
class Gallery(Block):
    """Figures side by side, where there is room."""

    figures: Sequence[Figure]


@dataclass(frozen=True)
class Frame(Block):
    """A page of its own, shown within this one; Markdown points to its file."""

    page: str
    file: Path
    title: str


@dataclass(frozen=True)
class TraceView(Block):
    """A trace that can be explored; a table of its first tokens where nothing can move."""

    trace: Trace


class Card(NamedTuple):
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


class Section(NamedTuple):
    """One heading and what stands under it."""

    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


class Page(NamedTuple):
    """A whole page."""

    title: str
    kicker: str  # a few words above the title
    summary: str  # a sentence under it
    sections: Sequence[Section]

"""Text for a terminal or a file: numbers, tables, grids and wrapped paragraphs, as plain strings.

Written out here because a listing must answer at once, and a table library takes longer to load than to use.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import zip_longest
from typing import Any, NamedTuple

ABSENT = "–"
GAP = "  "
NARROWEST_TEXT = 12


def format_number(value: float | Decimal | None, form: str = "", unit: str = "", *, absent: str = ABSENT) -> str:
    """A number in a format of Python's, such as ",.2f", and its unit; what `absent` says where there is none."""
    return absent if value is None else format(value, form) + unit


@dataclass(frozen=True)
class Style:
    """Emphasis for a terminal; plain where `on` is false."""

    on: bool = False

    def bold(self, text: str) -> str:
        return f"\033[1m{text}\033[0m" if self.on and text else text

    def dim(self, text: str) -> str:
        return f"\033[2m{text}\033[0m" if self.on and text else text

    def paint(self, text: str, color: int) -> str:
        """Text in one of a terminal's 256 colours."""
        return f"\033[38;5;{color}m{text}\033[0m" if self.on and text else text


@dataclass(frozen=True)
class Column:
    """One column of a table: its header, what it says of a record, and whether it holds numbers (right-aligned) or may
    be wrapped."""

    header: str
    say: Callable[[Any], str] = str
    numeric: bool = False
    wraps: bool = False


def text_column(header: str, name: str, *, wraps: bool = False) -> Column:
    """What a record says under `name`."""
    return Column(header, lambda record: str(record[name]), wraps=wraps)


def number_column(header: str, name: str, form: str = "", unit: str = "", *, absent: str = ABSENT) -> Column:
    """The number that a record has under `name`, written as `format_number` does."""
    return Column(header, lambda record: format_number(record.get(name), form, unit, absent=absent), numeric=True)


def number_columns(**forms: str) -> tuple[Column, ...]:
    """Numbers that a record has under these names, in these formats; headers are the names without num_, in words."""
    headers = {name: name.removeprefix("num_").replace("_", " ") for name in forms}
    return tuple(number_column(headers[name], name, form) for name, form in forms.items())


class Table(NamedTuple):
    """Columns and the text of their cells, row by row."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]


def make_table(columns: Sequence[Column], records: Sequence[Any], *, silence: str = "") -> Table:
    """A row for each record; a column that says nothing but `silence` is left out."""
    filled = [(column, [column.say(record) for record in records]) for column in columns]
    filled = [(column, texts) for column, texts in filled if not texts or set(texts) - {silence}]
    return Table([column for column, _ in filled], list(zip(*(texts for _, texts in filled), strict=True)))


def format_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int | None, style: Style, indent: str = ""
) -> list[str]:
    """Return a table's lines: a header, then the rows; columns that wrap give way where `width` is short."""
    heads = [column.header for column in columns]
    widths = [max(len(cell) for cell in cells) for cells in zip(heads, *rows, strict=True)]
    if width is not None and len(indent) + sum(widths) + len(GAP) * (len(widths) - 1) > width:
        # First the headers give way, which may stand on several lines.
        words = [max(head.split() or [""], key=len) for head in heads]
        widths = [max(len(cell) for cell in cells) for cells in zip(words, *rows, strict=True)]
        for number, column in enumerate(columns):
            if column.wraps:
                excess = len(indent) + sum(widths) + len(GAP) * (len(widths) - 1) - width
                widths[number] = max(NARROWEST_TEXT, widths[number] - max(0, excess))
    headers = [replace(column, wraps=True) for column in columns]
    lines = [style.dim(line) for line in _format_row(heads, headers, widths, indent)]
    for row in rows:
        lines += _format_row(row, columns, widths, indent)
    return lines


def split_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[Table]:
    """The table; columns that do not fit side by side follow in further tables, each under the first column."""
    lengths = [max(map(len, cells)) for cells in zip([c.header for c in columns], *rows, strict=True)]
    start = 1
    while start == 1 or start < len(lengths):
        end, used = start, lengths[0]
        while end < len(lengths) and (width is None or end == start or used + len(GAP) + lengths[end] <= width):
            used, end = used + len(GAP) + lengths[end], end + 1
        yield Table([columns[0], *columns[start:end]], [[row[0], *row[start:end]] for row in rows])
        start = max(end, 2)


def _format_row(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int], indent: str) -> list[str]:
    cells = [
        (textwrap.wrap(cell, width, break_on_hyphens=False) or [""]) if column.wraps else [cell]
        for cell, column, width in zip(row, columns, widths, strict=True)
    ]
    lines = []
    for texts in zip_longest(*cells, fillvalue=""):
        parts = [
            text.rjust(width) if column.numeric else text.ljust(width)
            for text, column, width in zip(texts, columns, widths, strict=True)
        ]
        lines.append((indent + GAP.join(parts)).rstrip())
    return lines


def format_markdown(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines in Markdown, numbers to the right; only bars are escaped."""
    head = [column.header for column in columns]
    rule = ["---:" if column.numeric else "---" for column in columns]
    body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *body)]


def format_grid(
    pairs: Sequence[tuple[str, str]], *, width: int, style: Style, name_width: int, value_width: int, indent: str
) -> list[str]:
    """Return name–value pairs in as many columns as fit; a long value takes a line of its own."""
    per_line = max(1, (width - len(indent)) // (name_width + value_width + 2 * len(GAP)))
    lines: list[list[str]] = [[]]
    for name, value in pairs:
        cell = style.dim(name.ljust(name_width)) + GAP + value.ljust(value_width)
        if len(value) > value_width:
            lines += [[cell], []]
            continue
        if len(lines[-1]) == per_line:
            lines.append([])
        lines[-1].append(cell)
    return [(indent + (GAP * 2).join(cells)).rstrip() for cells in lines if cells]


def wrap(text: str, *, width: int, indent: str = "", bullet: str = "") -> list[str]:
    """Return a paragraph's lines; a bullet stands before the first one only."""
    first, rest = indent + bullet, indent + " " * len(bullet)
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )

"""Text for a terminal or a file: tables, grids and wrapped paragraphs, as plain strings.

Written out here because a listing must answer at once, and a table library takes longer to load than to use.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

GAP = "  "
NARROWEST_TEXT = 12


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
    """One column of a table: its header, and whether it holds numbers (right-aligned) or may be wrapped."""

    header: str
    numeric: bool = False
    wraps: bool = False


def number_columns(*headers: str) -> tuple[Column, ...]:
    """Columns that all hold numbers."""
    return tuple(Column(header, numeric=True) for header in headers)


def format_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None,
    style: Style,
    indent: str = "",
) -> list[str]:
    """Return a table's lines: a header, then the rows; columns that wrap give way where `width` is short."""
    widths = [max(len(cell) for cell in cells) for cells in zip([c.header for c in columns], *rows, strict=True)]
    if width is not None:
        for number, column in enumerate(columns):
            if column.wraps:
                excess = len(indent) + sum(widths) + len(GAP) * (len(widths) - 1) - width
                widths[number] = max(NARROWEST_TEXT, widths[number] - max(0, excess))
    lines = _format_row([c.header for c in columns], columns, widths, indent)
    lines = [style.dim(line) for line in lines]
    for row in rows:
        lines += _format_row(row, columns, widths, indent)
    return lines


def _format_row(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int], indent: str) -> list[str]:
    cells = [
        (textwrap.wrap(cell, width, break_on_hyphens=False) or [""]) if column.wraps else [cell]
        for cell, column, width in zip(row, columns, widths, strict=True)
    ]
    lines = []
    for height in range(max(map(len, cells))):
        parts = [
            text.rjust(width) if column.numeric else text.ljust(width)
            for text, column, width in zip(
                (cell[height] if height < len(cell) else "" for cell in cells), columns, widths, strict=True
            )
        ]
        lines.append((indent + GAP.join(parts)).rstrip())
    return lines


def format_grid(
    pairs: Sequence[tuple[str, str]],
    *,
    width: int,
    style: Style,
    name_width: int,
    value_width: int,
    indent: str,
) -> list[str]:
    """Return name–value pairs in as many columns as fit; a long value takes a line of its own."""
    per_line = max(1, (width - len(indent)) // (name_width + value_width + 2 * len(GAP)))
    lines: list[str] = []
    cells: list[str] = []

    def flush() -> None:
        if cells:
            lines.append((indent + (GAP * 2).join(cells)).rstrip())
            cells.clear()

    for name, value in pairs:
        cell = style.dim(name.ljust(name_width)) + GAP + value.ljust(value_width)
        if len(value) > value_width:
            flush()
            lines.append((indent + cell).rstrip())
            continue
        cells.append(cell)
        if len(cells) == per_line:
            flush()
    flush()
    return lines


def wrap(text: str, *, width: int, indent: str = "", bullet: str = "") -> list[str]:
    """Return a paragraph's lines; a bullet stands before the first one only."""
    first, rest = indent + bullet, indent + " " * len(bullet)
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )

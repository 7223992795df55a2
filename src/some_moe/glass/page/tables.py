"""Tables of records: a column is a header and a function that shows one record; and how figures are written."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from some_moe.glass.page.blocks import Table
from some_moe.layout import Column

Record = dict[str, Any]
Show = Callable[[Record], str]
NOTHING = "–"


def number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}".replace("-", "−")


def signed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.4f}".replace("-", "−")


def interval(bounds: Sequence[float] | None, digits: int) -> str:
    return NOTHING if not bounds else f"{number(bounds[0], digits)} to {number(bounds[1], digits)}"


def millions(count: int) -> str:
    return f"{count / 1e6:,.2f} M" if count >= 1e5 else f"{count:,}"


def figure(name: str, digits: int) -> Show:
    """The field `name` of a record, as a number."""
    return lambda record: number(record.get(name), digits)


def word(name: str, absent: str = "?") -> Show:
    """The field `name` of a record, as it is."""
    return lambda record: str(record.get(name, absent))


def make_table(
    records: Sequence[Record],
    columns: Mapping[str, Show],
    caption: str = "",
    *,
    words: Collection[str] = (),
    wraps: Collection[str] = (),
    drop_empty: bool = False,
) -> Table:
    """A row a record. words, wraps: the columns that hold no numbers; drop_empty: leave out what no record fills."""
    cells = {header: [show(record) for record in records] for header, show in columns.items()}
    kept = [header for header in columns if not drop_empty or set(cells[header]) != {NOTHING}]
    heads = [Column(header, numeric=header not in (*words, *wraps), wraps=header in wraps) for header in kept]
    return Table(heads, list(zip(*(cells[header] for header in kept), strict=True)), caption)

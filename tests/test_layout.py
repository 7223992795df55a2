"""Numbers and tables as text."""

from decimal import Decimal

import pytest

from some_moe.layout import (
    Column,
    Style,
    format_grid,
    format_markdown,
    format_number,
    format_table,
    make_table,
    number_column,
    number_columns,
    split_table,
    text_column,
)

RECORDS = [{"name": "a|b", "loss": 1234.5, "note": ""}, {"name": "c", "loss": None, "note": ""}]
COLUMNS = (text_column("name", "name"), number_column("loss", "loss", ",.2f"), text_column("note", "note"))


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(None, ".4f", "–"), (0.12345, ".3f", "0.123"), (12345, ",d", "12,345"), (Decimal("0.70"), "", "0.70")],
)
def test_a_number_that_is_not_there_is_a_dash(value: float | Decimal | None, form: str, text: str) -> None:
    assert format_number(value, form) == text


def test_columns_that_say_nothing_are_left_out() -> None:
    columns, rows = make_table(COLUMNS, RECORDS)
    assert [column.header for column in columns] == ["name", "loss"]
    assert rows == [("a|b", "1,234.50"), ("c", "–")]
    assert len(make_table(COLUMNS, RECORDS[1:], silence="–")[0]) == 2  # the loss of c, here
    assert len(make_table(COLUMNS, [])[0]) == 3


def test_columns_of_numbers_are_named_after_what_they_hold() -> None:
    columns, rows = make_table(number_columns(val_loss=".2f", steps=","), [{"val_loss": 1.5, "steps": 1000}])
    assert [column.header for column in columns] == ["val loss", "steps"]
    assert rows == [("1.50", "1,000")]


def test_a_table_for_the_terminal_and_for_markdown() -> None:
    table = make_table(COLUMNS, RECORDS)
    assert format_table(*table, width=None, style=Style()) == ["name      loss", "a|b   1,234.50", "c            –"]
    assert format_markdown(*table) == [
        "| name | loss |",
        "| --- | ---: |",
        "| a\\|b | 1,234.50 |",
        "| c | – |",
    ]


def test_what_does_not_fit_is_wrapped() -> None:
    columns = [Column("n"), Column("text", wraps=True)]
    rows = [["1", "some words too many"]]
    assert format_table(columns, rows, width=16, style=Style()) == ["n  text", "1  some words", "   too many"]


def test_a_long_value_has_its_own_line_in_a_grid() -> None:
    pairs = [("a", "1"), ("b", "22"), ("c", "long value"), ("d", "3")]
    lines = format_grid(pairs, width=20, style=Style(), name_width=1, value_width=3, indent="")
    assert lines == ["a  1      b  22", "c  long value", "d  3"]


def test_columns_that_do_not_fit_follow_in_further_tables_under_the_first() -> None:
    columns, rows = [Column(name) for name in ("layer", "gini", "entropy", "rank")], [["0", "0.5", "2.4", "7"]]
    assert [[column.header for column in part.columns] for part in split_table(columns, rows, 21)] == [
        ["layer", "gini", "entropy"],
        ["layer", "rank"],
    ]
    (whole,) = split_table(columns, rows, None)
    assert whole.rows == rows
    (alone,) = split_table(columns[:1], [["0"]], 3)
    assert alone.rows == [["0"]]


def test_headers_stand_on_several_lines_where_the_terminal_is_narrow() -> None:
    columns = (Column("gate entropy", numeric=True), Column("bits per byte", numeric=True))
    rows = [["0.1", "1234567"]]
    assert format_table(columns, rows, width=40, style=Style())[0] == "gate entropy  bits per byte"
    assert format_table(columns, rows, width=20, style=Style()) == [
        "   gate     bits",
        "entropy      per",
        "            byte",
        "    0.1  1234567",
    ]

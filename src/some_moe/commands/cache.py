"""`some cache`: the prepared data that is kept."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from some_moe.cli import Parser, look, write, write_json
from some_moe.errors import UsageError
from some_moe.layout import ABSENT, Column, format_table, make_table, number_column, text_column
from some_moe.system import cache
from some_moe.system.reading import clean

COLUMNS = (
    text_column("name", "name"),
    Column("source", lambda entry: entry["source"] or ABSENT, wraps=True),
    number_column("tokens", "tokens", ",d"),
    Column("state", lambda entry: "whole" if entry["is_whole"] else "half-made"),
    Column("size", lambda entry: format_size(entry["bytes"]), numeric=True),
    text_column("last used (UTC)", "last_used"),
)


def list_cache(arguments: list[str]) -> int:
    """List the cache."""
    parser = Parser("some cache list", "List the prepared data that is kept, the last used first.")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    options = parser.parse(arguments)
    entries, limit = [describe(entry) for entry in cache.list_entries()], cache.cache_limit()
    folder, total = str(clean(str(cache.cache_folder()))), sum(entry["bytes"] for entry in entries)
    if options.json:
        return write_json({"folder": folder, "bytes": total, "entries": entries})
    lines = format_table(*make_table(COLUMNS, entries), **look()) if entries else []
    lines.append(f"{format_size(total)} of at most {format_size(limit)} in {folder}")
    return write("\n".join(lines) + "\n")


def clear_cache(arguments: list[str]) -> int:
    """Remove what the cache holds."""
    parser = Parser("some cache clear", "Remove prepared data. What is needed again is made again.")
    parser.add_argument("--older-than", metavar="DAYS", help="only what was not used for so many days")
    days = parser.parse(arguments).older_than
    if days is not None and (not days.isdecimal() or not 1 <= len(days) <= 6):
        raise UsageError(f"--older-than {days!r} is not a number of days; give one such as 30")
    removed = cache.clear(int(days or 0))
    size, folder = format_size(sum(entry.bytes for entry in removed)), clean(str(cache.cache_folder()))
    return write(f"removed {len(removed)} {'entry' if len(removed) == 1 else 'entries'}, {size}, from {folder}\n")


def describe(entry: cache.Entry) -> dict[str, Any]:
    """An entry as JSON has it."""
    return asdict(entry) | {"last_used": datetime.fromtimestamp(entry.last_used, UTC).strftime("%Y-%m-%d %H:%M")}


def format_size(size: float) -> str:
    """Bytes in a unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"

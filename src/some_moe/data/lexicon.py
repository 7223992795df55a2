"""The words of the stories (lexicon.txt) and their plots (plots.txt), by section; both say how they are written."""

import re
from collections.abc import Iterator
from pathlib import Path

FILES = tuple(Path(__file__).with_name(name) for name in ("lexicon.txt", "plots.txt"))


def read_sections(text: str) -> dict[str, str]:
    """What stands below each line "== name ==", by name and in order, without comments and empty lines."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    _, *parts = re.split(r"^== (\w+) ==\n", "\n".join(lines), flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def read_entries(section: str) -> Iterator[tuple[str, str]]:
    """Keys and values of the lines "key = value"; a value goes on in the indented lines below it."""
    for entry in re.split(r"\n(?! )", section.strip()):
        key, _, value = entry.partition(" = ")
        yield key, " ".join(value.split())


LEXICON, PLOTS = (read_sections(file.read_text(encoding="utf-8")) for file in FILES)

"""docs/audit.md: prose written by hand, and between its markers tables made from the results."""

import re

from some_moe.config import ConfigError, did_you_mean
from some_moe.glass.page.markdown import plain, sentence, write_rows
from tools.audit_evidence import Evidence
from tools.audit_tables import TABLES

MARKER = re.compile(r"<!--\s*(?:table\b(?P<name>.*?)|end)\s*-->")


def fill_audit(text: str, evidence: Evidence, *, file: str = "the audit") -> str:
    """Return the text with every table between `<!-- table NAME -->` and `<!-- end -->` made anew.

    file: what refusals call the text.
    """
    parts: list[str] = []
    opened, done = "", 0  # the table that is open, and the character up to which the text was taken over
    for marker in MARKER.finditer(text):
        if marker["name"] is None:
            if not opened:
                raise ConfigError(f"{file} has an `<!-- end -->` that closes no table; remove it")
            parts.append(f"\n\n{write_table(opened, evidence)}\n\n")
            opened, done = "", marker.start()
        else:
            _refuse_open(opened, file)
            opened = _check_name(marker["name"].strip(), file)
            parts.append(text[done : marker.end()])
    _refuse_open(opened, file)
    return "".join([*parts, text[done:]])


def _refuse_open(opened: str, file: str) -> None:
    if opened:
        raise ConfigError(f"{file} opens the table {opened!r} and does not close it; write `<!-- end -->` after it")


def _check_name(name: str, file: str) -> str:
    if name not in TABLES:
        hint = did_you_mean(name, list(TABLES)) or f"; there are {', '.join(TABLES)}"
        raise ConfigError(f"{file} asks for the table {name!r}, which is not known{hint}")
    return name


def write_table(name: str, evidence: Evidence) -> str:
    """One table as Markdown, and below it what is not measured yet and what is not as registered."""
    table = TABLES[name](evidence)
    parts = [write_rows(sheet.columns, sheet.rows) for sheet in table.sheets]
    if table.missing:
        parts.append(f"Not measured yet: {sentence(', '.join(table.missing))}.")
    if table.departures:
        parts.append("Not as registered: " + " ".join(map(plain, table.departures)))
    return "\n\n".join(parts)

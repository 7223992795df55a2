"""docs/audit.md: prose by hand; the tables between its markers and the figures that it shows are made from results."""

import re
from collections.abc import Callable, Iterable

from some_moe.config import ConfigError, did_you_mean
from tools.audit_evidence import Evidence
from tools.audit_tables import TABLES
from tools.figures_audit_lines import draw_collapse, draw_lengths
from tools.figures_audit_rows import draw_gini, draw_seeds
from tools.published_figures import PublishedFigure

MARKER = re.compile(r"<!--\s*(?:table\b(?P<name>.*?)|end)\s*-->")
SHOWN = re.compile(r"!\[[^\]]*\]\(figures/(audit-[^)\s]*)\.svg\)")

FIGURES: dict[str, Callable[[Evidence], PublishedFigure | None]] = {
    "audit-lengths": draw_lengths,
    "audit-collapse": draw_collapse,
    "audit-gini": draw_gini,
    "audit-seeds": draw_seeds,
}
"""The figures by name; None stands for too little to draw."""


def fill_audit(text: str, evidence: Evidence, *, file: str = "the audit") -> str:
    """Return the text with every table between `<!-- table NAME -->` and `<!-- end -->` made anew.

    file: what refusals call the text.
    """
    parts: list[str] = []
    opened, done = "", 0  # the table that is open, and the character up to which the text was taken over
    for marker in [*MARKER.finditer(text), None]:
        ends = marker is not None and marker["name"] is None
        if opened and not ends:
            raise ConfigError(f"{file} opens the table {opened!r} and does not close it; write `<!-- end -->` after it")
        if ends and not opened:
            raise ConfigError(f"{file} has an `<!-- end -->` that closes no table; remove it")
        if marker is None:
            break
        if ends:
            parts.append(f"\n\n{TABLES[opened](evidence)}\n\n")
            opened, done = "", marker.start()
        else:
            opened = marker["name"].strip()
            _check_name(opened, TABLES, f"{file} asks for the table")
            parts.append(text[done : marker.end()])
    return "".join([*parts, text[done:]])


def draw_shown(text: str, evidence: Evidence, *, file: str = "the audit") -> dict[str, PublishedFigure]:
    """Return {name: figure} for each figure that the text shows and that can be drawn by now."""
    drawn = {}
    for name in dict.fromkeys(SHOWN.findall(text)):
        _check_name(name, FIGURES, f"{file} shows the figure")
        figure = FIGURES[name](evidence)
        if figure is not None:
            drawn[name] = figure
    return drawn


def _check_name(name: str, known: Iterable[str], where: str) -> None:
    if name not in known:
        hint = did_you_mean(name, list(known)) or f"; there are {', '.join(known)}"
        raise ConfigError(f"{where} {name!r}, which is not known{hint}")

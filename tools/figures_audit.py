"""The figures of docs/audit.md by name: each a function from what was measured to a figure, or None for too little.

Which of them are made is said by the audit's own text, which shows them: `![…](figures/audit-gini.svg)`.
"""

import re
from collections.abc import Callable

from some_moe.config import ConfigError, did_you_mean
from some_moe.lab.published_figures import PublishedFigure
from tools.audit_evidence import Evidence
from tools.figures_audit_lines import draw_collapse, draw_lengths
from tools.figures_audit_rows import draw_gini, draw_seeds

SHOWN = re.compile(r"!\[[^\]]*\]\(figures/(audit-[^)\s]*)\.svg\)")
FIGURES: dict[str, Callable[[Evidence], PublishedFigure | None]] = {
    "audit-lengths": draw_lengths,
    "audit-collapse": draw_collapse,
    "audit-gini": draw_gini,
    "audit-seeds": draw_seeds,
}


def draw_shown(text: str, evidence: Evidence, *, file: str = "the audit") -> dict[str, PublishedFigure]:
    """Return {name: figure} for each figure that the text shows and that can be drawn by now.

    file: what refusals call the text.
    """
    drawn = {}
    for name in dict.fromkeys(SHOWN.findall(text)):
        if name not in FIGURES:
            hint = did_you_mean(name, list(FIGURES)) or f"; there are {', '.join(FIGURES)}"
            raise ConfigError(f"{file} shows the figure {name!r}, which is not known{hint}")
        figure = FIGURES[name](evidence)
        if figure is not None:
            drawn[name] = figure
    return drawn

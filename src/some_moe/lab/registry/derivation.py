"""How a study is made: a published run, a few fields changed, and a question."""

from typing import Any

from some_moe.lab.registry.published import get_published
from some_moe.lab.registry.published_mvp import MVP_REPORT
from some_moe.lab.registry.records import Experiment, Source

OWN = Source("this laboratory; asked by no report")


def derive(
    name: str, base: str, changes: dict[str, Any], title: str, *, question: str, series: str,
    source: Source = MVP_REPORT, notes: tuple[str, ...] = (),
) -> Experiment:  # fmt: skip
    """Return the published run `base` with `changes`, and what the study asks."""
    return get_published(base).derive(
        name, changes, series=series, title=title, question=question, source=source, notes=notes
    )

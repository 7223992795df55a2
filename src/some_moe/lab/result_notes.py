"""What must be known before a measured figure is set beside a published one: where the run is not the published run."""

from collections.abc import Iterable, Iterator
from typing import Any

from some_moe.lab.card import EXECUTION, format_value
from some_moe.lab.published import Comparison, Result


def list_notes(comparisons: Iterable[Comparison]) -> list[str]:
    """One sentence a difference, with the runs that it is about before it."""
    measured = [comparison for comparison in comparisons if comparison.results]
    everyone = [comparison.name for comparison in measured]
    runs: dict[str, list[str]] = {}
    for comparison in measured:
        differences = [list(explain_differences(result)) for result in comparison.results]
        for sentence in dict.fromkeys(sentence for found in differences for sentence in found):
            results = zip(comparison.results, differences, strict=True)
            seeds = [str(result.seed) for result, found in results if sentence in found]
            some_seeds = "" if len(seeds) == len(comparison.results) else f" (seed {', '.join(seeds)})"
            runs.setdefault(sentence, []).append(comparison.name + some_seeds)
    return [
        f"{'all runs' if names == everyone and len(names) > 1 else ', '.join(names)}: {sentence}"
        for sentence, names in runs.items()
    ]


def explain_differences(result: Result) -> Iterator[str]:
    """Say in which ways a run is not the registered one, or not the published one."""
    experiment = result.experiment
    yield from explain_status(result)
    source, registered = result.text("source"), experiment.config.data.source
    if source and source != registered:
        yield f"trained on {source}, where {registered} is registered."
    yield from _explain_stories(result)
    yield from explain_overrides(result)
    total, count = result.number("total_parameters"), experiment.parameters.total
    if total is not None and total != count:
        yield f"its model has {total:,.0f} parameters, the registered one {count:,}."
    steps, published = result.number("steps"), experiment.published
    if steps is not None and published is not None and published.steps not in (None, steps):
        yield f"{steps:,.0f} steps, where {published.steps:,} were published."


def explain_status(result: Result) -> Iterator[str]:
    """Whether it came to its end."""
    status = result.text("status")
    if status and status != "finished":
        yield f"{status}."


def explain_overrides(result: Result) -> Iterator[str]:
    """Settings that were not as registered, but for those that say how a machine computes."""
    overrides = {name: value for name, value in result.overrides.items() if name not in EXECUTION}
    if overrides:
        changes = ", ".join(f"{name} {format_value(value)}" for name, value in overrides.items())
        yield f"with changed settings: {changes}."


def _explain_stories(result: Result) -> Iterator[str]:
    """Fewer stories than registered: read more often in training, and a smaller sample in validation."""
    scaled = result.record.get("epochs_scaled")
    if isinstance(scaled, dict):
        stories, epochs = _show(scaled.get("stories")), _show(scaled.get("epochs"))
        yield (
            f"{stories} training stories instead of {_show(scaled.get('published_stories'))}, read {epochs} times "
            f"instead of {_show(scaled.get('published_epochs'))}, so that the steps are as many."
        )
    stories_read = result.record.get("stories")
    found = stories_read.get("valid") if isinstance(stories_read, dict) else None
    wanted = result.experiment.config.data.val_subset_size
    if isinstance(found, int) and wanted is not None and found < wanted:
        yield f"validated on {found:,} stories instead of {wanted:,}."


def _show(value: Any) -> str:
    if not isinstance(value, int | float):
        return "an unknown number of"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"

"""What must be known before a measured figure is set beside a published one: where the run is not the published run."""

from collections.abc import Collection, Iterator

from some_moe.lab.card import EXECUTION, format_value
from some_moe.lab.published import Comparison, Result

SCALED = (
    "{stories:,} training stories instead of {published_stories:,}, read {epochs:,.2f} times instead of "
    "{published_epochs:,}, so that the steps are as many."
)


def list_notes(comparisons: Collection[Comparison]) -> list[str]:
    """One sentence a difference, with the runs that it is about before it."""
    num_seeds = {run.name: len(run.results) for run in comparisons if run.results}
    found: dict[str, dict[str, list[str]]] = {}  # {sentence: {run: its seeds}}
    for run in comparisons:
        for result in run.results:
            for sentence in explain_differences(result):
                found.setdefault(sentence, {}).setdefault(run.name, []).append(str(result.seed))
    notes = []
    for sentence, runs in found.items():
        whole = [name for name, seeds in runs.items() if len(seeds) == num_seeds[name]]
        names = [name if name in whole else f"{name} (seed {', '.join(seeds)})" for name, seeds in runs.items()]
        everyone = len(whole) > 1 and len(whole) == len(num_seeds)
        notes.append(f"{'all runs' if everyone else ', '.join(names)}: {sentence}")
    return notes


def explain_differences(result: Result) -> Iterator[str]:
    """Say in which ways a run is not the registered one, or not the published one."""
    data, published = result.experiment.config.data, result.experiment.published
    yield from explain_departures(result)
    source = result.text("source")
    if source and source != data.source:
        yield f"trained on {source}, where {data.source} is registered."
    # Fewer stories than registered: read more often in training, and a smaller sample in validation.
    scaled, stories = result.record.get("epochs_scaled"), result.record.get("stories")
    if isinstance(scaled, dict):
        yield SCALED.format_map(scaled)
    found = stories.get("valid") if isinstance(stories, dict) else None
    if isinstance(found, int) and data.val_subset_size is not None and found < data.val_subset_size:
        yield f"validated on {found:,} stories instead of {data.val_subset_size:,}."
    total, count = result.number("total_parameters"), result.experiment.parameters.total
    if total not in (None, count):
        yield f"its model has {total:,.0f} parameters, the registered one {count:,}."
    steps = result.number("steps")
    if steps is not None and published is not None and published.steps not in (None, steps):
        yield f"{steps:,.0f} steps, where {published.steps:,} were published."


def explain_departures(result: Result) -> Iterator[str]:
    """Whether it came to its end, and settings that were not as registered, but for how a machine computes."""
    status = result.text("status")
    if status not in ("", "finished"):
        yield f"{status}."
    overrides = {name: value for name, value in result.overrides.items() if name not in EXECUTION}
    if overrides:
        changes = ", ".join(f"{name} {format_value(value)}" for name, value in overrides.items())
        yield f"with changed settings: {changes}."

"""The laboratory: the registry of experiments, the queue that runs them, what they gave, and benchmarks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def run_experiments(
    names: Sequence[str],
    *,
    seeds: Sequence[int] = (0,),
    overrides: Mapping[str, Any] | None = None,
    out: str | Path = "runs",
    results: str | Path = "results",
    at_once: int = 1,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Run registered experiments or series, as `some experiments run` does, and return one object a run.

    overrides: settings for all of them, such as {"data.source": "stories"}.
    """
    from some_moe.lab.jobs import make_jobs
    from some_moe.lab.queue import Queue
    from some_moe.lab.registry.selection import select_experiments

    jobs = make_jobs(select_experiments(names), seeds, overrides or {})
    queue = Queue(jobs, Path(out), Path(results), say, at_once=at_once)
    queue.run()
    return queue.summarize()

"""The 30 published runs, in the order of the reports. Each file holds one report, figures beside settings."""

from some_moe.lab.registry.published_later import LATER_RUNS
from some_moe.lab.registry.published_mvp import MVP_RUNS
from some_moe.lab.registry.published_v3 import V_RUNS
from some_moe.lab.registry.published_v4 import A_RUNS, B_RUNS
from some_moe.lab.registry.records import Experiment

PUBLISHED: tuple[Experiment, ...] = (*MVP_RUNS, *V_RUNS, *A_RUNS, *B_RUNS, *LATER_RUNS)

_BY_NAME = {experiment.name: experiment for experiment in PUBLISHED}


def get_published(name: str) -> Experiment:
    """Return a published run by its exact name, for a study to derive from."""
    return _BY_NAME[name]

"""One job of a queue: an experiment with a seed, the config it runs with, and how far its folder has come."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from some_moe.config import ConfigError, RunConfig
from some_moe.lab.registry.records import Experiment
from some_moe.lab.scaling import Schedule, count_stories, scale
from some_moe.training.run_folder import RunFolder

Standing = Literal["new", "begun", "done"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of an experiment."""

    experiment: Experiment
    seed: int
    config: RunConfig  # with the seed, the name and the schedule that fits the data
    schedule: Schedule
    overrides: Mapping[str, Any]  # dotted fields that were asked for otherwise than registered, the source apart

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def training_words(self) -> list[str]:
        """The arguments of `some` that train it: the registered preset and every field that differs from it."""
        before, after = self.experiment.config.flatten(), self.config.flatten()
        changed = [write_flag(name, after[name]) for name in after if after[name] != before[name]]
        return ["train", "--preset", self.experiment.name, *changed]

    @property
    def command(self) -> str:
        """What to type to run this job alone. No absolute paths: a record travels to other machines."""
        source = self.config.data.source
        data = ["--data", hide_place(source)] if source != self.experiment.config.data.source else []
        changed = [write_flag(name, hide_place(value)) for name, value in self.overrides.items()]
        stories = ["--stories"] if self.config.train.story_losses == "test" else []
        words = ["some", "experiments", "run", self.experiment.name, *data, "--seeds", str(self.seed), *stories]
        return shlex.join([*words, *changed])


def write_flag(name: str, value: Any) -> str:
    """Write a field as `some train` reads it: data.batch_size → --data.batch-size=32."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"--{name.replace('_', '-')}={text}"


def hide_place(value: Any) -> Any:
    """Of an absolute path only the last part; anything else as it is."""
    return PurePath(value).name if isinstance(value, str) and PurePath(value).is_absolute() else value


def make_jobs(experiments: Sequence[Experiment], seeds: Sequence[int], overrides: Mapping[str, Any]) -> list[Job]:
    """Fit each experiment to the data that is there, for each seed: all seeds of one, then the next."""
    jobs = []
    for experiment in experiments:
        try:
            asked = experiment.config.override(overrides)
            config, schedule = scale(asked, count_stories(asked.data))
        except ConfigError as error:
            raise ConfigError(f"{experiment.name}: {error}") from None
        registered, wanted = experiment.config.flatten(), asked.flatten()
        changed = {name: wanted[name] for name in wanted if name in overrides and wanted[name] != registered[name]}
        changed.pop("data.source", None)
        if asked.train.story_losses == "test":
            changed.pop("train.story_losses", None)  # it has a flag, and is no other experiment
        for seed in seeds:
            own = config.override({"name": f"{experiment.name}-seed{seed}", "train.seed": seed})
            jobs.append(Job(experiment=experiment, seed=seed, config=own, schedule=schedule, overrides=changed))
    return jobs


def explain_scaling(jobs: Sequence[Job]) -> list[str]:
    """One line for all experiments that meet the data in the same way; none for those it fits."""
    named: dict[str, dict[str, None]] = {}
    for job in jobs:
        named.setdefault(job.schedule.explain(), {})[job.experiment.name] = None
    return [f"{', '.join(names)}: {sentence}" for sentence, names in named.items() if sentence]


def find_standing(job: Job, folder: RunFolder) -> Standing:
    """How far a job's folder has come. One that holds something else is refused."""
    if not folder.exists():
        if not folder.is_free() and not folder.exists():  # another worker may have begun it just now
            raise ConfigError(
                f"{str(folder)!r} is not a run, but holds something; choose another --out, or move it away"
            )
        return "new"
    differing = list_differences(folder.read_config(), job.config)
    if differing:
        there = f"{str(folder)!r} was run with another config: {', '.join(differing)}"
        raise ConfigError(f"{there}; choose another --out, or move it away")
    return "done" if folder.result_file.is_file() else "begun"


def list_differences(there: RunConfig, here: RunConfig) -> list[str]:
    """Name each field that differs. What was left to be settled when the run began is as it was settled then."""
    differing = here.settle_as(there).differences(there.flatten())
    return [f"{name} ({before} there, {now} here)" for name, (before, now) in differing.items()]

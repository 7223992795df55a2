"""What the studies run, read from plan.yaml, and which of it is known by now: tuning goes stage by stage.

Imports no torch. An *arm* is one side of a comparison; a *run* is an arm with settings and a random seed, and leaves
one record. What is done is known by its record alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from some_moe.config import ConfigError, RunConfig, did_you_mean
from some_moe.config.run import HOUSEKEEPING
from some_moe.lab.jobs import Job
from some_moe.lab.registry import EXPERIMENTS, find_experiment
from some_moe.lab.scaling import Stories, count_stories, scale
from tools.studies.records import Record, Records

PLAN = Path(__file__).with_name("plan.yaml")
RESULTS = Path(__file__).parents[2] / "results"
MOST_LEFT_OUT = 10
MOST_MORE = 2  # rates beyond those given, where the best lies at an end
AXES = {"rate": "train.learning_rate", "dropout": "model.dropout", "decay": "train.weight_decay"}
# Nothing but the record is kept: no checkpoint but the best one, at the end, and that goes with the run folder.
KEEPING = {
    "train.checkpoints": "best", "train.save_every": 0, "train.snapshot_every": 0, "train.sample_tokens": 0,
    "train.log_every": 25, "train.story_losses": "test",
}  # fmt: skip
# As in the folders that `data` makes; of `published` runs the config asks for fewer.
STORIES = {"tinystories": Stories(17_996, 1_500, 1_500), "novels": Stories(35_182, 400, 400)}


@dataclass(frozen=True)
class Settings:
    """What is tuned."""

    rate: float
    dropout: float
    decay: float

    @property
    def name(self) -> str:
        return f"r{self.rate * 1e4:g}_d{self.dropout:g}_w{self.decay:g}"

    @property
    def overrides(self) -> dict[str, float]:
        return {field: getattr(self, axis) for axis, field in AXES.items()}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of a comparison. At most one of `grid` and `like` is set; without either it runs as registered."""

    study: str
    name: str
    experiment: str
    words: str
    folder: str  # below results, where its records lie
    data: str  # the folder of its text
    changes: Mapping[str, Any]  # the protocol's and its own
    seeds: tuple[int, ...]
    grid: Mapping[str, Sequence[float]] | None = None
    like: str = ""  # STUDY/ARM
    seconds_of: str = ""  # an arm of the same study
    lengths: tuple[int, ...] = ()  # at which the trained model is scored too
    alone: bool = False

    @property
    def key(self) -> str:
        return f"{self.study}/{self.name}"

    @property
    def is_as_registered(self) -> bool:
        return self.folder == "published"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of an arm."""

    arm: Arm
    seed: int
    settings: Settings | None = None
    passes: int | None = None  # where they follow from the seconds of another arm
    small: Mapping[str, Any] = field(default_factory=dict)  # a rehearsal's sizes

    @property
    def name(self) -> str:
        parts = [self.arm.name] if self.settings is None else [self.arm.name, self.settings.name]
        return "_".join(parts) + f"-seed{self.seed}"

    @property
    def record(self) -> str:
        """Its record's place below the results."""
        return f"{self.arm.folder}/{self.name}.json"

    @property
    def overrides(self) -> dict[str, Any]:
        """What is set otherwise than registered; the library changes with the random seed."""
        found = dict(self.arm.changes) | ({} if self.settings is None else self.settings.overrides)
        found |= {} if self.passes is None else {"train.epochs": self.passes}
        return {**found, "model.expert_seed": self.seed, **self.small}

    @cached_property
    def config(self) -> RunConfig:
        """As it is asked for, before it is fitted to the stories that are there."""
        try:
            return find_experiment(self.arm.experiment).config.override(KEEPING | self.overrides)
        except ConfigError as error:
            raise ConfigError(f"{self.arm.key}: {error}") from None

    def make_job(self, data: Path) -> Job:
        """The same as a job of a queue, on the text that lies in DATA/NAME."""
        experiment = find_experiment(self.arm.experiment)
        asked = self.config.override({"data.source": str(data / self.arm.data)})
        config, schedule = scale(asked, count_stories(asked.data))
        registered, wanted = experiment.config.flatten(), asked.flatten()
        changed = {name: wanted[name] for name in wanted if wanted[name] != registered[name]}
        changed = {name: value for name, value in changed.items() if name not in HOUSEKEEPING | {"data.source"}}
        config = config.override({"name": self.name, "train.seed": self.seed})
        return Job(experiment=experiment, seed=self.seed, config=config, schedule=schedule, overrides=changed)


@dataclass(frozen=True, kw_only=True)
class Study:
    name: str
    words: str
    arms: tuple[Arm, ...]
    base: str = ""  # the arm that `like` names, which the others are compared with
    on_cpu: bool = False  # a laptop will do

    @property
    def is_alone(self) -> bool:
        return any(arm.alone for arm in self.arms)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All studies, in the order of their value for each minute."""

    studies: Mapping[str, Study]
    left_out: Mapping[str, str]

    @cached_property
    def arms(self) -> dict[str, Arm]:
        return {arm.key: arm for study in self.studies.values() for arm in study.arms}

    def find(self, name: str) -> Study:
        if name not in self.studies:
            hint = did_you_mean(name, list(self.studies)) or f"; slices are {', '.join(self.studies)}"
            raise ConfigError(f"{name!r} is no slice of the studies{hint}")
        return self.studies[name]

    # --- tuning -----------------------------------------------------------------------------------------------

    def known_runs(self, arm: Arm, records: Records) -> list[Run]:
        """The runs of an arm that are known by now, done or not."""
        passes = self.find_passes(arm, records)
        if passes == 0:
            return []
        if arm.grid is not None:
            tried, chosen = self._tune(arm, records)
            first = [Run(arm=arm, settings=one, seed=arm.seeds[0], passes=passes) for one in tried]
            return first + self._repeat(arm, chosen, arm.seeds[1:], passes)
        if arm.like:
            return self._repeat(arm, self.choose(self.arms[arm.like], records), arm.seeds, passes)
        return [Run(arm=arm, seed=seed, passes=passes) for seed in arm.seeds]

    def choose(self, arm: Arm, records: Records) -> Settings | None:
        """The settings that valid chose with the first seed; None while some are not tried."""
        if arm.like:
            return self.choose(self.arms[arm.like], records)
        return None if arm.grid is None else self._tune(arm, records)[1]

    def find_passes(self, arm: Arm, records: Records) -> int | None:
        """How often an arm of equal seconds reads its text; 0 while that is not known, None where it is as it is."""
        if not arm.seconds_of:
            return None
        own, other = (self._time(arm.experiment, arm.changes, records), self._time(arm.seconds_of, {}, records))
        if own is None or other is None:
            return 0
        return max(1, round(float(arm.changes["train.epochs"]) * other / own))

    def _time(self, name: str, changes: Mapping[str, Any], records: Records) -> float | None:
        """Seconds a step, alone on the chip, of the arm of `timing` that has this experiment and width."""
        width = changes.get("model.dense_width")
        for arm in self.studies["timing"].arms if "timing" in self.studies else ():
            if arm.experiment == name and arm.changes.get("model.dense_width") == width:
                record = records.get(Run(arm=arm, seed=arm.seeds[0]).record)
                if record is not None and record.get("steps"):
                    return float(record["seconds"]) / float(record["steps"])
        return None

    def _repeat(self, arm: Arm, chosen: Settings | None, seeds: Sequence[int], passes: int | None) -> list[Run]:
        if chosen is None:
            return []
        return [Run(arm=arm, settings=chosen, seed=seed, passes=passes) for seed in seeds]

    def _tune(self, arm: Arm, records: Records) -> tuple[list[Settings], Settings | None]:
        """All settings that are known by now to be tried, and the chosen ones once all of them are done."""
        assert arm.grid is not None
        now = Settings(arm.grid["rates"][0], arm.grid["dropout"][0], arm.grid["decay"][0])
        tried: dict[Settings, None] = {}
        for axis in AXES:
            values = sorted(arm.grid["rates" if axis == "rate" else axis])
            for more in range(MOST_MORE + 1):
                stage = {value: replace(now, **{axis: value}) for value in values}
                tried |= dict.fromkeys(stage.values())
                losses = {
                    value: find_loss(records.get(Run(arm=arm, settings=one, seed=arm.seeds[0]).record))
                    for value, one in stage.items()
                }
                if any(loss is None for loss in losses.values()):
                    return list(tried), None
                best = min(losses, key=lambda value: losses[value] or 0.0)
                if axis != "rate" or more == MOST_MORE or best not in (values[0], values[-1]):
                    break
                values = [best / 2, *values] if best == values[0] else [*values, best * 2]
            now = replace(now, **{axis: best})
        return list(tried), now

    def count_runs(self, arm: Arm) -> int:
        """How many runs an arm has when all goes as planned, without rates beyond those given."""
        tuned = 0 if arm.grid is None else sum(map(len, arm.grid.values())) - len(arm.grid)
        return tuned + len(arm.seeds)

    # --- coverage ---------------------------------------------------------------------------------------------

    def list_uncovered(self) -> list[str]:
        """Registered runs that no arm measures, whatever the protocol, and of which the first sample has no record."""
        covered = {arm.experiment for arm in self.arms.values()} | list_first_sample()
        return [one.name for one in EXPERIMENTS if one.name not in covered]


def find_loss(record: Record | None) -> float | None:
    """By what settings are chosen: the best loss on valid; infinite where the run failed, None where there is none."""
    if record is None:
        return None
    loss = record.get("best_val_loss")
    return float(loss) if isinstance(loss, int | float) and record.get("status") != "failed" else float("inf")


@cache
def read_plan(file: Path = PLAN) -> Plan:
    text = yaml.safe_load(file.read_text(encoding="utf-8"))
    protocols, grids = text["protocols"], text["grids"]
    left_out = dict(text.get("left_out") or {})
    studies: dict[str, Study] = {}
    for name, about in text["studies"].items():
        own = dict(about)
        arms = own.pop("arms")
        if arms == "rest":
            arms = {one: {} for one in list_rest(studies, left_out)}
        made = tuple(make_arm(name, own, arm, values or {}, protocols, grids) for arm, values in arms.items())
        base = own.get("like", "").split("/")[-1]
        studies[name] = Study(name=name, words=own["words"], arms=made, base=base, on_cpu=own.get("cpu", False))
    plan = Plan(studies=studies, left_out=left_out)
    for arm in plan.arms.values():
        if arm.like and arm.like not in plan.arms:
            raise ConfigError(f"{arm.key}: like {arm.like!r} is no arm; write STUDY/ARM")
    return plan


def list_rest(studies: Mapping[str, Study], left_out: Mapping[str, str]) -> list[str]:
    """Registered runs that no study before runs as they are registered, and that the first sample has no record of.

    Those that no study runs at all come first.
    """
    arms = [arm for study in studies.values() for arm in study.arms]
    done = {arm.experiment for arm in arms if arm.is_as_registered} | set(left_out)
    done |= list_first_sample()
    done |= {one.name for one in EXPERIMENTS if is_plain(one.config)}  # measured by their own studies, as they are
    some = {arm.experiment for arm in arms}
    return sorted((one.name for one in EXPERIMENTS if one.name not in done), key=lambda name: name in some)


def list_first_sample(results: Path = RESULTS) -> set[str]:
    """Registered runs that were measured on 6,903 stories: their records lie in results itself."""
    return {file.stem.rpartition("-seed")[0] for file in results.glob("*.json")}


def is_plain(config: RunConfig) -> bool:
    return config.data.batching == "bucketed" and config.data.seq_len == 384


def make_arm(
    study: str,
    about: Mapping[str, Any],
    name: str,
    values: Mapping[str, Any],
    protocols: Mapping[str, Any],
    grids: Mapping[str, Any],
) -> Arm:
    grid = values.get("grid", about.get("grid"))
    like = values.get("like", about.get("like", ""))
    experiment = values.get("experiment", about.get("base", name))
    title = find_experiment(experiment).title
    return Arm(
        study=study,
        name=name,
        experiment=find_experiment(experiment).name,
        words=values.get("words", title),
        folder=about.get("folder", f"studies/{study}"),
        data=about["data"],
        changes=protocols[about["protocol"]] | values.get("changes", {}),
        seeds=tuple(values.get("seeds", about.get("seeds", (0, 1, 2)))),
        grid=None if like or grid is None else grids[grid],
        like=like,
        seconds_of=values.get("seconds_of", ""),
        lengths=tuple(values.get("lengths", ())),
        alone=about.get("alone", False),
    )

"""What was found of each arm: its chosen settings, its records by seed, and its loss beside another's."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any

import numpy as np

from some_moe.lab.published import finite_number
from some_moe.memory import checkpoint_bytes
from tools.studies.intervals import Array, Interval, crossed, difference, over_seeds
from tools.studies.plan import Arm, Plan, Run, Settings, find_loss
from tools.studies.records import Record, Records


@dataclass(frozen=True)
class Outcome:
    """One arm. Where its tuning is not over, what stands is that of the best settings so far."""

    plan: Plan
    arm: Arm
    records: Records

    @cached_property
    def known(self) -> list[Run]:
        return self.plan.known_runs(self.arm, self.records)

    @property
    def num_done(self) -> int:
        return sum(run.record in self.records for run in self.known)

    @property
    def is_whole(self) -> bool:
        return len(self.known) >= self.plan.count_runs(self.arm) and self.num_done == len(self.known)

    @cached_property
    def settings(self) -> Settings | None:
        """The chosen ones, or the best so far."""
        chosen = self.plan.choose(self.arm, self.records)
        if chosen is not None or self.arm.grid is None:
            return chosen
        tried = {run.settings: find_loss(self.records.get(run.record)) for run in self.known}
        done = {one: loss for one, loss in tried.items() if one is not None and loss is not None}
        return min(done, key=lambda one: done[one]) if done else None

    @cached_property
    def by_seed(self) -> dict[int, Record]:
        """The records at these settings that have a loss on test."""
        found = {}
        for run in self.known:
            record = self.records.get(run.record)
            if run.settings == self.settings and record is not None and finite_number(record.get("test_loss")):
                found[run.seed] = record
        return found

    @cached_property
    def stories(self) -> tuple[Array, Array, list[int]] | None:
        """Nats of each seed on each story of test, the stories' tokens, and the seeds; None where they are not kept."""
        rows = {seed: kept for seed, record in self.by_seed.items() if (kept := read_stories(record)) is not None}
        if not rows:
            return None
        tokens = next(iter(rows.values()))[1]
        same = {seed: nats for seed, (nats, other) in rows.items() if np.array_equal(other, tokens)}
        return np.stack(list(same.values())), tokens, list(same)

    @property
    def loss(self) -> Interval | None:
        if not self.by_seed:
            return None
        if self.stories is not None and len(self.stories[2]) == len(self.by_seed):
            return crossed(self.stories[0], self.stories[1])
        return over_seeds([float(record["test_loss"]) for record in self.by_seed.values()])

    def minus(self, other: "Outcome") -> Interval | None:
        """This loss minus the other's: paired by story and seed; by seed alone where stories are not kept."""
        seeds = sorted(self.by_seed.keys() & other.by_seed.keys())
        if not seeds:
            return None
        if self.stories is not None and other.stories is not None and np.array_equal(self.stories[1], other.stories[1]):
            both = [seed for seed in seeds if seed in self.stories[2] and seed in other.stories[2]]
            if both == seeds:
                one, two = (
                    table[[order.index(seed) for seed in both]] for table, _, order in (self.stories, other.stories)
                )
                return difference(one, two, self.stories[1])
        pairs = [float(self.by_seed[s]["test_loss"]) - float(other.by_seed[s]["test_loss"]) for s in seeds]
        return over_seeds(pairs)

    def average(self, name: str) -> float | None:
        found = [number for record in self.by_seed.values() if (number := finite_number(record.get(name))) is not None]
        return mean(found) if found else None

    @property
    def step_ms(self) -> float | None:
        seconds, steps = self.average("seconds"), self.average("steps")
        return None if seconds is None or not steps else 1e3 * seconds / steps

    @property
    def middle(self) -> Mapping[str, Any]:
        """The middle layer of the first seed."""
        record = next(iter(self.by_seed.values()), {})
        layers = record.get("layers") or []
        return next((row for row in layers if row.get("layer") == record.get("middle_layer")), {})

    @property
    def stored_bytes(self) -> int:
        """Of the trained part and the keys, as a checkpoint of weights holds them; frozen experts are a seed."""
        config = Run(arm=self.arm, seed=0, settings=self.settings).config
        return checkpoint_bytes(config, whole=False)


def read_stories(record: Record) -> tuple[Array, Array] | None:
    """Nats and tokens of each story of test, as a record keeps them."""
    stories = record.get("stories")
    test = stories.get("test") if isinstance(stories, dict) else None
    if not isinstance(test, dict) or not test.get("nats"):
        return None
    return np.asarray(test["nats"], dtype=np.float64), np.asarray(test["tokens"], dtype=np.float64)


class Outcomes:
    """All arms by their keys, STUDY/ARM."""

    def __init__(self, plan: Plan, records: Records) -> None:
        self.plan, self.records = plan, records
        self.found = {key: Outcome(plan, arm, records) for key, arm in plan.arms.items()}

    def __getitem__(self, key: str) -> Outcome:
        return self.found[key]

    def of(self, study: str) -> list[Outcome]:
        return [self.found[arm.key] for arm in self.plan.studies[study].arms]

    def base_of(self, study: str, page_base: str) -> Outcome | None:
        """What the arms of a study are compared with."""
        like = next((arm.like for arm in self.plan.studies[study].arms if arm.like), "")
        if self.plan.studies[study].base:
            return self.found[like]
        own = self.plan.studies[study].arms
        named = [arm.key for arm in own if arm.key == page_base or arm.name == page_base.split("/")[-1]]
        return self.found[named[0]] if named else None

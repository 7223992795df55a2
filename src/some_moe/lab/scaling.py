"""The published number of steps on other data: fewer stories are read more often, more stories are cut.

A run's schedule follows from its config and from how many stories there are. Where there are fewer than the config
asks for, the epochs grow until the optimizer makes as many steps as with all of them, the last epoch is cut by
train.max_steps, and the model is evaluated where each published epoch would have ended. Imports no torch.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from some_moe.config import ConfigError, DataConfig, RunConfig
from some_moe.data.sources import load_corpus


@dataclass(frozen=True)
class Stories:
    """How many stories each split has, cut to the subset sizes."""

    train: int
    valid: int
    test: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a run ends, and where in it the epochs of the config it was asked for end."""

    stories: Stories
    steps: int | None  # None where rows are packed: their number is known only once they are filled
    steps_an_epoch: int  # with the stories that are there
    asked_stories: int | None  # training stories of a full epoch; None is all there are
    asked_valid: int | None
    asked_epochs: int
    asked_steps_an_epoch: int
    scaled: bool
    epoch_ends: tuple[int, ...]  # the step at which each epoch asked for ends; empty where steps is None

    def describe_scaling(self) -> dict[str, Any] | None:
        """The figures of a scaled run, for its record; None where nothing was scaled."""
        if not self.scaled or self.steps is None:
            return None
        return {
            "stories": self.stories.train,
            "published_stories": self.asked_stories,
            "epochs": self.steps / self.steps_an_epoch,
            "published_epochs": self.asked_epochs,
            "steps_an_epoch": self.steps_an_epoch,
            "published_steps_an_epoch": self.asked_steps_an_epoch,
        }

    def explain(self) -> str:
        """One sentence on how the data differs from what was asked for; "" where it does not."""
        parts = []
        if self.scaled and self.steps is not None:
            parts.append(
                f"{self.stories.train:,} training stories instead of {self.asked_stories:,}, so "
                f"{self.steps / self.steps_an_epoch:.2f} epochs of {self.steps_an_epoch:,} steps instead of "
                f"{self.asked_epochs} of {self.asked_steps_an_epoch:,} make the same {self.steps:,} steps"
            )
        if self.asked_valid is not None and self.stories.valid < self.asked_valid:
            parts.append(f"validation on {self.stories.valid:,} of {self.asked_valid:,} stories")
        return "; ".join(parts)


def count_stories(data: DataConfig) -> Stories:
    """Read the source and count what a run with this config would get. Each source is read once."""
    if data.source == "stories":  # as many are told as are asked for, but for repeats
        return _count(data.source, data.separator, data.train_subset_size, data.val_subset_size)
    there = _count(data.source, data.separator, None, None)

    def cut(stories: int, size: int | None) -> int:
        return stories if size is None else min(stories, size)

    held_out = data.val_subset_size
    return Stories(cut(there.train, data.train_subset_size), cut(there.valid, held_out), cut(there.test, held_out))


@cache
def _count(source: str, separator: str, train_size: int | None, val_size: int | None) -> Stories:
    wanted = DataConfig(source=source, separator=separator, train_subset_size=train_size, val_subset_size=val_size)
    corpus = load_corpus(wanted)
    return Stories(len(corpus.train), len(corpus.valid), len(corpus.test))


def scale(config: RunConfig, stories: Stories) -> tuple[RunConfig, Schedule]:
    """Fit a config to the stories that are there; return it with its schedule."""
    data, train = config.data, config.train
    rows = config.rows_a_step
    steps_an_epoch = stories.train // rows
    packed = data.batching == "packed"
    if steps_an_epoch == 0 and not packed:
        raise ConfigError(
            f"data.source {data.source!r} gives {stories.train} training stories, fewer than one step of {rows}; "
            "lower data.batch_size or give more stories"
        )
    asked_stories = stories.train if data.train_subset_size is None else data.train_subset_size
    asked_steps_an_epoch, steps = asked_stories // rows, config.count_steps(asked_stories)
    scaled = not packed and steps_an_epoch != asked_steps_an_epoch
    schedule = Schedule(
        stories=stories,
        steps=None if packed else steps,
        steps_an_epoch=steps_an_epoch,
        asked_stories=data.train_subset_size,
        asked_valid=data.val_subset_size,
        asked_epochs=train.epochs,
        asked_steps_an_epoch=asked_steps_an_epoch,
        scaled=scaled,
        # Each full epoch's last step, and that of a last one which max_steps cuts short.
        epoch_ends=() if packed else (*range(asked_steps_an_epoch, steps, asked_steps_an_epoch), steps),
    )
    if not scaled:
        return config, schedule
    if train.eval_every and asked_steps_an_epoch % train.eval_every:
        raise ConfigError(
            f"train.eval_every {train.eval_every} passes over the ends of the published epochs of "
            f"{asked_steps_an_epoch} steps; leave it out, or give a divisor of {asked_steps_an_epoch}"
        )
    changes = {
        "train.epochs": math.ceil(steps / steps_an_epoch),
        "train.max_steps": steps,
        "train.eval_every": train.eval_every or asked_steps_an_epoch,
    }
    return config.override(changes), schedule

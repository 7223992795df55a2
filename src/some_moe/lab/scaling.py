"""The published number of steps on other data: fewer stories are read more often, more stories are cut.

A run's schedule follows from its config and from how many stories there are. Where there are fewer than the config
asks for, the epochs grow until the optimizer makes as many steps as with all of them, the last epoch is cut by
train.max_steps, and the model is evaluated where each published epoch would have ended. Imports no torch.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from some_moe.config import ConfigError, DataConfig, RunConfig
from some_moe.data.sources import SPLITS, load_corpus


class Stories(NamedTuple):
    """How many stories each split has, cut to the subset sizes."""

    train: int
    valid: int
    test: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a run ends, and where in it the epochs of the config it was asked for end."""

    asked: RunConfig
    stories: Stories  # that are there
    steps: int | None  # None where rows are packed: their number is known only once they are filled
    steps_an_epoch: int  # with the stories that are there
    asked_steps_an_epoch: int
    scaled: bool
    epoch_ends: tuple[int, ...]  # the step at which each epoch asked for ends; empty where steps is None

    @property
    def epochs(self) -> float:
        """How often the stories that are there are read."""
        return self.asked.train.epochs if self.steps is None else self.steps / self.steps_an_epoch

    def describe_scaling(self) -> dict[str, Any] | None:
        """The figures of a scaled run, for its record; None where nothing was scaled."""
        if not self.scaled:
            return None
        return {
            "stories": self.stories.train,
            "published_stories": self.asked.data.train_subset_size,
            "epochs": self.epochs,
            "published_epochs": self.asked.train.epochs,
            "steps_an_epoch": self.steps_an_epoch,
            "published_steps_an_epoch": self.asked_steps_an_epoch,
        }

    def explain(self) -> str:
        """One sentence on how the data differs from what was asked for; "" where it does not."""
        parts, data = [], self.asked.data
        if self.scaled:
            fewer = f"{self.stories.train:,} training stories instead of {data.train_subset_size:,}, so "
            if self.steps == self.asked_steps_an_epoch * self.asked.train.epochs:
                parts.append(
                    f"{fewer}{self.epochs:.2f} epochs of {self.steps_an_epoch:,} steps instead of "
                    f"{self.asked.train.epochs} of {self.asked_steps_an_epoch:,} make the same {self.steps:,} steps"
                )
            else:  # train.max_steps ends both before their last epoch
                parts.append(
                    f"{fewer}the {self.steps:,} steps of train.max_steps are {self.epochs:.2f} epochs of "
                    f"{self.steps_an_epoch:,} steps"
                )
        if data.val_subset_size is not None and self.stories.valid < data.val_subset_size:
            parts.append(f"validation on {self.stories.valid:,} of {data.val_subset_size:,} stories")
        return "; ".join(parts)


def count_stories(data: DataConfig) -> Stories:
    """Read the source and count what a run with this config would get. Each source is read once."""
    sizes = (data.train_subset_size, data.val_subset_size, data.val_subset_size)
    # Generated stories are as many as are asked for, but for repeats; of others all are counted once, then cut.
    there = _count(
        data.source, data.text_field, data.separator, *(sizes[:2] if data.source == "stories" else (None, None))
    )
    return Stories(*(count if size is None else min(count, size) for count, size in zip(there, sizes, strict=True)))


@cache
def _count(source: str, field: str, separator: str, train_size: int | None, val_size: int | None) -> Stories:
    sizes = {"train_subset_size": train_size, "val_subset_size": val_size}
    corpus = load_corpus(DataConfig(source=source, text_field=field, separator=separator, **sizes))
    return Stories(*map(corpus.count, SPLITS))


def scale(config: RunConfig, stories: Stories) -> tuple[RunConfig, Schedule]:
    """Fit a config to the stories that are there; return it with its schedule."""
    data, rows, eval_every = config.data, config.rows_a_step, config.train.eval_every
    steps_an_epoch = stories.train // rows
    packed = data.batching == "packed" or data.long == "split"  # a row is then no story
    if steps_an_epoch == 0 and not packed:
        raise ConfigError(
            f"data.source {data.source!r} gives {stories.train} training stories, fewer than one step of {rows}; "
            "lower data.batch_size or give more stories"
        )
    asked_stories = stories.train if data.train_subset_size is None else data.train_subset_size
    asked_steps_an_epoch, steps = asked_stories // rows, config.count_steps(asked_stories)
    schedule = Schedule(
        asked=config,
        stories=stories,
        steps=None if packed else steps,
        steps_an_epoch=steps_an_epoch,
        asked_steps_an_epoch=asked_steps_an_epoch,
        scaled=not packed and steps_an_epoch != asked_steps_an_epoch,
        # Each full epoch's last step, and that of a last one which max_steps cuts short.
        epoch_ends=() if packed else (*range(asked_steps_an_epoch, steps, asked_steps_an_epoch), steps),
    )
    if not schedule.scaled:
        return config, schedule
    if eval_every and asked_steps_an_epoch % eval_every:
        raise ConfigError(
            f"train.eval_every {eval_every} passes over the ends of the published epochs of {asked_steps_an_epoch} "
            f"steps; leave it out, or give a divisor of {asked_steps_an_epoch}"
        )
    changes = {"train.epochs": math.ceil(steps / steps_an_epoch), "train.max_steps": steps}
    return config.override(changes | {"train.eval_every": eval_every or asked_steps_an_epoch}), schedule

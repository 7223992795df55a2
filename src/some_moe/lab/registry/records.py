"""What an experiment is: a config, what a report published about it, and what had to be assumed."""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from some_moe.config import Config, RunConfig
from some_moe.config.parameters import ParameterCount, count_parameters


def check_figure(text: object) -> object:
    """Refuse a figure that is not written as text: a number would not keep its digits."""
    if text is not None and not (isinstance(text, str) and re.fullmatch(r"\d+(\.\d+)?", text)):
        raise ValueError(f"{text!r} is not a printed figure; write it in quotes, such as '0.50'")
    return text


Figure = Annotated[Decimal | None, BeforeValidator(check_figure), PlainSerializer(float, when_used="json-unless-none")]
"""As it was printed. None stands for a figure that was not printed."""


class Source(Config):
    """Where a run is described: the report, and the files that the reports' index names for it."""

    report: str = ""
    files: tuple[str, ...] = ()


class Epoch(Config):
    """One published epoch."""

    epoch: int
    train_loss: Figure
    val_loss: Figure
    perplexity: Figure
    gini: Figure = None
    entropy_bits: Figure = None


class Trace(Config):
    """The experts that one token chose in one layer, in the printed order."""

    token: str
    layer: int
    experts: tuple[int, ...]


class Published(Config):
    """The printed figures of a run, digit for digit.

    The losses are as their report counts them: the reports v2 to v4 average over padding, so theirs are not
    nats per real token. Gini and entropy are those of `middle_layer`.
    """

    train_loss: Figure = None
    val_loss: Figure = None
    perplexity: Figure = None
    gini: Figure = None
    entropy_bits: Figure = None
    max_entropy_bits: Figure = None
    experts_used: int | None = None
    num_experts: int | None = None
    middle_layer: int | None = None
    total_parameters_millions: Figure = None
    trainable_parameters_millions: Figure = None
    trainable_percent: Figure = None
    steps: int | None = None
    epochs: tuple[Epoch, ...] = ()
    traces: tuple[Trace, ...] = ()
    also_printed: tuple[str, ...] = ()
    """Printed figures that have no field of their own, one sentence each."""
    findings: tuple[str, ...] = ()
    """What the report concluded, in our words. Whether it follows is another matter: see the notes."""


class Afterwards(Config):
    """What is done with a trained run, where that is what the experiment is about."""

    command: str
    """A command line; RUN stands for the run's folder, and other words in capitals for texts of one's own."""
    row: str
    """Which of what it prints is this experiment's."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One named run."""

    name: str
    series: str
    title: str
    config: RunConfig
    source: Source
    published: Published | None = None
    assumed: tuple[str, ...] = ()
    """Dotted config fields that the report does not state. What no report mentions is off."""
    notes: tuple[str, ...] = ()
    """Contradictions and inferences."""
    derived_from: str | None = None
    question: str = ""
    afterwards: Afterwards | None = None

    @property
    def steps(self) -> int | None:
        """Optimizer steps, or None where the number of stories or of rows is not known beforehand."""
        return self.config.known_steps

    @property
    def parameters(self) -> ParameterCount:
        return count_parameters(self.config.model)

"""What an experiment is: a config, what a report published about it, and what had to be assumed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from some_moe.config import RunConfig
from some_moe.config.parameters import ParameterCount, count_parameters


@dataclass(frozen=True)
class Source:
    """Where a run is described: the report, and the files that the reports' index names for it."""

    report: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Epoch:
    """One published epoch. None stands for a figure that was not printed."""

    epoch: int
    train_loss: Decimal | None
    val_loss: Decimal | None
    perplexity: Decimal | None
    gini: Decimal | None = None
    entropy_bits: Decimal | None = None


@dataclass(frozen=True)
class Trace:
    """The experts that one token chose in one layer, in the printed order."""

    token: str
    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Published:
    """The printed figures of a run, digit for digit. None stands for a figure that was not printed.

    The losses are as their report counts them: the reports v2 to v4 average over padding, so theirs are not
    nats per real token. Gini and entropy are those of `middle_layer`.
    """

    train_loss: Decimal | None = None
    val_loss: Decimal | None = None
    perplexity: Decimal | None = None
    gini: Decimal | None = None
    entropy_bits: Decimal | None = None
    max_entropy_bits: Decimal | None = None
    experts_used: int | None = None
    num_experts: int | None = None
    middle_layer: int | None = None
    total_parameters_millions: Decimal | None = None
    trainable_parameters_millions: Decimal | None = None
    trainable_percent: Decimal | None = None
    steps: int | None = None
    epochs: tuple[Epoch, ...] = ()
    traces: tuple[Trace, ...] = ()
    also_printed: tuple[str, ...] = ()
    """Printed figures that have no field of their own, one sentence each."""
    findings: tuple[str, ...] = ()
    """What the report concluded, in our words. Whether it follows is another matter: see the notes."""


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

    @property
    def steps(self) -> int | None:
        """Optimizer steps, or None where the number of stories or of rows is not known beforehand."""
        return self.config.known_steps

    @property
    def parameters(self) -> ParameterCount:
        return count_parameters(self.config.model)

    def derive(
        self, name: str, changes: Mapping[str, Any], *, series: str, title: str, question: str,
        source: Source | None = None, notes: tuple[str, ...] = (),
    ) -> "Experiment":  # fmt: skip
        """Return this run under a new name with dotted fields (or whole rooms) replaced."""
        chosen = tuple(changes)
        return replace(
            self,
            name=name,
            series=series,
            title=title,
            config=self.config.override({"name": name, "experiment": name, **changes}),
            source=source or self.source,
            published=None,
            # What a study sets itself, or replaces with its whole room, is no longer assumed.
            assumed=tuple(f for f in self.assumed if f not in chosen and f.split(".")[0] not in chosen),
            notes=notes,
            derived_from=self.name,
            question=question,
        )


def figure(text: str | None) -> Decimal | None:
    """Read one printed figure; None and "-" stand for one that was not printed."""
    return None if text in (None, "-") else Decimal(str(text))


def read_epochs(table: str) -> tuple[Epoch, ...]:
    """Read lines of: epoch, train loss, val loss, perplexity, gini, entropy in bits ("-": not printed)."""
    epochs = []
    for line in table.strip().splitlines():
        number, *figures = line.split()
        train_loss, val_loss, perplexity, gini, entropy = map(figure, figures)
        epochs.append(Epoch(int(number), train_loss, val_loss, perplexity, gini, entropy))
    return tuple(epochs)

"""Reads experiments from YAML; the head of published.yaml says how they are written.

All is checked as it is read, and what is wrong with an entry is said with its name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BeforeValidator, ConfigDict, Field

from some_moe.config import Config, ConfigError, RunConfig, did_you_mean
from some_moe.lab.registry.records import Afterwards, Epoch, Experiment, Published, Source

FIELDS = dict.fromkeys(RunConfig.field_names())
EPOCH = list(Epoch.model_fields)
DEFAULTS = Experiment(name="", series="", title="", config=RunConfig(), source=Source())
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where that is installed
T = TypeVar("T")


def flatten(lines: Any) -> list[Any]:
    """Take apart the lists within a list, by which entries share some of their lines."""
    return [line for part in lines for line in flatten(part)] if isinstance(lines, list) else [lines]


def read_epochs(table: str) -> list[dict[str, str | None]]:
    """Read a line an epoch: its number and its figures in the order of `Epoch` ("-": not printed)."""
    rows = [line.split() for line in table.strip().splitlines()]
    for row in rows:
        if len(row) != len(EPOCH):
            raise ConfigError(f"epochs must be lines of {', '.join(EPOCH)}, but there is {' '.join(row)!r}")
    return [{name: None if text == "-" else text for name, text in zip(EPOCH, row, strict=True)} for row in rows]


def read_published(values: Any) -> Any:
    """Take the figures of the last epoch for the final ones, where no others are given."""
    if not isinstance(values, dict):
        return values
    epochs = read_epochs(str(values.get("epochs", "")))
    final = {name: text for name, text in epochs[-1].items() if name != "epoch"} if epochs else {}
    return final | values | {"epochs": epochs}


Lines = Annotated[tuple[str, ...], BeforeValidator(flatten)]


class Entry(Config):
    """An experiment as it is written, or a base, which is an experiment that nobody runs."""

    base: str = ""
    changes: dict[str, Any] = Field(default_factory=dict)
    assumed: Lines = ()
    title: str = ""
    question: str = ""
    source: str = ""
    notes: Lines = ()
    afterwards: Afterwards | None = None
    published: Annotated[Published | None, BeforeValidator(read_published)] = None


class Series(Config):
    """Experiments, and what they share: whatever an entry can hold."""

    model_config = ConfigDict(extra="allow")

    experiments: dict[str, dict[str, Any]] = Field(default_factory=dict)


class File(Config):
    """One file. Its sources and bases are known in all files after it too."""

    sources: dict[str, Source] = Field(default_factory=dict)
    shared: dict[str, Any] = Field(default_factory=dict)
    bases: dict[str, dict[str, Any]] = Field(default_factory=dict)
    series: dict[str, Series] = Field(default_factory=dict)


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Say where it is that something is wrong."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def find(what: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ConfigError(f"{name!r} is not a {what}{did_you_mean(name, list(known))}")
    return known[name]


@dataclass(frozen=True)
class Catalogue:
    """All that has been read: an entry may start from any base and any experiment above it, or from the defaults."""

    sources: dict[str, Source] = field(default_factory=dict)
    bases: dict[str, Experiment] = field(default_factory=lambda: {"": DEFAULTS})
    experiments: dict[str, Experiment] = field(default_factory=dict)

    def read(self, name: str, text: str) -> tuple[Experiment, ...]:
        """Add the file `name`, and return its experiments in their order."""
        num_known = len(self.experiments)
        with naming(name):
            file = File(**yaml.load(text, LOADER))
            self.sources.update(file.sources)
            for base, values in file.bases.items():
                with naming(base):
                    self.bases[base] = self.build(base, Entry(**values))
            for title, series in file.series.items():
                shared = series.model_extra or {}
                for entry, own in series.experiments.items():
                    with naming(entry):
                        notes = [own.get("notes", []), shared.get("notes", [])]
                        both = Entry(**{**shared, **own, "notes": notes})
                        self.experiments[entry] = self.build(entry, both, series=title)
        return tuple(self.experiments.values())[num_known:]

    def build(self, name: str, entry: Entry, series: str = "") -> Experiment:
        """Make an experiment of a series, or a base, which is of none; assumed fields stand in the config's order."""
        starts = self.bases | self.experiments
        if name in starts:
            raise ConfigError("the name is taken; find another")
        if series and not entry.title:
            raise ConfigError("an experiment needs a title")
        base = find("base", entry.base, starts)
        for one in entry.assumed:
            find("field", one, FIELDS)
        # What a study sets itself, or replaces with its whole room, is no longer assumed.
        settled = entry.changes if series and entry.published is None else {}
        inherited = {one for one in base.assumed if one not in settled and one.split(".")[0] not in settled}
        assumed = inherited.union(entry.assumed)
        return Experiment(
            name=name,
            series=series,
            title=entry.title,
            config=base.config.override({"name": name, "experiment": name, **entry.changes}),
            source=find("source", entry.source, self.sources) if series else Source(),
            published=entry.published,
            assumed=tuple(one for one in FIELDS if one in assumed),
            notes=entry.notes,
            derived_from=entry.base if entry.base in self.experiments else None,
            question=entry.question,
            afterwards=entry.afterwards,
        )

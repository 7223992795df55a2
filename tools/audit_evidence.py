"""What the audit rests on: the measured runs, and trained models scored again in rows of several lengths."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError
from some_moe.lab.published import Comparison, Result, Spread, compare_experiment, finite_number
from some_moe.lab.registry import EXPERIMENTS

LENGTHS = "lengths-*.json"
COMMAND = "some eval RUN --seq-lens 256,512 --json"
PLACES = {experiment.name: place for place, experiment in enumerate(EXPERIMENTS)}


@dataclass(frozen=True)
class Length:
    """One run, one seed for each record, scored in rows of `seq_len` on one split of its data."""

    run: str
    split: str
    seq_len: int
    records: Sequence[Mapping[str, Any]]

    def find(self, name: str) -> Spread | None:
        """A figure over the seeds that have it."""
        return gather(finite_number(record.get(name)) for record in self.records)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that was measured."""

    results: Sequence[Result] = ()
    lengths: Sequence[Length] = ()

    def part(self, names: Iterable[str]) -> tuple[list[Comparison], list[str]]:
        """The named experiments that were measured, and the names of those that were not."""
        found = {name: [result for result in self.results if result.experiment.name == name] for name in names}
        measured = [compare_experiment(results[0].experiment, results) for results in found.values() if results]
        return measured, [name for name, results in found.items() if not results]


def gather(values: Iterable[float | None]) -> Spread | None:
    """One figure over several seeds; None where no seed has it."""
    found = tuple(value for value in values if value is not None)
    return Spread(found) if found else None


def read_lengths(folder: Path) -> list[Length]:
    """Read FOLDER/lengths-*.json, as `some eval RUN --seq-lens … --json` prints them: runs in the registry's order."""
    rows: dict[tuple[str, str, int], dict[int, Mapping[str, Any]]] = {}
    for file in sorted(folder.glob(LENGTHS)):
        run, split, seed, found = _read_file(file)
        for row in found:
            seeds = rows.setdefault((run, split, row["seq_len"]), {})
            if seed in seeds:
                raise ConfigError(f"{str(file)!r} holds {run} with seed {seed} once more; keep one of these files")
            seeds[seed] = row
    ordered = sorted(rows, key=lambda key: (PLACES.get(key[0], len(PLACES)), key))
    return [Length(*key, list(rows[key].values())) for key in ordered]


def _read_file(file: Path) -> tuple[str, str, int, list[Mapping[str, Any]]]:
    """Return the run's name, the split, the seed and one row a length."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        run, split, seed, rows = (record[name] for name in ("experiment", "split", "seed", "lengths"))
        named = isinstance(run, str) and run != "" and isinstance(split, str) and isinstance(seed, int)
        whole = named and all(isinstance(row["seq_len"], int) for row in rows)
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ConfigError(f"{str(file)!r} is not what `{COMMAND}` prints for a registered run; measure it again")
    return run, split, seed, rows

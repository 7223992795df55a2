"""The run folders below a place, at a glance: from what they say of themselves, in milliseconds and without torch."""

import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError
from some_moe.layout import Style, format_table, make_table, number_columns, text_column
from some_moe.system.reading import clean, parse_json, read_object, read_text

DEEPEST = 3  # folders below the place that are looked into
TAIL = 1 << 16  # bytes at the end of a log, in which its last lines are
SETTING = re.compile(r"^  (\w+): (\w+)$", re.MULTILINE)

COLUMNS = (
    text_column("run", "run"),
    text_column("state", "state"),
    *number_columns(step=",", steps=",", val_loss=".4f", test_loss=".4f"),
    text_column("changed", "changed"),
)


def format_runs(place: str, runs: list[dict[str, Any]], *, width: int | None, style: Style) -> str:
    """What `some runs` prints."""
    if not runs:
        return f"no runs in {clean(place)}; `some train` makes one\n"
    shown = [run | {"changed": run["changed"][:16].replace("T", " ")} for run in runs]
    return "\n".join(format_table(*make_table(COLUMNS, shown), width=width, style=style)) + "\n"


def list_runs(place: str | Path) -> list[dict[str, Any]]:
    """One object a run, the one that changed last at the end."""
    if not Path(place).is_dir():
        raise ConfigError(f"there is no folder {clean(str(place))!r}; name one that holds runs")
    return sorted((describe_run(folder) for folder in find_runs(Path(place))), key=lambda run: run["changed"])


def find_runs(place: Path, depth: int = 0) -> Iterator[Path]:
    """Folders with a config.yaml; nothing is looked for within one."""
    if (place / "config.yaml").is_file():
        yield place
        return
    if depth == DEEPEST:
        return
    with os.scandir(place) as entries:
        folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    for folder in folders:
        if os.access(folder, os.R_OK | os.X_OK):
            yield from find_runs(Path(folder), depth + 1)


def describe_run(folder: Path) -> dict[str, Any]:
    """Name, state, step of steps, losses and last change of a run; what cannot be read is None."""
    files = [folder / name for name in ("config.yaml", "metrics.jsonl", "result.json")]
    changed = max(file.stat().st_mtime for file in files if file.exists())
    found: dict[str, Any] = {"run": clean(str(folder)), "state": "unfinished"}
    found |= {"step": None, "steps": None, "val_loss": None, "test_loss": None}
    try:
        if files[2].exists():
            result = read_object(files[2])
            steps = number(result.get("steps"))
            found |= {"state": str(result.get("status")), "step": steps, "steps": steps}
            found |= {name: number(result.get(name)) for name in ("val_loss", "test_loss")}
        elif (folder / "grown.json").exists() and read_object(folder / "grown.json").get("merged"):
            found["state"] = "merged"
        else:
            found["steps"] = count_steps(read_text(files[0], TAIL))
            for line in last_lines(files[1]):
                found |= {name: line[name] for name in ("step", "val_loss") if number(line.get(name)) is not None}
    except (ConfigError, OSError):
        found["state"] = "damaged"
    return found | {"changed": datetime.fromtimestamp(changed, UTC).isoformat(timespec="seconds")}


def number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def last_lines(log: Path) -> list[dict[str, Any]]:
    """The objects at the end of a log, those that can be read."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = file.read(TAIL).splitlines()
    found = []
    for line in lines:
        try:
            found.append(parse_json(line))
        except ValueError:  # cut off, or being written
            continue
    return [line for line in found if isinstance(line, dict)]


def count_steps(config: str) -> int | None:
    """`RunConfig.known_steps` from a saved config.yaml's lines: YAML would take longer than all the rest."""
    settings = dict(SETTING.findall(config))
    numbers = {name: int(value) for name, value in settings.items() if value.isdecimal() and len(value) < 19}
    most = numbers.get("max_steps")
    if "train_subset_size" not in numbers or settings.get("batching") == "packed" or "global_batch_tokens" in numbers:
        return most
    steps = numbers["train_subset_size"] // max(1, numbers.get("batch_size", 1)) * numbers.get("epochs", 1)
    return steps if most is None else min(most, steps)

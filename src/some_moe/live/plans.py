"""Queues and sweeps: how their jobs stand, as the files beside the runs tell; read anew when one of them changes."""

import os
import time
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError
from some_moe.lab.sweep import OUTCOME, SPACE, format_value
from some_moe.live.logs import number
from some_moe.system.claims import RUNNING, Claims
from some_moe.system.files import inside
from some_moe.system.reading import clean, read_object

QUEUE, CLAIMS = "queue.json", ".claims"
STATES = ("done", "pruned", "running", "interrupted", "failed", "waiting")
MOST_JOBS, MOST_BYTES = 1_000, 1 << 24
AGAIN_SECONDS = 15.0  # a worker that falls silent changes no file


class Plans:
    """Of each folder that holds runs: its queue or sweep."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[float, ...], dict[str, Any] | None]] = {}

    def read(self, folder: Path) -> dict[str, Any] | None:
        """kind, total and jobs (name, state and reason of each that is listed), of a sweep the best; None without."""
        stamps = (*(stamp_of(folder / name) for name in (QUEUE, SPACE, OUTCOME, CLAIMS)),)
        now = (*stamps, time.monotonic() // AGAIN_SECONDS if any(stamps) else 0.0)
        if folder not in self._known or self._known[folder][0] != now:
            try:
                found = read_queue(folder) if stamps[0] else read_sweep(folder) if stamps[1] else None
            except (ConfigError, OSError):
                found = None
            self._known[folder] = (now, found)
        return self._known[folder][1]

    def find(self, run: Path) -> dict[str, str]:
        """What is said of one run."""
        jobs = (self.read(run.parent) or {"jobs": []})["jobs"]
        return next((job for job in jobs if run.name == job["name"] or run.name.startswith(f"{job['name']}-seed-")), {})


def read_queue(folder: Path) -> dict[str, Any]:
    jobs = list_objects(read_small(folder, QUEUE).get("jobs"))
    about = [{name: str(job.get(name, ""))[:300] for name in ("name", "state", "reason")} for job in jobs]
    return {"kind": "queue", "total": len(about), "jobs": about}


def read_sweep(folder: Path) -> dict[str, Any]:
    """What sweep.json told when a trial last ended, and who has claimed a trial since."""
    sweep = read_small(folder, SPACE).get("sweep")
    told = read_small(folder, OUTCOME) if (folder / OUTCOME).is_file() else {}
    jobs = {str(one.get("name"))[:100]: one for one in list_objects(told.get("trials"))}
    for name, claim in sorted(Claims(inside(folder, CLAIMS)).read().items())[:MOST_JOBS]:
        silent = claim.state == RUNNING and time.time() - claim.touched > claim.dead_after
        jobs[clean(name)] = jobs.get(name, {}) | {"state": "interrupted" if silent else claim.state}
    wanted = number(sweep.get("trials")) if isinstance(sweep, dict) else None
    found: dict[str, Any] = {"kind": "sweep", "total": max(len(jobs), int(wanted or 0)), "best": None}
    found["jobs"] = [
        {"name": name, "state": job["state"], "reason": str(job.get("reason", ""))[:300]}
        for name, job in jobs.items() if job.get("state") in STATES
    ]  # fmt: skip
    best = told.get("best")
    if isinstance(best, dict) and number(best.get("value")) is not None and isinstance(best.get("settings"), dict):
        settings = ", ".join(f"{name} {format_value(value)}" for name, value in best["settings"].items())[:500]
        found["best"] = {"name": str(best.get("name"))[:100], "value": best["value"], "settings": settings}
        found["best"]["metric"] = str(told.get("metric"))[:40].replace("_", " ")
    return found


def read_small(folder: Path, name: str) -> dict[str, Any]:
    path = inside(folder, name)
    if measure(path) > MOST_BYTES:
        raise ConfigError(f"{name} has more than the {MOST_BYTES:,} bytes that are read")
    return read_object(path)


def list_objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)][:MOST_JOBS] if isinstance(value, list) else []


def measure(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def stamp_of(path: Path) -> int:
    """When a file was written; 0 where there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0

"""The runs that are watched: what their folders say, whatever happens to them meanwhile. Nothing is written.

A run is known by a number that the server gives it: no path ever comes from outside.
"""

import math
import os
import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError, RunConfig
from some_moe.lab.folders import find_runs
from some_moe.live.logs import WHOLE, Place, number, parse_line, pick_metrics, read_piece, thin
from some_moe.live.plans import Plans, measure
from some_moe.system.files import inside
from some_moe.system.reading import clean, refuse_irregular
from some_moe.system.records import Grown
from some_moe.training.run_folder import LOCK, RunFolder, list_steps

FRESH_SECONDS = 0.45  # so long what was seen is not looked at again, however many ask
QUIET_SECONDS = 30.0  # a run that nobody on this machine holds, and that wrote nothing for so long, is dead
MOST_RUNS = 1_000
TAIL = 1 << 16  # bytes at the end of a log in which its last lines are
CURVE_POINTS = 400
FEW = 1_000  # lines that are told in full, however long the log is
NUMBERS = ("step", "tokens", "train_loss", "val_loss", "tokens_per_second")
RESULT = ("val_loss", "best_val_loss", "test_loss", "tokens_per_second", "seconds")


class Watched:
    """One run folder that may grow, be cut back, end, or vanish while it is looked at."""

    def __init__(self, key: str, path: Path, shown: str, plans: Plans) -> None:
        self.key, self.path, self.shown, self.plans = key, path, shown, plans
        self.config: RunConfig | None = None
        self.grown: Grown | None = None
        self.summary: dict[str, Any] = {}
        self.snapshots: tuple[int, ...] = ()
        self.checkpoints: tuple[int, ...] = ()
        self.from_checkpoints = False  # whether keys are those of checkpoints, for want of snapshots
        self._kept: tuple[int, ...] = ()  # snapshots of keys, without checkpoints
        self.sizes = {"metrics": 0, "samples": 0}  # bytes of the logs
        self.version = 0  # rises when the summary changes
        self._seen: dict[str, Any] = {}  # what each file was like when it was read
        self._held = False  # whether a process was seen to train in it
        self._left: float | None = None  # when it was seen to be gone
        self._place, self._losses = Place(), no_losses()  # how far the curve was read
        self._looked = 0.0
        self._lock, self._reading = threading.Lock(), threading.Lock()

    def refresh(self) -> None:
        """Look at the folder, unless somebody just did."""
        with self._lock:
            if time.monotonic() - self._looked < FRESH_SECONDS:
                return
            try:
                found = self._look()
            except (ConfigError, OSError) as error:
                gone = not self.path.is_dir()
                note = "the folder is gone" if gone else clean(str(error))[:300]
                found = self.summary | {"state": "gone" if gone else "damaged", "note": note}
            found = {"id": self.key, "name": self.shown, "folder": self.shown, "has_keys": False} | found
            if found != self.summary:
                self.summary, self.version = found, self.version + 1
            self._looked = time.monotonic()

    def _look(self) -> dict[str, Any]:
        folder = RunFolder(self.path)
        self.sizes = {name: measure(self.path / f"{name}.jsonl") for name in self.sizes}
        if self._changed("config.yaml"):
            self.config = folder.read_config()
            grown = folder.read_object("grown.json")
            self.grown = None if grown is None else Grown.model_validate(grown)
        config = self.config
        if config is None or not folder.config_file.is_file():
            raise FileNotFoundError(2, "it has no config.yaml", str(self.path))
        self._list_frames(folder)
        found: dict[str, Any] = {
            "name": clean(config.name), "experiment": config.experiment, "steps": config.known_steps,
            "published": find_published(config.experiment), "note": "", "state": "training",
            "has_keys": config.model.ffn == "some" and config.model.router != "hash",
            "has_experts": config.model.ffn == "some", "router": config.model.router,
            "layers": config.model.num_layers, "experts": config.model.num_experts, "top_k": config.model.top_k,
            "seq_len": config.data.seq_len, "snapshots": list(self.snapshots), "checkpoints": list(self.checkpoints),
            "respawns_possible": config.gravity.respawn_below > 0, "branches": self._list_branches(),
            "analysed": (self.path / "analysis" / "collected.safetensors").is_file(),
        }  # fmt: skip
        found |= self._read_tail()
        result = folder.read_object("result.json") if self._changed("result.json") else self._seen.get("result")
        if (self.path / "result.json").exists() and result is not None:
            self._seen["result"] = result
            found |= {name: number(result.get(name)) for name in RESULT if number(result.get(name)) is not None}
            found |= {"step": result.get("steps"), "steps": result.get("steps"), "state": "finished"}
            if result.get("status") == "stopped early":
                found["note"] = "it stopped early, as nothing more was gained"
            return found | {"seconds_left": None}
        if self.grown is not None and self.grown.merged:
            return found | {"state": "merged", "note": "put together, and not trained", "steps": None}
        found |= self._find_state(found["changed"])
        return found | {"seconds_left": self._foretell(found) if found["state"] == "training" else None}

    def _changed(self, name: str) -> bool:
        """Whether a file is another than at the last look."""
        try:
            about = os.stat(self.path / name)
        except OSError:
            now = None
        else:
            now = (about.st_ino, about.st_size, about.st_mtime_ns)
        before, self._seen[name] = self._seen.get(name), now
        return before != now or now is None

    def _list_frames(self, folder: RunFolder) -> None:
        """The steps whose keys can be shown, and those that have a checkpoint."""
        if self._changed("checkpoints"):
            whole = (step for step, at in list_steps(folder.checkpoints).items() if (at / "state.json").is_file())
            self.checkpoints = tuple(whole)
        if self._changed("keys"):
            self._kept = tuple(list_steps(folder.snapshots, ".safetensors"))
        self.snapshots, self.from_checkpoints = self._kept or self.checkpoints, not self._kept

    def _list_branches(self) -> list[dict[str, Any]]:
        """The parts of a library, in order: the base and what was grown."""
        if self.grown is None or self.config is None:
            return []
        grown = [{"name": clean(one.name), "experts": one.experts} for one in self.grown.branches]
        base = self.config.model.num_experts - sum(one.experts for one in self.grown.branches)
        return [{"name": "base", "experts": max(0, base)}, *grown]

    def _read_tail(self) -> dict[str, Any]:
        """What the last lines of the log say."""
        path = inside(self.path, "metrics.jsonl")
        changed = self._changed("metrics.jsonl")
        if not changed and "tail" in self._seen:
            return dict(self._seen["tail"])
        found: dict[str, Any] = {"step": 0, "changed": os.stat(self.path / "config.yaml").st_mtime}
        if path.exists():
            refuse_irregular(path)
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - TAIL))
                data = file.read(TAIL)
                found |= {"changed": os.fstat(file.fileno()).st_mtime, "size": size}
            for line in map(parse_line, data[: data.rfind(b"\n") + 1].splitlines()):
                found |= {name: line[name] for name in NUMBERS if line and number(line.get(name)) is not None}
        self._seen["tail"] = found
        return dict(found)

    def _find_state(self, changed: float) -> dict[str, Any]:
        """Whether a run without a result is training, or died."""
        held, now = is_held(self.path / LOCK), time.time()
        if held:
            self._held, self._left = True, None
        elif self._held and self._left is None:
            self._left = now
        job = {} if held else self.plans.find(self.path)
        if job.get("state") == "pruned":
            return {"state": "pruned", "note": "its sweep stopped it: others did better at the same step"}
        if job.get("state") == "failed":
            return {"state": "failed", "note": job["reason"] or "its queue says that it failed"}
        # Another machine may go on with what a process of this one has left.
        if held or (now - changed < QUIET_SECONDS and (self._left is None or changed > self._left)):
            return {"state": "training"}
        return {"state": "killed", "note": "it ended before its time; some resume goes on with it"}

    @staticmethod
    def _foretell(found: dict[str, Any]) -> float | None:
        """Seconds of training steps that are left, at the speed so far."""
        step, steps, tokens, speed = (found.get(name) for name in ("step", "steps", "tokens", "tokens_per_second"))
        if not step or not steps or not tokens or not speed or step > steps:
            return None
        return float((steps - step) * tokens / speed / step)

    def read_curve(self) -> dict[str, Any]:
        """The losses in a few hundred points; of a log that grew only what is new is read."""
        with self._reading:
            while True:
                piece = read_piece(self.path, "metrics.jsonl", self._place)
                self._place = piece.place
                if piece.again:
                    self._losses = no_losses()
                if not piece.lines:
                    break
                rows = pick_metrics(thin(piece.lines, stride(self.path, len(piece.lines))))
                for losses, kind in zip(self._losses.values(), ("steps", "evaluations"), strict=True):
                    for row in rows[kind]:
                        losses.extend((row[0], math.nan if row[2] is None else row[2]))
            return {name: pick_points(losses) for name, losses in self._losses.items()}


def no_losses() -> dict[str, "array[float]"]:
    """Step and loss in turn, of a kind each: so packed that a thousand runs are remembered."""
    return {"train": array("d"), "val": array("d")}


def pick_points(losses: "array[float]") -> list[list[float | None]]:
    points = [[int(step), number(loss)] for step, loss in zip(losses[::2], losses[1::2], strict=True)]
    every = max(1, len(points) // CURVE_POINTS)
    return [*points[::every], *(points[-1:] if (len(points) - 1) % every else [])]


def stride(path: Path, many: int) -> int:
    """Of how many lines one is shown, where many of a long log are read at once."""
    return 1 if many <= FEW else 1 + measure(path / "metrics.jsonl") // WHOLE


class Watch:
    """All runs that are watched. Folders that hold runs are looked into again, for a queue makes new ones."""

    def __init__(self, places: Sequence[str | Path]) -> None:
        self.sources = [Path(place) for place in places]
        self.runs: dict[str, Watched] = {}
        self.plans, self.queues = Plans(), list[dict[str, Any]]()
        self._known: dict[str, str] = {}
        self._looked = self._refreshed = 0.0
        self._lock = threading.Lock()
        for source in self.sources:
            if not source.is_dir():
                raise ConfigError(f"there is no folder {clean(str(source))!r}; name a run, or a folder that holds runs")
        self.find()
        for source in self.sources:
            if not any(run.path == source or source in run.path.parents for run in self.runs.values()):
                raise ConfigError(f"{clean(str(source))!r} is no run and holds none; `some train` makes one")

    def find(self) -> None:
        """Add the runs that have come since."""
        with self._lock:
            if time.monotonic() - self._looked < 2 * FRESH_SECONDS:
                return
            for source in self.sources:
                for path in self._list(source):
                    place = os.path.realpath(path)
                    if place not in self._known and len(self.runs) < MOST_RUNS:
                        key = self._known[place] = str(len(self.runs))
                        self.runs[key] = Watched(key, path, clean(str(path)), self.plans)
            self._looked = time.monotonic()

    @staticmethod
    def _list(source: Path) -> Iterable[Path]:
        try:
            return sorted(find_runs(source))
        except OSError:
            return []

    @property
    def is_stale(self) -> bool:
        return time.monotonic() - self._refreshed >= FRESH_SECONDS

    def refresh(self) -> None:
        """Look at everything, unless somebody just did."""
        self.find()
        for run in list(self.runs.values()):
            run.refresh()
        self.queues = self.list_queues()
        self._refreshed = time.monotonic()

    def list_queues(self) -> list[dict[str, Any]]:
        """How the queues and sweeps stand whose runs are watched."""
        folders = {run.path.parent for run in self.runs.values()} | {one for one in self.sources if one.is_dir()}
        plans = [(clean(str(folder)), self.plans.read(folder)) for folder in sorted(folders)]
        return [{"folder": folder} | plan for folder, plan in plans if plan and plan["total"]]


def is_held(lock: Path) -> bool | None:
    """Whether a process of this machine holds a run's lock; None where that cannot be seen.

    The system's own list is read: to try the lock could be in the way of a run that is about to take it.
    """
    try:
        inode = os.stat(lock).st_ino
        lines = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return any(line.split()[5].endswith(f":{inode}") for line in lines if " FLOCK " in line and len(line.split()) > 5)


@cache
def find_published(experiment: str | None) -> dict[str, Any] | None:
    """The losses that a report printed of an experiment."""
    if experiment is None:
        return None
    from some_moe.lab.registry import EXPERIMENTS

    for one in EXPERIMENTS:
        printed = one.published
        if one.name == experiment and printed is not None and printed.val_loss is not None:
            return {"val_loss": float(printed.val_loss), "padded": one.config.data.loss_on == "all_positions"}
    return None

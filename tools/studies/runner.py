"""Runs a slice of the plan on one machine within a time: many runs share the chip, and records are all that is kept.

It is the product's own queue, with three differences: what is run next follows from what was found (tuning goes stage
by stage), no run is begun that would not end in time, and a run's folder goes as soon as its record is written.
"""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from some_moe.config import ConfigError
from some_moe.data.dataset import prepare
from some_moe.lab.queue import Queue, Turn
from some_moe.system.files import write_whole
from some_moe.system.processes import python_command
from some_moe.system.reading import parse_json, read_object
from some_moe.training.run_folder import RunFolder
from tools.studies.costs import GPU_BYTES, START, Cost, estimate
from tools.studies.plan import Plan, Run, Study
from tools.studies.records import HOME, Record, Records, pack, slim

MARGIN = 1.25  # by which a run may take longer than was foreseen
GRACE = 15.0  # seconds after the time is over in which runs may still end
HOPELESS = 4  # runs that fail before any is done: the fault is not theirs, and a lent chip is not spent on it
ROOM = 0.87  # of the chip's memory that is given away
PAUSE = 0.1
DIVERGED = ("became nan", "became inf")
MPS = "nvidia-cuda-mps-control"


class Slice(Queue):
    """The runs of one study that are open, as many at once as there are workers."""

    def __init__(
        self,
        plan: Plan,
        study: Study,
        *,
        data: Path,
        out: Path,
        work: Path,
        records: Records,
        minutes: float,
        workers: int,
        most: int | None,
        small: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self.plan, self.study, self.data, self.home = plan, study, data, out / HOME
        self.small, self.most = small, most
        self.known: dict[str, Record] = dict(records)  # what is measured, here and before
        self.new: dict[str, Record] = {}  # what is measured here
        self.begun: dict[str, Turn] = {}  # by the place of the record
        self.active: dict[str, Cost] = {}
        self.began, self.seconds = time.monotonic(), 60 * minutes
        self.crowding: list[float] = []  # seconds that GPU seconds took, of the runs that ended
        self.late = False
        self.choosing = threading.Lock()
        self.runs: dict[str, Run] = {}  # by the job's name
        first = next(self.open_runs(), None)
        if first is None:
            raise ConfigError(f"the slice {study.name!r} is done, as far as it can be known by now; choose another")

        def say_when(text: str) -> None:
            say(f"[{time.monotonic() - self.began:4.0f} s, {len(self.new)} done] {text}")

        super().__init__([self._make_job(first)], work, work / "records", say_when, at_once=workers)
        self.turns = []

    # --- what is next -----------------------------------------------------------------------------------------

    def open_runs(self) -> Iterator[Run]:
        """Runs that are known by now, neither done nor begun, in the plan's order."""
        for arm in self.study.arms:
            for run in self.plan.known_runs(arm, self.known):
                if run.record not in self.known and run.record not in self.begun:
                    yield replace(run, small=self.small)

    def _make_job(self, run: Run) -> Any:
        job = run.make_job(self.data)
        self.runs[job.name] = run
        return job

    @property
    def time_left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def foresee(self, cost: Cost) -> float:
        """Seconds that a run will take beside the others."""
        crowd = median(self.crowding) if len(self.crowding) >= 3 else 0.5 * self.at_once
        return START + cost.gpu_seconds * max(1.0, crowd)

    def _choose(self) -> Turn | None:
        """The first open run that ends in time and finds room; None where there is none at the moment."""
        with self.choosing:
            if self.late or self.stopped or self.signals.count or len(self.turns) == self.most or self.is_hopeless:
                return None
            used = sum(cost.used_bytes for cost in self.active.values())
            for run in self.open_runs():
                cost = estimate(run)
                free = GPU_BYTES - used
                if used and (used + cost.used_bytes > ROOM * GPU_BYTES or cost.needed_bytes > 1.4 * free):
                    continue
                if MARGIN * self.foresee(cost) > self.time_left:
                    continue
                job = self._make_job(run)
                folder = RunFolder(self.out / job.name)
                turn = Turn(len(self.turns) + 1, job, folder, self.results / f"{job.name}.json", "new", "waiting")
                self.turns.append(turn)
                self.begun[run.record] = turn
                self.active[run.record] = cost
                return turn
        return None

    @property
    def is_hopeless(self) -> bool:
        return not self.new and sum(turn.state == "failed" for turn in self.turns) >= HOPELESS

    # --- running ----------------------------------------------------------------------------------------------

    def _work(self, pool: ThreadPoolExecutor) -> None:
        watch = threading.Timer(max(0.0, self.time_left) + GRACE, self._end)
        watch.daemon = True
        watch.start()
        try:
            list(pool.map(self._serve, range(self.at_once)))
        finally:
            watch.cancel()

    def _end(self) -> None:
        """The time is over: what still runs is ended, and leaves nothing."""
        self.late = True
        for process in list(self.signals.told):
            process.kill()

    def _serve(self, _: int) -> None:
        while not (self.late or self.stopped or self.signals.count):
            turn = self._choose()
            if turn is not None:
                self._do(turn)
            elif self.active:
                time.sleep(PAUSE)  # what is found there may open more
            else:
                return

    def _do(self, turn: Turn) -> None:
        run = self.runs[turn.job.name]
        started = time.monotonic()
        try:
            self._run_job(turn)
            record: dict[str, Any] | None = None
            if turn.state == "done":
                found = read_object(turn.record)
                record = (found if run.arm.is_as_registered else slim(found)) | {"arm": run.arm.key}
                if run.arm.lengths:
                    record["lengths"] = self._score_lengths(turn.folder.path, run.arm.lengths)
                gpu = self.active[run.record].gpu_seconds
                self.crowding.append(max(0.0, time.monotonic() - started - START) / max(gpu, 0.1))
            elif any(word in turn.reason for word in DIVERGED):
                about = {"name": turn.job.name, "experiment": turn.job.experiment.name, "seed": turn.job.seed}
                record = about | {"status": "failed", "reason": turn.reason, "arm": run.arm.key}
            with self.choosing:
                if record is not None:
                    self.known[run.record] = self.new[run.record] = record
                    write_whole(self.home, pack(self.new))
        finally:
            shutil.rmtree(turn.folder.path, ignore_errors=True)
            with self.choosing:
                self.active.pop(run.record, None)

    def _score_lengths(self, folder: Path, lengths: tuple[int, ...]) -> Any:
        """The trained model on rows of other lengths, as `some eval RUN --seq-lens` tells it."""
        words = ["eval", str(folder), "--seq-lens", ",".join(map(str, lengths)), "--json"]
        told = subprocess.run(
            python_command("-m", "some_moe", *words),
            env=super()._environment(self.turns[0].job),
            capture_output=True,
            check=False,
        )
        try:
            found = parse_json(told.stdout)
        except ValueError:
            return {"failed": told.stderr.decode(errors="replace")[-300:]}
        return found.get("lengths", found) if isinstance(found, dict) else found

    # --- what it tells ----------------------------------------------------------------------------------------

    def _title(self, turn: Turn) -> str:
        return f"{self.study.name}/{turn.job.name}: "

    def _save(self) -> None:
        """What stands is in the records."""

    def summary(self) -> str:
        failed = [turn for turn in self.turns if turn.state == "failed"]
        open_now = sum(1 for _ in self.open_runs())
        lines = [f"{len(self.new)} records in {self.home.name}; {open_now} more runs of this slice are known by now"]
        lines += [f"failed: {turn.job.name}: {turn.reason}" for turn in failed]
        if self.is_hopeless:
            lines.append("the first runs all failed, so no other was begun; mend what they name, and begin again")
        return "\n".join(lines)


def run_slice(
    plan: Plan,
    study: Study,
    *,
    data: Path,
    out: Path,
    work: Path,
    records: Records,
    minutes: float,
    workers: int,
    most: int | None = None,
    small: Mapping[str, Any],
    say: Callable[[str], None],
) -> Slice:
    """Prepare the text once, then run what is open; `out` has one file of records, whole at any moment."""
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    queue = Slice(
        plan,
        study,
        data=data,
        out=out,
        work=work,
        records=records,
        minutes=minutes,
        workers=1 if study.is_alone else workers,
        most=most,
        small=small,
        say=say,
    )
    prepare_first(queue, say)
    with sharing(work, say, wanted=queue.at_once > 1):
        queue.run()
    say(queue.summary())
    return queue


def prepare_first(queue: Slice, say: Callable[[str], None]) -> None:
    """Read what the first runs ask for, before many processes wait for one to do it; the rest is read beside."""
    asked: dict[tuple[Any, ...], None] = {}
    for run in islice(queue.open_runs(), queue.at_once):
        data, vocab = run.config.data, run.config.model.vocab_size
        key = (run.arm.data, data.seq_len, data.train_subset_size, data.val_subset_size, vocab)
        if key in asked:
            continue
        asked[key] = None
        started = time.monotonic()
        found = prepare(data.override({"source": str(queue.data / run.arm.data)}), vocab)
        say(f"{run.arm.data}, rows of {data.seq_len}: {len(found.train):,} in {time.monotonic() - started:.0f} s")


@contextmanager
def sharing(work: Path, say: Callable[[str], None], *, wanted: bool) -> Iterator[None]:
    """Let processes share the chip through NVIDIA's MPS, where it is there and not running already."""
    if not wanted or shutil.which(MPS) is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    places = {"CUDA_MPS_PIPE_DIRECTORY": str(work / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(work / "mps-log")}
    for place in places.values():
        Path(place).mkdir(exist_ok=True)
    began = tell_mps(["-d"], b"", os.environ | places)
    say("runs share the chip by MPS" if began else "MPS did not start; runs take turns")
    if began:
        os.environ.update(places)
    try:
        yield
    finally:
        if began:
            tell_mps([], b"quit\n", dict(os.environ))
            for name in places:
                os.environ.pop(name, None)


def tell_mps(words: list[str], text: bytes, environment: Mapping[str, str]) -> bool:
    """Whether the daemon's control did it. One that hangs or cannot start costs half a minute, and no slice."""
    try:
        told = subprocess.run([MPS, *words], input=text, env=environment, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return told.returncode == 0

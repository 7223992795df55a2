"""Jobs in turn, each in a process of its own: what one leaves in memory, or dies of, is no other's concern.

What a job has done is in its run folder, so a queue that was stopped or killed goes on when it is started again.
DIR/queue.json tells how all jobs stand; DIR/logs/NAME-seedS.txt has what each run wrote.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from some_moe.config import ConfigError
from some_moe.files import write_whole
from some_moe.lab.estimate import describe_seconds
from some_moe.lab.jobs import Job, find_standing, folder_of
from some_moe.lab.measured import refuse_other_record, write_record
from some_moe.training.lock import take_lock
from some_moe.training.stopping import TrainingStoppedError

EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")
State = Literal["waiting", "running", "done", "failed", "interrupted"]
STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)  # how a run ends that somebody stopped
QUEUE_FORMAT = 1
SUMMARIZED = ("steps", "val_loss", "val_loss_padded", "perplexity", "tokens_per_second", "seconds")


@dataclass
class Entry:
    """How one job stands: its line in queue.json."""

    name: str
    experiment: str
    seed: int
    state: State = "waiting"
    reason: str = ""  # why it failed, in one sentence
    seconds: float = 0.0  # that its processes took, start and evaluation included
    at_once: int | None = None  # how many runs shared the machine


class Signals:
    """Ctrl-C, a polite kill and a closed terminal: runs in progress are told, and no other is begun.

    A run lives in a process group of its own, so that it hears of each signal once. It stops after the present
    step; told twice, at once; a third time it is killed.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.count = say, 0
        self.told: dict[subprocess.Popen[bytes], int] = {}  # runs in progress: how many signals each has heard of
        self.previous: dict[int, Any] = {}

    def note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.count += 1
        if self.count == 1:
            runs = (
                "the present run saves after its step" if len(self.told) < 2 else "present runs save after their step"
            )
            self.say(f"stopping: {runs}, and no other is begun")
        self.pass_on()

    def pass_on(self) -> None:
        for process, told in list(self.told.items()):
            if told < self.count:
                self.told[process] = self.count
                process.send_signal(signal.SIGKILL if self.count > 2 else signal.SIGINT)

    def wait_for(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a run, passing on what comes meanwhile; return its exit code."""
        self.told[process] = 0
        self.pass_on()  # what came while the process was started
        try:
            return process.wait()
        finally:
            del self.told[process]

    def __enter__(self) -> Self:
        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means what it says
            caught.append(signal.SIGHUP)
        self.previous = {number: signal.signal(number, self.note) for number in caught}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


class Queue:
    """The jobs of one command in one folder."""

    def __init__(
        self, jobs: Sequence[Job], out: Path, results: Path, say: Callable[[str], None], *, at_once: int = 1
    ) -> None:
        self.jobs, self.out, self.results, self.say, self.at_once = jobs, out, results, say, at_once
        self.file = out / "queue.json"
        self.signals = Signals(say)
        self.stopped = False
        self.shows_runs = False  # whether runs may draw on our terminal; else what they print is in their logs
        self.lock: int | None = None
        self.turn = threading.Lock()  # one thread at a time takes a job, or writes queue.json
        # Folders and records that hold something else are refused here, before anything is written.
        self.standings = [find_standing(job, folder_of(job, out)) for job in jobs]
        for job in jobs:
            refuse_other_record(self._record_file(job), job, folder_of(job, out))
        self.entries = [
            Entry(job.name, job.experiment.name, job.seed, "done" if standing == "done" else "waiting")
            for job, standing in zip(jobs, self.standings, strict=True)
        ]
        self.others: list[dict[str, Any]] = []  # jobs of earlier commands
        self._remember()

    @property
    def exit_code(self) -> int:
        states = {entry.state for entry in self.entries}
        if states & {"interrupted", "waiting"}:
            return 130
        return 1 if "failed" in states else 0

    # --- running ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run every job that is not done, `at_once` at a time. One that fails is noted, and the next has its turn."""
        with self._own_folder(), self.signals:
            try:
                self._save()
                self._complete_records()
                waiting = iter(range(len(self.jobs)))
                if self.at_once == 1:
                    self._work(waiting)
                else:
                    with ThreadPoolExecutor(self.at_once) as pool:
                        for worker in [pool.submit(self._work, waiting) for _ in range(self.at_once)]:
                            worker.result()
            except OSError as error:
                raise TrainingStoppedError(
                    f"the queue cannot go on in {self.out} ({error.strerror or error}); run the same command again "
                    "when that is mended"
                ) from None

    def _work(self, waiting: Iterator[int]) -> None:
        """Run one job after another, until none is waiting or somebody stops the queue."""
        while True:
            with self.turn:
                number = None if self.stopped or self.signals.count else next(waiting, None)
            if number is None:
                return
            try:
                self._run_job(number, self.jobs[number], self.entries[number])
            except BaseException:
                self.stopped = True  # the others end with what they are at
                raise

    def _complete_records(self) -> None:
        """Write the records of finished runs that have none: in another folder, or after a kill at the last moment."""
        for job, standing, entry in zip(self.jobs, self.standings, self.entries, strict=True):
            if standing == "done" and not self._record_file(job).is_file():
                write_record(self._record_file(job), job, folder_of(job, self.out), at_once=entry.at_once)

    def _run_job(self, number: int, job: Job, entry: Entry) -> None:
        title = f"[{number + 1}/{len(self.jobs)}] {job.experiment.name}, seed {job.seed}: "
        if self.standings[number] == "done":
            self.say(title + "done already")
            return
        steps = "packed rows" if job.schedule.steps is None else f"{job.schedule.steps:,} steps"
        self.say(title + steps + self._describe_time_left(number))
        entry.state, entry.reason, entry.at_once = "running", "", self.at_once
        self._save()
        folder = folder_of(job, self.out)
        started = time.monotonic()
        code, messages = self._train(job)
        seconds = time.monotonic() - started
        entry.seconds += seconds
        if code == 0 and folder.result_file.is_file():
            write_record(self._record_file(job), job, folder, at_once=entry.at_once)
            entry.state = "done"
            self.say(f"{title}done in {describe_seconds(seconds)}")
        elif code in STOPPED or self.signals.count:
            entry.state, self.stopped = "interrupted", True
            self.say(title + "interrupted")
        else:
            entry.state, entry.reason = "failed", explain_failure(code, messages)
            self.say(f"{title}failed: {entry.reason}")
        self._save()

    def _train(self, job: Job) -> tuple[int, str]:
        """Train one job to its end in a process; return its exit code and what it wrote to its log."""
        log = self.out / "logs" / f"{job.name}.txt"
        log.parent.mkdir(exist_ok=True)
        words = [*job.training_words, "--out", str(self.out / job.name), "--resume", "auto"]
        with log.open("a+b") as file:
            begin = file.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "some_moe", *words],
                stdin=subprocess.DEVNULL,
                stdout=None if self.shows_runs else file,
                stderr=file,
                process_group=0,
                # It holds the folder's lock too, and so keeps others out should it outlive the queue.
                pass_fds=() if self.lock is None else (self.lock,),
            )
            code = self.signals.wait_for(process)
            file.seek(begin)
            return code, file.read().decode("utf-8", errors="replace")

    def _describe_time_left(self, number: int) -> str:
        """What finished jobs say about the rest, this one included; nothing while none has finished."""
        finished = [
            (job.work, entry.seconds)
            for job, entry in zip(self.jobs, self.entries, strict=True)
            if entry.seconds and entry.state == "done"
        ]
        if not finished:
            return ""
        work, seconds = map(sum, zip(*finished, strict=True))
        open_jobs = zip(self.jobs[number:], self.standings[number:], strict=True)
        left = sum(job.work for job, standing in open_jobs if standing != "done")
        return f"; about {describe_seconds(seconds / work * left / self.at_once)} left for the queue"

    def _record_file(self, job: Job) -> Path:
        return self.results / f"{job.name}.json"

    def summarize(self) -> list[dict[str, Any]]:
        """One object a job: how it stands, and the figures of its record where it is done."""
        rows = []
        for job, entry, standing in zip(self.jobs, self.entries, self.standings, strict=True):
            path = self._record_file(job)
            record = json.loads(path.read_text(encoding="utf-8")) if entry.state == "done" else {}
            middle = record["layers"][record["middle_layer"]] if record.get("layers") else {}
            published = job.experiment.published
            rows.append(
                {"experiment": entry.experiment, "seed": entry.seed}
                | {"state": "done already" if standing == "done" else entry.state, "reason": entry.reason}
                | {name: record.get(name) for name in SUMMARIZED}
                | {"gini": middle.get("gini")}
                | {"published_val_loss": float(published.val_loss) if published and published.val_loss else None}
                | {"result": str(path) if record else None}
            )
        return rows

    # --- queue.json and the lock ------------------------------------------------------------------------------

    def _save(self) -> None:
        with self.turn:
            jobs = [*self.others, *map(asdict, self.entries)]
            write_whole(self.file, json.dumps({"format_version": QUEUE_FORMAT, "jobs": jobs}, indent=1) + "\n")

    def _remember(self) -> None:
        """Keep what queue.json says of other jobs, and how these ran so far."""
        if not self.file.is_file():
            return
        try:
            known = {job["name"]: job for job in json.loads(self.file.read_text(encoding="utf-8"))["jobs"]}
            for entry in self.entries:
                before = known.pop(entry.name, {})
                entry.seconds, entry.at_once = float(before.get("seconds", 0.0)), before.get("at_once")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{str(self.file)!r} is damaged; remove it, the runs themselves are whole") from None
        self.others = list(known.values())

    @contextmanager
    def _own_folder(self) -> Iterator[None]:
        """Make the folder, and keep other queues out of it until this one and its last run have ended."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.results.mkdir(parents=True, exist_ok=True)
            self.lock = take_lock(
                self.out / ".queue.lock",
                f"{str(self.out)!r} is in use by another queue, or by a run that one left behind; wait for it to end, "
                "or choose another --out",
            )
        except OSError as error:
            raise ConfigError(
                f"{error.filename!r} cannot be written ({error.strerror}); choose another --out or --results"
            ) from None
        try:
            yield
        finally:
            os.close(self.lock)
            self.lock = None


def explain_failure(code: int, messages: str) -> str:
    """One sentence on why a run failed, from its exit code and what it wrote to stderr."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("some: "):
            return line.removeprefix("some: ")
        if "out of memory" in line.lower() or "can't allocate memory" in line:
            return "memory ran out; lower data.batch_size, or set train.checkpoint_activations"
    if code == -signal.SIGKILL:
        return "its process was killed, perhaps because memory ran out; lower data.batch_size"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    raised = [line for line in lines if EXCEPTION.match(line)]  # advice may follow it, as with errors of CUDA
    return (raised or lines)[-1] if lines else f"its process ended with exit code {code}"

"""Jobs in turn, each in a process of its own: what one leaves in memory, or dies of, is no other's concern.

What a job has done is in its run folder, so a queue that was stopped or killed goes on when it is started again.
DIR/queue.json tells how all jobs stand; DIR/logs/NAME-seedS.txt has what each run wrote.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from some_moe.config import ConfigError, TrainingStoppedError
from some_moe.lab.estimate import count_step_flops, describe_seconds, estimate_job
from some_moe.lab.jobs import Job, Standing, explain_scaling, find_standing
from some_moe.lab.measured import refuse_other_record, write_record
from some_moe.lab.published import finite_number, list_rows
from some_moe.system.files import write_whole
from some_moe.system.processes import list_endings, python_command, python_environment, take_lock
from some_moe.system.reading import read_object
from some_moe.training.run_folder import LOCK, RunFolder

EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")
# How a run ends that somebody stopped, be it before it could listen.
STOPPED = (130, *(-getattr(signal, name, 130) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")))
# A run lives in a process group of its own; Windows passes Ctrl-C on to such a one as Ctrl-Break.
INTERRUPT = getattr(signal, "CTRL_BREAK_EVENT", signal.SIGINT)
APART: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {"creationflags": 0x200}
KILLED = -getattr(signal, "SIGKILL", 9)
IN_QUEUE = "SOME_IN_QUEUE"  # set for the processes of a queue
PLAN = "joined.json"  # in the folder of a queue that workers join: what all of them run
FIGURES = ("val_loss", "val_loss_padded", "perplexity", "tokens_per_second", "seconds")


@dataclass
class Turn:
    """One job in the queue: where it runs, how far that had come before, and how it stands (its line in queue.json)."""

    number: int  # in its queue, from 1 on
    job: Job
    folder: RunFolder
    record: Path
    standing: Standing  # before the queue began
    state: str  # waiting, running, done, failed or interrupted
    reason: str = ""  # why it failed, in one sentence
    seconds: float = 0.0  # that its processes took, start and evaluation included
    at_once: int | None = None  # how many runs shared the machine

    def to_dict(self) -> dict[str, Any]:
        named = {"name": self.job.name, "experiment": self.job.experiment.name, "seed": self.job.seed}
        return named | {name: getattr(self, name) for name in ("state", "reason", "seconds", "at_once")}


class Signals:
    """Ctrl-C, a polite kill and the like: runs in progress are told, and no other is begun.

    A run lives in a process group of its own, so that it hears of each Ctrl-C once. It stops after the present
    step; at the second one, at once; at the third it is killed. Other signals, of which a cluster sends several, are
    all the same to it.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.count = say, 0
        self.told: dict[subprocess.Popen[bytes], int] = {}  # runs in progress: how many signals each has heard of
        self.previous: dict[int, Any] = {}

    def note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        first = self.count == 0
        self.count += number == signal.SIGINT or first
        self.pass_on()  # before a word is said: a terminal that has gone answers with an error
        if first:
            self.say("stopping: what runs is saved after its step, and no other is begun")

    def pass_on(self) -> None:
        for process, told in list(self.told.items()):
            if told < self.count:
                self.told[process] = self.count
                if self.count > 2:
                    process.kill()
                else:
                    process.send_signal(INTERRUPT)

    def wait_for(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a run, passing on what comes meanwhile; return its exit code."""
        self.told[process] = 0
        self.pass_on()  # what came while the process was started
        try:
            return process.wait()
        finally:
            del self.told[process]

    def __enter__(self) -> Self:
        self.previous = {number: signal.signal(number, self.note) for number in list_endings()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


class Queue:
    """The jobs of one command in one folder. Making one writes nothing: all that stands in its way is refused first."""

    def __init__(
        self, jobs: Sequence[Job], out: Path, results: Path, say: Callable[[str], None], *, at_once: int = 1
    ) -> None:
        self.out, self.results, self.say, self.at_once = out, results, say, at_once
        self.file = out / "queue.json"
        self.signals = Signals(say)
        self.stopped = False  # by somebody who told a run to stop
        self.shows_runs = False  # whether runs may draw on our terminal; else what they print is in their logs
        self.writing = threading.Lock()  # one thread at a time writes queue.json
        if IN_QUEUE in os.environ:
            raise ConfigError(f"this is a process of a queue already ({IN_QUEUE} is set); a queue starts no other")
        train = jobs[0].config.train
        if (train.device, train.kernel, train.deterministic, train.threads) != ("auto", "auto", False, None):
            # What is not asked for is there; to look would be to load torch, which takes seconds.
            from some_moe.training.machine import choose_machine

            choose_machine(train)
        self.turns = []
        for number, job in enumerate(jobs, 1):
            folder = RunFolder(out / job.name)
            standing = self._find_standing(job, folder)
            record, state = results / f"{job.name}.json", "done" if standing == "done" else "waiting"
            self.turns.append(Turn(number, job, folder, record, standing, state))
        for turn in self.turns:
            refuse_other_record(turn.record, turn.job, turn.folder)
        self.others = self._remember()
        for line in explain_scaling(jobs):
            say(line)

    @property
    def exit_code(self) -> int:
        states = {turn.state for turn in self.turns}
        if states & {"interrupted", "waiting", "running"}:  # running: by another worker, while this one was stopped
            return 130
        return 1 if "failed" in states else 0

    # --- running ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run every job that is not done, `at_once` at a time. One that fails is noted, and the next has its turn."""
        with ExitStack() as stack:
            try:
                for folder in (self.out, self.results):
                    folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(self._admission())
            except OSError as error:
                raise ConfigError(
                    f"{error.filename!r} cannot be written ({error.strerror}); choose another --out or --results"
                ) from None
            try:
                with self.signals, ThreadPoolExecutor(self.at_once) as pool:
                    self._save()
                    self._work(pool)
            except OSError as error:
                raise TrainingStoppedError(
                    f"the queue cannot go on in {self.out} ({error.strerror or error}); run the same command again "
                    "when that is mended"
                ) from None

    @contextmanager
    def _admission(self) -> Iterator[None]:
        """Keep other queues out of the folder."""
        in_use = "is in use by another queue, or by a run that one left behind; wait for its end, or choose another"
        lock = take_lock(self.out / ".queue.lock", f"{str(self.out)!r} {in_use} --out")
        try:
            if (self.out / PLAN).exists():
                raise ConfigError(
                    f"{str(self.out)!r} is a queue that workers join; add --join, or choose another --out"
                )
            for turn in self.turns:  # a run that outlived its queue holds its own folder
                if turn.standing != "done" and turn.folder.path.is_dir():
                    take_lock(turn.folder.path / LOCK, f"{str(self.out)!r} {in_use} --out").release()
            yield
        finally:
            lock.release()

    def _work(self, pool: ThreadPoolExecutor) -> None:
        for turn in self.turns:  # done, but with other --results, or killed before its record was written
            if turn.standing == "done" and not turn.record.is_file():
                write_record(turn.record, turn.job, turn.folder, at_once=turn.at_once)
        list(pool.map(self._take, self._order()))

    def _order(self) -> list[Turn]:
        """As they were named; of several at once the longest first, lest it be alone at the end."""
        if self.at_once == 1:
            return self.turns
        return sorted(self.turns, key=lambda turn: -(turn.job.schedule.steps or 0) * count_step_flops(turn.job.config))

    def _find_standing(self, job: Job, folder: RunFolder) -> Standing:
        return find_standing(job, folder)

    def _title(self, turn: Turn) -> str:
        return f"[{turn.number}/{len(self.turns)}] {turn.job.experiment.name}, seed {turn.job.seed}: "

    def _take(self, turn: Turn) -> None:
        """Run one job to its end, unless somebody has stopped the queue."""
        if self.stopped or self.signals.count:
            return
        if turn.standing == "done":
            self.say(self._title(turn) + "done already")
        else:
            self._run_job(turn)

    def _run_job(self, turn: Turn) -> None:
        """Run one job to its end, and note how it ended."""
        job, title = turn.job, self._title(turn)
        self.say(title + ("packed rows" if job.schedule.steps is None else f"{job.schedule.steps:,} steps"))
        turn.state, turn.reason, turn.at_once = "running", "", self.at_once
        self._save()
        started = time.monotonic()
        code, messages = self._train(job)
        seconds = time.monotonic() - started
        turn.seconds += seconds
        if not self._may_record(turn):
            self.say(title + "another worker has taken it up meanwhile; nothing is recorded here")
        elif code == 0 and turn.folder.result_file.is_file():
            write_record(turn.record, job, turn.folder, at_once=turn.at_once)
            turn.state = "done"
            self.say(f"{title}done in {describe_seconds(seconds)}")
        elif code in STOPPED or self.signals.count:
            turn.state, self.stopped = "interrupted", True
            self.say(title + "interrupted")
        else:
            turn.state, turn.reason = "failed", explain_failure(code, messages)
            self.say(f"{title}failed: {turn.reason}")
        self._save()

    def _may_record(self, turn: Turn) -> bool:  # noqa: ARG002
        return True

    def _environment(self, job: Job) -> dict[str, str]:  # noqa: ARG002
        return python_environment() | {IN_QUEUE: "1"}

    def _train(self, job: Job) -> tuple[int, str]:
        """Train one job to its end in a process; return its exit code and what it wrote to its log."""
        log = self.out / "logs" / f"{job.name}.txt"
        log.parent.mkdir(exist_ok=True)
        words = [*job.training_words, "--out", str(self.out / job.name), "--resume", "auto"]
        with log.open("a+b") as file:
            begin = file.tell()
            process = subprocess.Popen(
                python_command("-m", "some_moe", *words),
                env=self._environment(job),
                stdin=subprocess.DEVNULL,
                stdout=None if self.shows_runs else file,
                stderr=file,
                **APART,
            )
            code = self.signals.wait_for(process)
            file.seek(begin)
            return code, file.read().decode("utf-8", errors="replace")

    # --- what it tells ----------------------------------------------------------------------------------------

    def foretell(self) -> list[dict[str, Any]]:
        """The same as `describe` tells before anything runs, and what each job that is not done would cost."""
        costs = [{} if turn.state == "done" else estimate_job(turn.job.config) for turn in self.turns]
        return [row | cost for row, cost in zip(self.describe(), costs, strict=True)]

    def describe(self) -> list[dict[str, Any]]:
        """One object a job: what runs, how it stands, and the figures of its record where it is done."""
        rows = []
        for turn in self.turns:
            job, published = turn.job, turn.job.experiment.published
            is_known = turn.state == "done" and turn.record.is_file()
            record = read_object(turn.record, "remove it, and run the same command again") if is_known else {}
            number, layers = record.get("middle_layer"), list_rows(record.get("layers"))
            middle = next((layer for layer in layers if layer.get("layer") == number), {})
            rows.append(
                {"experiment": job.experiment.name, "seed": job.seed, "standing": turn.standing}
                | {"state": "done already" if turn.standing == "done" else turn.state, "reason": turn.reason}
                | {"stories": job.schedule.stories.train, "epochs": job.schedule.epochs}
                | {"published_steps": job.experiment.steps, "folder": str(turn.folder), "command": job.command}
                | {name: finite_number(record.get(name)) for name in FIGURES}
                | {"steps": steps if type(steps := record.get("steps")) is int else job.schedule.steps}
                | {"gini": finite_number(middle.get("gini"))}
                | {"published_val_loss": float(published.val_loss) if published and published.val_loss else None}
                | {"result": str(turn.record) if record else None}
            )
        return rows

    def _save(self) -> None:
        with self.writing:
            jobs = [*self.others, *(turn.to_dict() for turn in self.turns)]
            write_whole(self.file, json.dumps({"format_version": 1, "jobs": jobs}, indent=1) + "\n")

    def _remember(self) -> list[dict[str, Any]]:
        """Learn from queue.json how these jobs ran so far; return what it says of jobs of other commands."""
        if not self.file.is_file():
            return []
        cure = "remove it, the runs themselves are whole"
        jobs = read_object(self.file, cure).get("jobs")
        if not isinstance(jobs, list) or not all(
            isinstance(job, dict) and type(job.get("name")) is str for job in jobs
        ):
            raise ConfigError(f"{str(self.file)!r} is damaged; {cure}")
        known = {job["name"]: job for job in jobs}
        for turn in self.turns:
            before = known.pop(turn.job.name, {})
            turn.seconds = finite_number(before.get("seconds")) or 0.0
            turn.at_once = at_once if type(at_once := before.get("at_once")) is int else None
        return list(known.values())


def explain_failure(code: int, messages: str) -> str:
    """One sentence on why a run failed, from its exit code and what it wrote to stderr."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("some: "):
            return line.removeprefix("some: ")
        if "out of memory" in line.lower() or "can't allocate memory" in line:
            return "memory ran out; lower data.batch_size, or set train.checkpoint_activations"
    if code == KILLED:
        return "its process was killed, perhaps because memory ran out; lower data.batch_size"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    raised = [line for line in lines if EXCEPTION.match(line)]  # advice may follow it, as with errors of CUDA
    return (raised or lines)[-1] if lines else f"its process ended with exit code {code}"

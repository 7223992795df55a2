"""A queue that workers on many machines join: all of them run this, on one shared folder.

DIR/joined.json says what all of them run; DIR/.claims who runs what. A job is begun by the one worker that has claimed
it, and claimed anew when that worker is dead; what it had done by then is in its run folder. Only the owner of a claim
writes a record. Nobody leads: workers come and go.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError
from some_moe.lab.jobs import Job, Standing, find_standing
from some_moe.lab.measured import write_record
from some_moe.lab.published import finite_number
from some_moe.lab.queue import PLAN, Queue, Turn
from some_moe.system.claims import BEATS, DEAD_AFTER, OBEYS, RUNNING, Claim, Claims
from some_moe.system.files import clear_scratch, write_new
from some_moe.system.processes import take_lock
from some_moe.system.reading import read_object
from some_moe.training.run_folder import LOCK, RunFolder

CLAIMS = ".claims"
LONGEST_WAIT = 5.0  # seconds between two looks at what the others do
PATIENCE = 30.0  # seconds in which other workers that begin at the same time have written the plan


@dataclass(frozen=True)
class Plan:
    """What all workers of a folder run. results: as seen from that folder, wherever a worker stands."""

    names: list[str]
    seeds: list[int]
    overrides: dict[str, Any]
    results: str
    digest: str  # of all settings of all jobs

    @classmethod
    def make(cls, jobs: Sequence[Job], overrides: Mapping[str, Any], out: Path, results: Path) -> "Plan":
        names = list(dict.fromkeys(job.experiment.name for job in jobs))
        seeds = list(dict.fromkeys(job.seed for job in jobs))
        told = json.dumps([[job.name, job.config.flatten()] for job in jobs], sort_keys=True)
        digest = hashlib.sha256(told.encode()).hexdigest()[:16]
        return cls(names, seeds, dict(overrides), os.path.relpath(results, out), digest)

    @classmethod
    def read(cls, out: Path) -> "Plan | None":
        """The plan of a folder; None where it has none."""
        if not (out / PLAN).is_file():
            return None
        cure = "remove it and name the experiments again, the runs themselves are whole"
        found = read_object(out / PLAN, cure)
        kinds = {"names": list, "seeds": list, "overrides": dict, "results": str, "digest": str}
        if not (
            all(isinstance(found.get(name), kind) and found[name] != [] for name, kind in kinds.items())
            and all(isinstance(name, str) for name in found["names"])
            and all(type(seed) is int and 0 <= seed < 2**62 for seed in found["seeds"])
        ):
            raise ConfigError(f"{str(out / PLAN)!r} is damaged; {cure}")
        return cls(**{name: found[name] for name in kinds})

    def refuse_other(self, out: Path) -> None:
        """All workers of a folder run the same."""
        there = Plan.read(out)
        for name, here in vars(self).items():
            if there is not None and getattr(there, name) != here:
                what = f"{name} {getattr(there, name)}, here {here}"
                what = "another version of them, or other data" if name == "digest" else what
                raise ConfigError(
                    f"{str(out)!r} is a queue of other runs ({what}); join it with `some experiments run --join --out "
                    f"{out}` alone, or choose another --out"
                )

    def write(self, out: Path) -> None:
        """Bring the plan to the folder, unless it is there; a queue of one process keeps workers out."""
        if not (out / PLAN).exists():
            in_use = f"{str(out)!r} is in use by a queue without --join; wait for its end, or choose another --out"
            lock = take_lock(out / ".queue.lock", in_use, timeout=PATIENCE)
            try:
                write_new(out / PLAN, json.dumps({"format_version": 1} | vars(self), indent=1) + "\n")
            finally:
                lock.release()
        clear_scratch(out, PLAN)
        self.refuse_other(out)


class JoinedQueue(Queue):
    """One worker of a shared queue."""

    def __init__(
        self,
        jobs: Sequence[Job],
        plan: Plan,
        out: Path,
        say: Callable[[str], None],
        *,
        at_once: int = 1,
        dead_after: float = DEAD_AFTER,
    ) -> None:
        self.plan = plan
        self.claims = Claims(out / CLAIMS, dead_after)
        self.held: dict[str, Claim] = {}  # by this worker
        self.again: dict[str, int] = {}  # claims that were over when this worker began, and whose jobs it takes again
        self.choosing = threading.Lock()
        self.waiting_for: set[str] = set()
        plan.refuse_other(out)
        super().__init__(jobs, out, Path(os.path.normpath(out / plan.results)), say, at_once=at_once)
        for turn in self.turns:
            if not turn.record.is_file():
                turn.state = "waiting"  # done or not: a record is missing

    def _find_standing(self, job: Job, folder: RunFolder) -> Standing:
        """A folder in which another worker is at work changes while it is read: then it has begun, and that is all."""
        try:
            return find_standing(job, folder)
        except (ConfigError, FileNotFoundError):
            claim = self.claims.read().get(job.name)
            if job.name in self.held or claim is None or claim.state != RUNNING:
                raise
            return "begun"

    @contextmanager
    def _admission(self) -> Iterator[None]:
        """Agree with all other workers on what is run."""
        self.plan.write(self.out)
        self.claims.open()
        try:
            records, found = {turn.job.name: turn.record for turn in self.turns}, self.claims.read()
            for name, claim in found.items():  # what had failed, and what is done but has lost its record
                if claim.state == "failed" or (
                    claim.state == "done" and name in records and not records[name].is_file()
                ):
                    self.again[name] = claim.number
            yield
        finally:
            self.claims.close()

    # --- working ----------------------------------------------------------------------------------------------

    def _work(self, pool: ThreadPoolExecutor) -> None:
        self._look()
        if done := sum(turn.state == "done" for turn in self.turns):
            self.say(f"{done} of {len(self.turns)} are done already")
        list(pool.map(self._serve, range(self.at_once)))
        self._look()
        self._save()

    def _serve(self, _: int) -> None:
        """Take one job after another, until all are done or failed; then those of workers that die meanwhile."""
        while not (self.stopped or self.signals.count):
            turn = self._choose()
            if turn is not None:
                self._do(turn)
            elif all(turn.state in ("done", "failed") for turn in self.turns):
                return
            else:
                self._wait()

    def _choose(self) -> Turn | None:
        """Claim the first job that is free; None where there is none at the moment."""
        with self.choosing:
            found = self._look()
            for turn in self.turns:
                name, before = turn.job.name, found.get(turn.job.name)
                if name in self.held or turn.state in ("done", "failed"):
                    continue
                died = None
                if before is not None and before.state == RUNNING:
                    died = self.claims.explain_death(before)
                    if died is None:
                        continue
                claim = self.claims.take(name, before, at_once=self.at_once)
                if claim is not None:
                    self.held[name] = claim
                    if died is not None:
                        self.say(f"{self._title(turn)}taken up again: {died}")
                        self._pause()  # where there are no locks: its run, should it live, sees the new claim and ends
                    return turn
        return None

    def _look(self) -> dict[str, Claim]:
        """Learn from the claims how all jobs stand."""
        found = self.claims.read()
        for turn in self.turns:
            claim = found.get(turn.job.name)
            if claim is None or turn.job.name in self.held:
                continue
            known = claim.state in ("done", "failed", "interrupted", RUNNING)
            turn.state = claim.state if known and self.again.get(claim.name) != claim.number else "waiting"
            turn.reason = str(claim.about.get("reason", ""))
            turn.seconds = finite_number(claim.about.get("seconds")) or turn.seconds
            at_once = claim.about.get("at_once")
            turn.at_once = at_once if type(at_once) is int else turn.at_once
        return found

    def _do(self, turn: Turn) -> None:
        """Run a claimed job, or write the record that a dead worker had not written."""
        name = turn.job.name
        try:
            if not self._wait_for_folder(turn):
                turn.state = "interrupted"
            elif self._find_standing(turn.job, turn.folder) != "done":
                self._run_job(turn)
            elif self._may_record(turn):
                if not turn.record.is_file():
                    write_record(turn.record, turn.job, turn.folder, at_once=turn.at_once)
                turn.state = "done"
                self.say(self._title(turn) + "done already")
        finally:
            state = turn.state if turn.state in ("done", "failed") else "interrupted"
            news = {"reason": turn.reason, "seconds": turn.seconds, "at_once": turn.at_once}
            self.claims.settle(self.held[name], state=state, **news)
            del self.held[name]
        self._save()

    def _wait_for_folder(self, turn: Turn) -> bool:
        """Wait for a run that has outlived its worker; False where this one is stopped meanwhile."""
        said = False
        while turn.folder.path.is_dir() and not self.signals.count:
            try:
                take_lock(turn.folder.path / LOCK, "").release()
                break
            except ConfigError:
                if not said:
                    self.say(f"{self._title(turn)}waiting for a run that is still going in {turn.folder}")
                said = True
                self._pause()
        return not self.signals.count

    def _wait(self) -> None:
        others = {turn.job.name for turn in self.turns if turn.state == RUNNING and turn.job.name not in self.held}
        if others - self.waiting_for:
            self.say(
                f"waiting for {len(others)} of {len(self.turns)} that other workers run: {', '.join(sorted(others))}"
            )
            self.waiting_for = others
        self._pause()

    def _pause(self) -> None:
        until = time.monotonic() + min(LONGEST_WAIT, self.claims.dead_after / BEATS)
        while time.monotonic() < until and not self.signals.count:
            time.sleep(0.05)

    # --- what the claim says ----------------------------------------------------------------------------------

    def _may_record(self, turn: Turn) -> bool:
        return self.held[turn.job.name].is_held()

    def _environment(self, job: Job) -> dict[str, str]:
        claim = self.held[job.name]
        return super()._environment(job) | {OBEYS: f"{claim.about['token']} {claim.path.absolute()}"}

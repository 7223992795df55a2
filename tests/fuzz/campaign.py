"""Many cases over several processes: `python -m tests.fuzz.campaign --cases 100000 --seed 0 --jobs 16`.

A worker that dies, or hangs where no alarm reaches it, is counted and replaced. Every case follows from the seed, its
target and its number: `--only TARGET:CASE` repeats it and shows everything.
"""

import argparse
import ctypes
import faulthandler
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

# Before torch is imported: one thread each, no network, no GPU, nothing compiled.
os.environ |= {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg",
    "NO_COLOR": "1", "NUMBA_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}  # fmt: skip

from tests.fuzz.case import DOING, FAILURES, GOOD, Bench, Verdict, limit_memory, mend_devices
from tests.fuzz.material import make_material
from tests.fuzz.targets import BY_NAME, TARGETS, Target

FORK = multiprocessing.get_context("fork")
BATCH = 40  # cases handed to a worker at a time
LIFE = 2000  # cases after which a worker is replaced: what a process gathers must not decide a case
GRACE = 8.0  # seconds beyond a target's patience before a worker is killed
PR_SET_PDEATHSIG = 1
Case = tuple[str, int]


def preload() -> None:
    """Import what commands import when they run: forked workers then have it already."""
    import torch._dynamo  # noqa: F401 - an optimizer brings it in, which takes seconds

    warnings.filterwarnings("ignore", "CUDA initialization")  # with little memory torch gets no driver

    import some_moe.api
    import some_moe.commands.experiments
    import some_moe.commands.glassbox
    import some_moe.commands.reporting
    import some_moe.commands.results
    import some_moe.commands.tables
    import some_moe.commands.tracing
    import some_moe.commands.training
    import some_moe.glass.api
    import some_moe.lab.lengths
    import some_moe.lab.queue
    import some_moe.training.runs

    if find_spec("matplotlib"):
        import some_moe.glass.figures.curves  # noqa: F401
    if find_spec("pyarrow"):
        import pyarrow.parquet  # noqa: F401


def choose_targets(names: Iterable[str], light: bool) -> tuple[list[Target], list[str]]:
    """The targets that are asked for, or all; and a word on each that this machine has no libraries for."""
    chosen = [BY_NAME[name] for name in names] or [target for target in TARGETS if target.is_light or not light]
    lacking = {target.name: [one for one in target.needs if find_spec(one) is None] for target in chosen}
    words = [f"{name} is left out: there is no {', '.join(absent)}" for name, absent in lacking.items() if absent]
    return [target for target in chosen if not lacking[target.name]], words


def list_cases(targets: list[Target], count: int, seed: int) -> list[Case]:
    """So many cases, shared among the targets by their weights, in an order that mixes slow and quick ones."""
    total = sum(target.weight for target in targets)
    cases = [(t.name, number) for t in targets for number in range(max(1, round(count * t.weight / total)))]
    Random(seed).shuffle(cases)
    return cases


# --- workers ------------------------------------------------------------------------------------------------


def work(channel: Connection, base: Path, name: str, seed: int) -> None:
    """Take batches of cases until there are no more; tell when each begins, and how it ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever stops the campaign stops this too
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    os.dup2(sys.stdin.fileno(), 0)
    bench = Bench(base, name)
    faulthandler.enable(file=bench.stacks)
    limit_memory()
    while batch := channel.recv():
        for target, number in batch:
            channel.send(("begin", target, number))
            channel.send(("end", bench.run(BY_NAME[target], number, seed)))


class Worker:
    """One process and what it is at."""

    def __init__(self, base: Path, name: str, seed: int) -> None:
        self.name, self.base = name, base
        self.channel, theirs = FORK.Pipe()
        self.process: BaseProcess = FORK.Process(target=work, args=(theirs, base, name, seed))
        self.process.start()
        theirs.close()
        self.todo: list[Case] = []
        self.case: Case | None = None
        self.since, self.served = time.monotonic(), 0

    def give(self, batch: list[Case]) -> None:
        self.todo, self.case, self.since = list(batch), None, time.monotonic()
        self.channel.send(batch)

    @property
    def is_overdue(self) -> bool:
        patience = BY_NAME[self.case[0]].patience if self.case else 60.0
        return bool(self.todo) and time.monotonic() - self.since > patience + GRACE

    def end(self) -> str:
        """Kill the process; return the innermost function of the program that its last stack shows."""
        self.process.kill()
        self.process.join()
        stacks = self.base / "work" / self.name / "stacks.txt"
        text = stacks.read_text(encoding="utf-8", errors="replace") if stacks.is_file() else ""
        lines = [line for line in text.rpartition("most recent call first")[2].splitlines() if "some_moe/" in line]
        return lines[0].rpartition("some_moe/")[2].replace('"', "") if lines else "no stack"

    def read_doing(self) -> tuple[str, list[str]]:
        """What the worker was at: damage and command."""
        file = self.base / "work" / self.name / DOING
        damage, words = json.loads(file.read_text(encoding="ascii")) if file.is_file() else ("", [])
        return damage, words


def run_cases(base: Path, cases: list[Case], *, seed: int, jobs: int, heard: Any = None) -> list[Verdict]:
    """Run every case and return its verdict. heard: is told of each."""
    waiting = [cases[at : at + BATCH] for at in range(0, len(cases), BATCH)][::-1]
    verdicts: list[Verdict] = []
    made = 0

    def hire() -> Worker:
        nonlocal made
        made += 1
        return Worker(base, f"w{made}", seed)

    def note(verdict: Verdict) -> None:
        verdicts.append(verdict)
        if heard is not None:
            heard(verdict, len(verdicts))

    def dismiss(worker: Worker) -> None:
        worker.end()
        shutil.rmtree(base / "work" / worker.name, ignore_errors=True)
        workers.remove(worker)

    def lose(worker: Worker, kind: str) -> None:
        """A worker is gone: its case is counted, and what it had not begun goes to another."""
        place = worker.end()
        if kind == "killed":
            code = worker.process.exitcode or 0
            place = f"{signal.Signals(-code).name if code < 0 else f'exit {code}'} in {place}"
        lost = worker.case
        if lost is not None:
            damage, words = worker.read_doing()
            note(Verdict(*lost, kind, place=place, damage=damage, command=words))
        rest = [case for case in worker.todo if case != lost]
        if rest:
            waiting.append(rest)
        dismiss(worker)

    workers: list[Worker] = []
    try:
        while waiting or any(worker.todo for worker in workers):
            for worker in [worker for worker in workers if not worker.todo and worker.served >= LIFE]:
                dismiss(worker)
            while len(workers) < jobs and waiting:
                workers.append(hire())
            for worker in workers:
                if not worker.todo and waiting:
                    worker.give(waiting.pop())
            ready = wait([worker.channel for worker in workers], timeout=1.0)
            for worker in [worker for worker in workers if worker.channel in ready]:
                try:
                    message = worker.channel.recv()
                except (EOFError, OSError):
                    lose(worker, "killed")
                    continue
                if message[0] == "begin":
                    worker.case, worker.since = (message[1], message[2]), time.monotonic()
                else:
                    worker.todo.remove(worker.case)
                    worker.case, worker.since = None, time.monotonic()
                    worker.served += 1
                    note(message[1])
            for worker in [worker for worker in workers if worker.is_overdue]:
                lose(worker, "hang")
    finally:
        for worker in workers:
            worker.end()
    assert Counter((verdict.target, verdict.case) for verdict in verdicts) == Counter(cases), "a case was lost"
    return verdicts


def make_base(base: Path, *, analyse: bool) -> None:
    """Make the material in a process of its own, which leaves this one fit to be forked."""

    def make() -> None:
        base.mkdir(parents=True)
        os.chdir(base)
        os.environ["SOME_CACHE"] = str(base / "cache")
        import torch

        torch.set_num_threads(1)
        make_material(base, analyse=analyse)

    process = FORK.Process(target=make)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the material could not be made (exit {process.exitcode})")
    devices = Path(tempfile.mkdtemp(prefix="some-fuzz-devices-"))  # memory that is a disk may hold no devices
    (base / "devices").symlink_to(devices)
    mend_devices(devices)


# --- what is told -------------------------------------------------------------------------------------------


def format_outcomes(verdicts: list[Verdict]) -> str:
    """A table, target × outcome."""
    kinds = [kind for kind in (*GOOD, *FAILURES) if any(verdict.kind == kind for verdict in verdicts)]
    counts = Counter((verdict.target, verdict.kind) for verdict in verdicts)
    longest = {target: max(v.seconds for v in verdicts if v.target == target) for target, _ in counts}
    means = {target: mean(v.seconds for v in verdicts if v.target == target) for target, _ in counts}
    lines = [f"{'target':14}" + "".join(f"{kind:>10}" for kind in (*kinds, "cases", "mean", "longest"))]
    for name in sorted(longest):
        numbers = [counts[name, kind] for kind in kinds]
        lines.append(
            f"{name:14}"
            + "".join(f"{n:>10,}" for n in (*numbers, sum(numbers)))
            + f"{1000 * means[name]:>7.0f} ms{longest[name]:>8.1f} s"
        )
    totals = [sum(verdict.kind == kind for verdict in verdicts) for kind in kinds]
    return "\n".join([*lines, f"{'all':14}" + "".join(f"{n:>10,}" for n in (*totals, len(verdicts)))])


def group_failures(verdicts: list[Verdict]) -> list[tuple[Verdict, int]]:
    """One case a place, the one with the smallest change, and how many there are; most frequent first."""
    found: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.kind in FAILURES:
            found.setdefault((verdict.kind, verdict.place), []).append(verdict)
    groups = [(min(group, key=lambda verdict: len(verdict.damage) or 999), len(group)) for group in found.values()]
    return sorted(groups, key=lambda group: -group[1])


def format_failures(verdicts: list[Verdict], seed: int) -> str:
    lines = []
    for verdict, count in group_failures(verdicts):
        lines += [
            f"{count} × {verdict.kind}: {verdict.place}",
            f"    {verdict.damage}",
            f"    some {' '.join(verdict.command)}"[:300],
            f"    --seed {seed} --only {verdict.target}:{verdict.case}",
            *(f"    | {line[:200]}" for line in verdict.answer.strip().splitlines()[-2:]),
        ]
    return re.sub(r"[^\n\x20-\x7e\xa0-\ud7ff\ue000-\uffff]", lambda found: ascii(found[0])[1:-1], "\n".join(lines))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.campaign", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--target", action="append", default=[], choices=list(BY_NAME))
    parser.add_argument("--light", action="store_true", help="leave out what needs a run that was analysed")
    parser.add_argument("--material", type=Path, help="make the material in this folder, and nothing else")
    parser.add_argument("--only", metavar="TARGET:CASE", help="repeat one case and show everything")
    parser.add_argument("--out", type=Path, help="write every failure to this file, as JSON")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what lies in memory is removed
    targets, left_out = choose_targets(options.target, options.light)
    for line in left_out:
        print(line)
    preload()
    analyse = any(not target.is_light for target in targets)
    if options.material:
        make_base(options.material.absolute(), analyse=analyse)
        return 0
    shared = Path("/dev/shm")
    with ExitStack() as stack:
        memory = shared if os.access(shared, os.W_OK) else None
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="some-fuzz-", dir=memory))) / "base"
        make_base(base, analyse=analyse)
        stack.callback(shutil.rmtree, (base / "devices").resolve())
        if options.only:
            name, _, number = options.only.partition(":")
            (verdict,) = run_cases(base, [(name, int(number))], seed=options.seed, jobs=1)
            print(f"{verdict.kind}: {verdict.place}\n{verdict.damage}\n{verdict.command}\n{verdict.answer}")
            return int(verdict.kind in FAILURES)
        cases, started = list_cases(targets, options.cases, options.seed), time.monotonic()

        def heard(verdict: Verdict, done: int) -> None:  # noqa: ARG001
            if done % 1000 == 0:
                print(
                    f"{done:,} of {len(cases):,} cases, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True
                )

        verdicts = run_cases(base, cases, seed=options.seed, jobs=options.jobs, heard=heard)
        seconds = time.monotonic() - started
    failures = [verdict for verdict in verdicts if verdict.kind in FAILURES]
    if options.out:
        record = {"cases": len(verdicts), "seed": options.seed, "seconds": seconds}
        record |= {"failures": [verdict.to_dict() for verdict in failures]}
        options.out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(format_outcomes(verdicts))
    print(f"{len(verdicts):,} cases, random seed {options.seed}, {seconds:.0f} s on {options.jobs} processes")
    print(format_failures(verdicts, options.seed))
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())

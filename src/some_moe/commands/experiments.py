"""The registry and its queue: `some experiments …`. Listings answer at once, and load no torch."""

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from some_moe.cli import Parser, look, read_numbers, write, write_json
from some_moe.commands.training import take_settings
from some_moe.errors import INTERRUPTED, UsageError

if TYPE_CHECKING:
    from some_moe.lab.jobs import Job
    from some_moe.lab.joined import Plan

RUN = "some experiments run"


def list_experiments(arguments: list[str]) -> int:
    """Print every registered experiment, by series."""
    parser = Parser("some experiments list", "List every published run, study and baseline, by series.")
    parser.add_argument("--json", action="store_true", help="print an array of short objects")
    wants_json = parser.parse(arguments).json

    from some_moe.lab.listing import describe_all, format_listing

    return write_json(describe_all()) if wants_json else write(format_listing(**look()))


def show_experiment(arguments: list[str]) -> int:
    """Print all about one experiment."""
    about = "Print one experiment: its config, what is assumed in it, its exact size, and what was published."
    parser = Parser("some experiments show", about)
    parser.add_argument("name", metavar="NAME", help="a registered name, such as A1; case does not matter")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse(arguments)

    from some_moe.lab.card import describe, format_card
    from some_moe.lab.registry import find_experiment

    experiment = find_experiment(options.name)
    return write_json(describe(experiment)) if options.json else write(format_card(experiment, **look()))


def run_experiments(arguments: list[str]) -> int:
    """Run experiments one after another, skip what is done, continue what was interrupted."""
    parser = Parser(
        RUN,
        "Run experiments in turn, each with every seed, for the published number of steps. Runs that are "
        "done are skipped, interrupted ones continued: the same command goes on where it was stopped. "
        "Any setting can be changed for all of them with --ROOM.FIELD VALUE. With --join, workers on any number of "
        "machines share them.",
    )
    add_queue_options(parser)
    parser.add_argument("--join", action="store_true", help="share --out with other workers; without names, their runs")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and its cost; touch nothing")
    parser.add_argument("--json", action="store_true", help="print one object at the end; progress goes to stderr")
    overrides, words = take_settings(arguments, RUN)
    options = parser.parse(words)
    if options.dead_after is not None and not options.join:
        raise UsageError(f"--dead-after {options.dead_after:g} is for workers that share a queue; add --join")
    jobs, plan = choose_jobs(options, overrides, RUN, joins=options.join)

    from some_moe.commands.tables import format_queue
    from some_moe.lab.joined import JoinedQueue
    from some_moe.lab.queue import Queue
    from some_moe.system.claims import DEAD_AFTER

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    out, at_once = Path(options.out), options.at_once
    if options.join:
        dead_after = options.dead_after or DEAD_AFTER
        queue: Queue = JoinedQueue(jobs, plan, out, say, at_once=at_once, dead_after=dead_after)
    else:
        queue = Queue(jobs, out, Path(options.results or "results"), say, at_once=at_once)
    if options.dry_run:
        return write_json(queue.foretell()) if options.json else write(format_queue(queue.foretell(), **look()))
    queue.shows_runs = sys.stdout.isatty() and not options.json and options.at_once == 1
    queue.run()
    if options.json:
        write_json({"out": str(queue.out), "results": str(queue.results), "jobs": queue.describe()})
        return queue.exit_code
    write(format_queue(queue.describe(), **look()))
    write(f"results are in {queue.results}, what the runs wrote in {queue.out / 'logs'}\n")
    for turn in queue.turns:
        if (then := turn.job.experiment.afterwards) and turn.state == "done":
            write(f"{turn.job.name} goes on with: {then.command.replace('RUN', str(turn.folder))} (row {then.row})\n")
    if queue.exit_code:
        write("the same command goes on with what is not done\n")
    return queue.exit_code


def add_queue_options(parser: Parser) -> None:
    """What is run, and where: the same for every way to run it."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="names, series (A), published, studies, baselines")
    parser.add_argument("--data", metavar="F", help="a file, a folder, hf:OWNER/NAME or stories (as registered)")
    parser.add_argument("--seeds", metavar="0,1,2", help="random seeds (default 0)")
    parser.add_argument("--stories", action="store_true", help="keep the test loss of each story in the records")
    parser.add_argument("--out", default="runs", metavar="DIR", help="where run folders and queue.json go (runs)")
    parser.add_argument("--results", metavar="DIR", help="where NAME-seedS.json records go (results)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="how many runs share a machine (1)")
    parser.add_argument("--dead-after", type=float, metavar="S", help="seconds of silence after which a worker is dead")


def choose_jobs(options: Namespace, overrides: dict[str, Any], prog: str, *, joins: bool) -> tuple[list["Job"], "Plan"]:
    """The jobs that a command line names; where it names none and `joins`, those of the queue in --out."""
    from some_moe.lab.jobs import make_jobs
    from some_moe.lab.joined import Plan
    from some_moe.lab.registry.selection import select_experiments

    out, dead_after = Path(options.out), options.dead_after
    if options.at_once < 1:
        raise UsageError(f"--at-once {options.at_once} runs nothing; use 1 or more")
    if dead_after is not None and not 1 <= dead_after <= 86_400:
        raise UsageError(f"--dead-after {dead_after:g} is out of range; use 1 to 86,400 seconds")
    if joins and not options.names:
        given = {"--seeds": options.seeds, "--data": options.data, "--results": options.results}
        given |= {"--stories": options.stories or None} | overrides
        there = read_plan(out, given, prog)
        jobs = make_jobs(select_experiments(there.names), there.seeds, there.overrides)
        return jobs, Plan.make(jobs, there.overrides, out, out / there.results)
    if not options.names:
        raise UsageError(f"`{prog}` needs NAME; see `{prog} --help`")
    experiments = select_experiments(options.names)
    seeds = read_numbers("--seeds", options.seeds or "0", what="seed", example="0,1,2")
    source = options.data
    for name, flag in (("train.seed", "--seeds"), ("name", "--out")):
        if name in overrides:
            raise UsageError(f"--{name} {overrides[name]} is given by {flag} here; write {flag} instead")
    if source is not None and overrides.setdefault("data.source", source) != source:
        raise UsageError(f"--data {source} and --data.source {overrides['data.source']} differ; give one of them")
    if options.stories and overrides.setdefault("train.story_losses", "test") != "test":
        kept = overrides["train.story_losses"]
        raise UsageError(f"--stories and --train.story-losses {kept} differ; give one of them")
    jobs = make_jobs(experiments, seeds, overrides)
    return jobs, Plan.make(jobs, overrides, out, Path(options.results or "results"))


def read_plan(out: Path, given: dict[str, Any], prog: str) -> "Plan":
    """What the other workers of a folder run, where no names are given."""
    from some_moe.lab.joined import Plan

    there = Plan.read(out)
    if there is None:
        raise UsageError(f"{str(out)!r} is no queue to join yet; name what to run: `{prog} NAME… --out {out}`")
    for name, value in given.items():
        if value is not None:
            flag = name if name.startswith("--") else f"--{name}"
            raise UsageError(
                f"{flag} {value} is said by the queue in {str(out)!r}; leave it out, or give names with it"
            )
    return there


def submit_experiments(arguments: list[str]) -> int:
    """Let a SLURM cluster run experiments, by workers that join one queue."""
    prog = "some experiments submit"
    parser = Parser(
        prog,
        "Submit a SLURM array whose tasks share one queue: each is `some experiments run --join`. One that is "
        "preempted, or whose time is over, saves what it does and is queued again; the others go on with its run. "
        "--out must lie where all machines see it.",
    )
    add_queue_options(parser)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="tasks of the array (1)")
    parser.add_argument("--partition", metavar="NAME", help="the partition (default: the cluster's)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of each task (1)")
    parser.add_argument("--time", default="240", metavar="T", help="of each task: minutes, H:MM:SS or D-H:MM:SS (240)")
    parser.add_argument("--slurm", action="append", default=[], metavar="K=V", help="more for sbatch, as account=me")
    parser.add_argument("--dry-run", action="store_true", help="print the script; write and submit nothing")
    overrides, words = take_settings(arguments, prog)
    options = parser.parse(words)

    from some_moe.lab.cluster import Request, read_minutes, require_submitit

    for flag, value, least, most in (("--workers", options.workers, 1, 10_000), ("--gpus", options.gpus, 0, 64)):
        if not least <= value <= most:
            raise UsageError(f"{flag} {value} is out of range; use {least} to {most:,}")
    more = dict(word.partition("=")[::2] for word in options.slurm)
    if bad := next((word for word in options.slurm if not all(word.partition("="))), None):
        raise UsageError(f"--slurm {bad} is not NAME=VALUE; write it like --slurm account=me")
    minutes = read_minutes(options.time)
    require_submitit(submits=not options.dry_run)
    jobs, plan = choose_jobs(options, overrides, prog, joins=True)
    out = Path(options.out).absolute()
    worker = ["experiments", "run", "--join", "--out", str(out), "--at-once", str(options.at_once)]
    worker += [] if options.dead_after is None else ["--dead-after", f"{options.dead_after:g}"]
    request = Request(worker, out / "slurm", options.workers, minutes, options.gpus, options.partition, more)
    plan.refuse_other(out)
    if options.dry_run:
        return write(request.script)
    out.mkdir(parents=True, exist_ok=True)
    plan.write(out)
    number = request.submit(Worker(worker))
    return write(
        f"submitted as {number}: {options.workers} workers for {len(jobs)} runs in {options.out}; what they say is in "
        f"{Path(options.out) / 'slurm'}\n"
    )


class Worker:
    """What each task of the array does. submitit pickles it, and asks it what a task does that is queued again."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __call__(self, task: int) -> None:  # noqa: ARG002
        import signal

        from some_moe.cli import main

        code = main(self.words)
        if code == INTERRUPTED:  # all is saved: now submitit, whose signal this is, may queue the task again
            os.kill(os.getpid(), signal.SIGUSR2)
        sys.exit(code)

    def checkpoint(self, task: int) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, task)

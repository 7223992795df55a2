"""The registry and its queue: `some experiments list`, `show` and `run`. Listings answer at once, and load no torch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from some_moe.cli import Parser, look, read_numbers, write, write_json
from some_moe.commands.training import take_settings
from some_moe.errors import UsageError

if TYPE_CHECKING:
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
    parser.add_argument("names", metavar="NAME", nargs="*", help="names, series (A), published, studies, baselines")
    parser.add_argument("--data", metavar="F", help="a file, a folder, hf:OWNER/NAME or stories (as registered)")
    parser.add_argument("--seeds", metavar="0,1,2", help="random seeds (default 0)")
    parser.add_argument("--out", default="runs", metavar="DIR", help="where run folders and queue.json go (runs)")
    parser.add_argument("--results", metavar="DIR", help="where NAME-seedS.json records go (results)")
    parser.add_argument("--join", action="store_true", help="share --out with other workers; without names, their runs")
    parser.add_argument("--dead-after", type=float, metavar="S", help="seconds of silence after which a worker is dead")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="how many runs share the machine (1)")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and its cost; touch nothing")
    parser.add_argument("--json", action="store_true", help="print one object at the end; progress goes to stderr")
    overrides, words = take_settings(arguments, RUN)
    options = parser.parse(words)
    if options.at_once < 1:
        raise UsageError(f"--at-once {options.at_once} runs nothing; use 1 or more")

    out, plan = Path(options.out), None
    if options.dead_after is not None and not (options.join and 1 <= options.dead_after <= 86_400):
        raise UsageError(f"--dead-after {options.dead_after:g} is for --join, and from 1 to 86,400 seconds")
    if options.join and not options.names:
        plan = read_plan(
            out, {"--seeds": options.seeds, "--data": options.data, "--results": options.results} | overrides
        )
        overrides = plan.overrides

    from some_moe.lab.registry.selection import select_experiments

    if plan is None and not options.names:
        raise UsageError(f"`{RUN}` needs NAME; see `{RUN} --help`")
    experiments = select_experiments(plan.names if plan else options.names)
    seeds = plan.seeds if plan else read_numbers("--seeds", options.seeds or "0", what="seed", example="0,1,2")
    source = options.data
    for name, flag in (("train.seed", "--seeds"), ("name", "--out")):
        if name in overrides:
            raise UsageError(f"--{name} {overrides[name]} is given by {flag} here; write {flag} instead")
    if source is not None and overrides.setdefault("data.source", source) != source:
        raise UsageError(f"--data {source} and --data.source {overrides['data.source']} differ; give one of them")

    from some_moe.commands.tables import format_queue
    from some_moe.lab.jobs import make_jobs
    from some_moe.lab.joined import JoinedQueue, Plan
    from some_moe.lab.queue import Queue
    from some_moe.system.claims import DEAD_AFTER

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    jobs = make_jobs(experiments, seeds, overrides)
    results = Path(options.results or "results")
    if options.join:
        plan = plan or Plan.make([one.name for one in experiments], seeds, overrides, out, results)
        dead_after = options.dead_after or DEAD_AFTER
        queue: Queue = JoinedQueue(jobs, plan, out, say, at_once=options.at_once, dead_after=dead_after)
    else:
        queue = Queue(jobs, out, results, say, at_once=options.at_once)
    if options.dry_run:
        return write_json(queue.foretell()) if options.json else write(format_queue(queue.foretell(), **look()))
    queue.shows_runs = sys.stdout.isatty() and not options.json and options.at_once == 1
    queue.run()
    if options.json:
        write_json({"out": str(queue.out), "results": str(queue.results), "jobs": queue.describe()})
        return queue.exit_code
    write(format_queue(queue.describe(), **look()))
    write(f"results are in {queue.results}, what the runs wrote in {queue.out / 'logs'}\n")
    if queue.exit_code:
        write("the same command goes on with what is not done\n")
    return queue.exit_code


def read_plan(out: Path, given: dict[str, Any]) -> "Plan":
    """What the other workers of a folder run, where no names are given."""
    from some_moe.lab.joined import Plan

    plan, alone = Plan.read(out), f"{RUN} --join --out {out}"
    if plan is None:
        raise UsageError(f"{str(out)!r} is no queue to join yet; name what to run: `{RUN} NAME… --join --out {out}`")
    for name, value in given.items():
        if value is not None:
            flag = name if name.startswith("--") else f"--{name}"
            raise UsageError(f"{flag} {value} is said by the queue in {str(out)!r}; give names with it, or `{alone}`")
    return plan

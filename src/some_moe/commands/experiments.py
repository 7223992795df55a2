"""The command `some experiments run`. Imported by `some_moe.cli` when it runs."""

import sys
from pathlib import Path
from typing import Any

from some_moe.cli import Parser, UsageError, on_terminal, read_numbers, terminal_width, write, write_json
from some_moe.commands.training import parse_overrides

PROG = "some experiments run"


def run_experiments(arguments: list[str]) -> int:
    """Run experiments one after another, skip what is done, continue what was interrupted."""
    parser = Parser(
        PROG,
        "Run experiments in turn, each with every seed, for the published number of steps. Runs that are "
        "done are skipped, interrupted ones continued: the same command goes on where it was stopped. "
        "Any setting can be changed for all of them with --ROOM.FIELD VALUE.",
    )
    parser.add_argument(
        "names", metavar="NAME", nargs="+", help="registered names, series (A, B, V), published, studies, baselines"
    )
    parser.add_argument(
        "--data", metavar="F", help="a file, a folder, hf:OWNER/NAME or `stories` (default: as registered)"
    )
    parser.add_argument("--seeds", default="0", metavar="0,1,2", help="random seeds (default 0)")
    parser.add_argument("--out", default="runs", metavar="DIR", help="where run folders and queue.json go (runs)")
    parser.add_argument("--results", metavar="DIR", help="where NAME-seedS.json records go (default: results)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="how many runs share the machine (1)")
    parser.add_argument("--dry-run", action="store_true", help="print what would run; touch nothing")
    parser.add_argument("--json", action="store_true", help="print one object at the end; progress goes to stderr")
    words, settings = split_settings(arguments)
    options = parser.parse(words)
    if options.at_once < 1:
        raise UsageError(f"--at-once {options.at_once} runs nothing; use 1 or more")

    from some_moe.lab.registry.selection import select_experiments

    experiments = select_experiments(options.names)
    seeds = read_numbers("--seeds", options.seeds, what="seed", example="0,1,2")
    overrides = read_overrides(settings, options.data)

    from some_moe.config import TrainingStoppedError
    from some_moe.lab.jobs import make_jobs
    from some_moe.lab.queue import Queue
    from some_moe.lab.queue_table import format_plan, format_summary
    from some_moe.layout import Style

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    jobs = make_jobs(experiments, seeds, overrides)
    queue = Queue(jobs, Path(options.out), Path(options.results or "results"), say, at_once=options.at_once)
    look: dict[str, Any] = {"width": terminal_width(), "style": Style(on_terminal())}
    if options.dry_run:
        rows = queue.plan()
        return write_json(rows) if options.json else write(format_plan(rows, **look))
    queue.shows_runs = sys.stdout.isatty() and not options.json and options.at_once == 1
    try:
        queue.run()
    except TrainingStoppedError as stop:
        print(f"some: {stop}", file=sys.stderr)
        return stop.code
    rows = queue.summarize()
    if options.json:
        write_json({"out": str(queue.out), "results": str(queue.results), "jobs": rows})
        return queue.exit_code
    write(format_summary(rows, **look))
    write(f"results are in {queue.results}, what the runs wrote in {queue.out / 'logs'}\n")
    if queue.exit_code:
        write("the same command goes on with what is not done\n")
    return queue.exit_code


# --- reading the command line -----------------------------------------------------------------------------


def split_settings(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Part --ROOM.FIELD VALUE from the other words, wherever they stand."""
    others, settings, rest = [], [], list(arguments)
    while rest:
        word = rest.pop(0)
        if not (word.startswith("--") and "." in word.partition("=")[0]):
            others.append(word)
            continue
        settings.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            settings.append(rest.pop(0))
    return others, settings


def read_overrides(settings: list[str], source: str | None) -> dict[str, Any]:
    overrides = parse_overrides(settings, PROG)
    if "train.seed" in overrides:
        raise UsageError(f"--train.seed {overrides['train.seed']} is given by --seeds here; write --seeds instead")
    if source is not None:
        if overrides.get("data.source", source) != source:
            raise UsageError(f"--data {source} and --data.source {overrides['data.source']} differ; give one of them")
        overrides["data.source"] = source
    return overrides

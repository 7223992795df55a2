"""`some export`, `some push` and `some eval --tasks`: runs for those who use transformers and lm-eval."""

import os
import re
import sys
from argparse import Namespace
from pathlib import Path

from some_moe.cli import Parser, look, write, write_json
from some_moe.errors import UsageError
from some_moe.layout import format_table, make_table, number_column, text_column


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add_options(parser: Parser) -> None:
    """How a run is written, which both commands share."""
    parser.add_argument("--standalone", action="store_true", help="with the model's code: nobody needs this package")
    parser.add_argument("--checkpoint", default="best", metavar="NAME", help="best, last or step-N (best)")
    parser.add_argument("--base", metavar="DIR", help="where the base of a run with branches is, if it was moved")


def export_run(arguments: list[str]) -> int:
    """Write a run as a folder that transformers opens."""
    parser = Parser("some export", "Write a run as a folder that transformers' auto classes and pipelines open.")
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("out", metavar="DIR", help="where to write: new, empty, or an earlier export")
    add_options(parser)
    options = parser.parse(arguments)

    from some_moe.hf.exporting import export

    export(**vars(options), say=say)
    size = sum(file.stat().st_size for file in folder_files(options.out))
    return write(f"{options.out}: {size / 1e6:,.1f} MB; its README.md says how to load it\n")


def folder_files(folder: str) -> list[Path]:
    return [path for path in Path(folder).iterdir() if path.is_file()]


def push_run(arguments: list[str]) -> int:
    """Export a run and upload it."""
    parser = Parser("some push", "Upload a run to the Hugging Face Hub, or to the hub that HF_ENDPOINT names.")
    parser.add_argument("run", metavar="RUN", help="a run folder, or a folder that `some export` wrote")
    parser.add_argument("repo", metavar="REPO", help="OWNER/NAME; it is made where it is not there")
    parser.add_argument("--private", action="store_true", help="if it is made: for its owner alone")
    parser.add_argument("--revision", metavar="BRANCH", help="a branch that is there (main)")
    add_options(parser)
    options = parser.parse(arguments)

    from some_moe.hf.pushing import push

    return write(push(**vars(options), say=say) + "\n")


COLUMNS = (text_column("task", "task"), text_column("metric", "metric"), number_column("value", "value", ".4f"))


def evaluate_harness(options: Namespace) -> int:
    """Score a run on tasks of lm-eval."""
    for name in ("adapt", "trigram", "seq_lens", "favour"):
        if getattr(options, name):
            raise UsageError(f"--tasks and --{name.replace('_', '-')} exclude each other; give one of them")
    tasks = [word.strip() for word in options.tasks.split(",") if word.strip()]
    if not tasks or len(set(tasks)) < len(tasks):
        raise UsageError(f"--tasks {options.tasks!r} names none, or one twice; write it like some_cloze,some_bytes")
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit {options.limit} is out of range; use 1 or more")
    if len(options.data or []) > 1:
        raise UsageError("--tasks go with one text; give one --data")
    for task in tasks:
        if not re.fullmatch(r"[\w.+-]{1,100}", task):
            raise UsageError(f"--tasks {task[:100]!r} is no name of a task; write it like some_cloze,some_bytes")
    if not (Path(options.run) / "config.json").is_file():  # which an exported folder has, and a run has not
        from some_moe.training.runs import load

        load(options.run, checkpoint=options.checkpoint)  # one that is none is refused before torch is loaded
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when it is first imported

    from some_moe.hf.evaluation import evaluate_tasks

    data = options.data[0] if options.data else None
    branch = {"base": options.base, "checkpoint": options.checkpoint}
    found = evaluate_tasks(options.run, tasks, data=data, limit=options.limit, device=options.device, **branch)
    if options.json:
        return write_json({"run": options.run, "tasks": found})
    rows = [{"task": task, "metric": m, "value": v} for task, scores in found.items() for m, v in scores.items()]
    return write("\n".join(format_table(*make_table(COLUMNS, rows), **look())) + "\n")

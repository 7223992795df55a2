"""The studies, from plan to page.

    python -m tools.studies plan                                    what is planned, done and open, with its minutes
    python -m tools.studies data --from DIR --out DIR               the texts that travel with a slice
    python -m tools.studies run --slice ladder --data DIR --out DIR --minutes 9 --workers 6
    python -m tools.studies take FILE                               puts the records of a run into results/
    python -m tools.studies pages [--check]                         makes docs/studies/*.md from results/

Records that are there are never measured again; the same command goes on with what is open.
"""

import sys
import tempfile
from pathlib import Path

from some_moe.cli import Parser, write
from some_moe.errors import BAD_INPUT, FAILED, ConfigError, FailureError, UsageError
from some_moe.memory import format_bytes
from tools.studies.plan import read_plan
from tools.studies.records import HOME, read_records, take

COMMAND = "python -m tools.studies"


def main(arguments: list[str]) -> int:
    """Run a verb and return the exit code."""
    verb, words = (arguments[0], arguments[1:]) if arguments else ("", [])
    try:
        if verb in VERBS:
            return VERBS[verb](words)
        if verb in ("-h", "--help"):
            return write(f"{__doc__}\nEach verb has --help.\n")
        raise UsageError(f"{verb!r} is no verb of the studies; use one of {', '.join(VERBS)}")
    except ConfigError as error:
        print(f"studies: {error}", file=sys.stderr)
        return BAD_INPUT
    except FailureError as error:
        print(f"studies: {error}", file=sys.stderr)
        return FAILED


def show_plan(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} plan", "Print every slice in the order of its value: runs, what is done, and minutes.")
    parser.add_argument("--results", default="results", metavar="DIR", help="where records are (results)")
    parser.add_argument("--workers", type=int, default=6, metavar="N", help="runs that share the chip (6)")
    parser.add_argument("--slice", metavar="NAME", help="one slice, run by run")
    options = parser.parse(arguments)

    from tools.studies.costs import foretell, minutes_of
    from tools.studies.outlook import describe_runs

    plan, records = read_plan(), read_records(Path(options.results))
    if options.slice:
        return write("\n".join(describe_runs(plan, plan.find(options.slice), records)) + "\n")
    lines, whole = [f"{'slice':<14} {'runs':>5} {'done':>5} {'GPU min':>8} {'minutes':>8}  commands of 9 minutes"], 0.0
    for study in plan.studies.values():
        total, done, seconds = foretell(plan, study, records)
        if study.on_cpu:
            lines.append(f"{study.name:<14} {total:>5} {done:>5} {'a CPU will do':>17}")
            continue
        minutes = minutes_of(total - done, seconds, 1 if study.is_alone else options.workers)
        whole += minutes
        lines.append(
            f"{study.name:<14} {total:>5} {done:>5} {seconds / 60:>8.1f} {minutes:>8.1f}  {-(-minutes // 8.5):.0f}"
        )
    uncovered = [f"{name} ({plan.left_out.get(name, 'NO REASON')})" for name in plan.list_uncovered()]
    lines += [f"all: {whole:.0f} minutes on an H200, {whole / 25.5:.1f} sittings of three commands"]
    lines += [f"registered runs that no slice measures: {', '.join(uncovered) or 'none'}"]
    return write("\n".join(lines) + "\n")


def make_data(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} data", "Write the folders of text that travel with a slice.")
    parser.add_argument("--from", dest="source", required=True, metavar="DIR", help="where the texts lie")
    parser.add_argument("--out", required=True, metavar="DIR", help="where tinystories/ and novels/ go")
    options = parser.parse(arguments)

    from tools.studies.texts import lay_out

    total = lay_out(Path(options.source), Path(options.out), lambda text: print(text, flush=True))
    return write(f"{format_bytes(total)} in {options.out}\n")


def run(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} run", "Run what is open of a slice, within a time; one file of records comes back.")
    parser.add_argument("--slice", required=True, metavar="NAME", help="as `plan` lists them")
    parser.add_argument("--data", required=True, metavar="DIR", help="the folder that `data` made")
    parser.add_argument("--out", required=True, metavar="DIR", help=f"where {HOME} goes")
    parser.add_argument("--results", default="results", metavar="DIR", help="records that are there (results)")
    parser.add_argument("--work", metavar="DIR", help="for run folders, each gone when it is done (a temporary one)")
    parser.add_argument("--minutes", type=float, default=9.0, metavar="X", help="no run is to end later (9)")
    parser.add_argument("--workers", type=int, default=6, metavar="N", help="runs that share the chip (6)")
    parser.add_argument("--most", type=int, metavar="N", help="begin no more runs than this (all that fit)")
    parser.add_argument("--size", default="full", metavar="full|mini", help="mini proves that it runs (full)")
    options = parser.parse(arguments)
    if options.workers < 1:
        raise UsageError(f"--workers {options.workers} runs nothing; use 1 or more")
    if not 0 < options.minutes <= 10_000:
        raise UsageError(f"--minutes {options.minutes:g} is out of range; use more than 0")
    plan = read_plan()
    study = plan.find(options.slice)

    from tools.studies.mini import SIZES
    from tools.studies.runner import run_slice

    if options.size not in SIZES:
        raise UsageError(f"--size {options.size!r} is unknown; use {', '.join(SIZES)}")
    with tempfile.TemporaryDirectory(prefix="studies-") as scratch:
        queue = run_slice(
            plan,
            study,
            data=Path(options.data).absolute(),
            out=Path(options.out).absolute(),
            work=Path(options.work or scratch).absolute(),
            records=read_records(Path(options.results)),
            minutes=options.minutes,
            workers=options.workers,
            most=options.most,
            small=SIZES[options.size],
            say=lambda text: print(text, flush=True),
        )
    return FAILED if not queue.new else 0


def take_home(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} take", "Put the records of a finished slice into the results.")
    parser.add_argument("file", metavar="FILE", help=HOME)
    parser.add_argument("--results", default="results", metavar="DIR", help="where they go (results)")
    options = parser.parse(arguments)
    new, old = take(Path(options.file), Path(options.results))
    kept = f"; {len(old)} were there and stay as they were" if old else ""
    return write(f"{len(new)} records are new in {options.results}{kept}\n")


def make_pages(arguments: list[str]) -> int:
    from tools.studies.pages import write_pages

    return write_pages(arguments)


VERBS = {"plan": show_plan, "data": make_data, "run": run, "take": take_home, "pages": make_pages}

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

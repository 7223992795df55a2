"""Guilds on real text, from trained runs to a page.

    python -m tools.guilds_study run --data DIR --out DIR [--device cuda]   trains every run, keeps its record alone
    python -m tools.guilds_study record RUN [RUN …] --out DIR               the records of runs that are trained
    python -m tools.guilds_study page                                       makes docs/studies/guilds.md from results/

The first two need nothing that draws (no matplotlib, scikit-learn, umap or scipy); put what they write into
results/guilds/. Records that are there are not made again.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from some_moe.cli import Parser, write
from some_moe.errors import BAD_INPUT, FAILED, ConfigError, FailureError, UsageError
from some_moe.system.files import write_whole
from some_moe.system.processes import python_command

COMMAND = "python -m tools.guilds_study"
RESULTS, PAGE = Path("results/guilds"), Path("docs/studies/guilds.md")
ARMS, SEEDS = ("A1", "A4"), (0, 1, 2)
STILL = ("--gravity.use-alpha", "false", "--gravity.use-beta", "false", "--gravity.use-delta", "false")


def main(arguments: list[str]) -> int:
    """Run a verb and return the exit code."""
    verb, words = (arguments[0], arguments[1:]) if arguments else ("", [])
    try:
        if verb in VERBS:
            return VERBS[verb](words)
        if verb in ("-h", "--help"):
            return write(f"{__doc__}\nEach verb has --help.\n")
        raise UsageError(f"{verb!r} is no verb of this study; use one of {', '.join(VERBS)}")
    except ConfigError as error:
        print(f"guilds: {error}", file=sys.stderr)
        return BAD_INPUT
    except FailureError as error:
        print(f"guilds: {error}", file=sys.stderr)
        return FAILED


def record_runs(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} record", "Measure trained runs, and write a record of each: RUN's name and .json.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders with a checkpoint and key snapshots")
    parser.add_argument("--data", metavar="TEXT", help="other text than the validation split")
    parser.add_argument("--out", default=str(RESULTS), metavar="DIR", help=f"where records go ({RESULTS})")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="where the model is replayed (cpu)")
    parser.add_argument("--max-tokens", type=int, default=20_000, metavar="N", help="tokens to replay (20,000)")
    options = parser.parse(arguments)
    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens {options.max_tokens} is out of range; use 1 or more")
    for run in map(Path, options.runs):
        record_run(
            run, Path(options.out) / f"{run.resolve().name}.json", options.data, options.device, options.max_tokens
        )
    return 0


def record_run(run: Path, place: Path, data: str | None, device: str, max_tokens: int) -> None:
    from tools.guilds_study.record import make_record

    record = make_record(run, data=data, device=device, max_tokens=max_tokens)
    place.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in record.items()]
    write_whole(place, "{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{place}: {record['passed']['knockout']} guilds supported, {record['seconds']} s", flush=True)


def run_all(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} run", "Train every run of the study, measure it, and keep its record alone.")
    parser.add_argument("--data", required=True, metavar="DIR", help="stories, as data.source takes them")
    parser.add_argument("--out", required=True, metavar="DIR", help="where records go")
    parser.add_argument("--work", default="build/guilds", metavar="DIR", help="where runs are trained (build/guilds)")
    parser.add_argument("--device", default="cuda", metavar="NAME", help="where models are trained and replayed (cuda)")
    parser.add_argument("--arms", default=",".join(ARMS), metavar="NAMES", help="registered runs (A1,A4)")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), metavar="NUMBERS", help="random seeds (0,1,2)")
    parser.add_argument("--minutes", type=float, default=9.0, metavar="N", help="begin no run after this time (9)")
    parser.add_argument("--max-tokens", type=int, default=20_000, metavar="N", help="tokens to replay (20,000)")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="behind --: settings of every run")
    options = parser.parse(arguments)
    began, out = time.monotonic(), Path(options.out)
    for seed in options.seeds.split(","):
        for arm in options.arms.split(","):
            for keys, settings in (("gravity", ()), ("still", STILL)):
                name = f"{arm}-{keys}-seed{seed}"
                if (out / f"{name}.json").exists() or (RESULTS / f"{name}.json").exists():
                    continue
                if time.monotonic() - began > 60 * options.minutes:
                    print(f"the time is over before {name}; the same command goes on with it", flush=True)
                    return 0
                folder = Path(options.work) / name
                train(folder, name, arm, seed, options, [*settings, *options.settings])
                record_run(folder, out / f"{name}.json", None, options.device, options.max_tokens)
                shutil.rmtree(folder)
    return 0


def train(folder: Path, name: str, arm: str, seed: str, options: object, settings: Sequence[str]) -> None:
    """Train one run; what an earlier, broken attempt left goes first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = ["train", "--preset", arm, "--name", name, "--out", str(folder), "--data.source", options.data]  # type: ignore[attr-defined]
    words += ["--train.seed", seed, "--model.expert-seed", seed, "--train.device", options.device]  # type: ignore[attr-defined]
    if subprocess.run([*python_command(), "-m", "some_moe", *words, *settings]).returncode:
        raise FailureError(f"{name} was not trained to its end; see what stands above, and run the same command again")


def write_page(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} page", f"Make {PAGE} from the records in {RESULTS}.")
    parser.add_argument("--results", default=str(RESULTS), metavar="DIR", help=f"where records are ({RESULTS})")
    parser.add_argument("--out", default=str(PAGE), metavar="FILE", help=f"the page ({PAGE})")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    options = parser.parse(arguments)
    from tools.guilds_study.page import make_page

    text, place = make_page(Path(options.results)), Path(options.out)
    if options.check:
        if not place.is_file() or place.read_text(encoding="utf-8") != text:
            raise FailureError(f"{str(place)!r} does not show the results; run `{COMMAND} page`")
        return write(f"{place} shows the results\n")
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, text)
    return write(f"{place}\n")


VERBS = {"run": run_all, "record": record_runs, "page": write_page}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

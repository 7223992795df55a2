"""The study of growing and merging, from text to page.

    python -m tools.grow_study run --work DIR --base NAME=FILES … --domain NAME=FILES … --unseen NAME=FILES …
    python -m tools.grow_study plan
    python -m tools.grow_study page

Every cell that is done is skipped when it is run again. Nothing of the texts is kept outside --work.
"""

import os
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from some_moe.cli import Parser, write
from some_moe.errors import BAD_INPUT, FAILED, ConfigError, FailureError, UsageError
from some_moe.system.files import write_whole
from some_moe.system.processes import quote_command
from tools.grow_study.cost import Clock, fill_slices
from tools.grow_study.plan import (
    BESIDE,
    FAMILIES,
    METHODS,
    SIZES,
    Cell,
    Study,
    choose_rates,
    find_rates,
    parse_cell,
    read_cells,
)

COMMAND = "python -m tools.grow_study"
VERBS = ("run", "cell", "plan", "page")


def main(arguments: list[str]) -> int:
    """Run a verb and return the exit code."""
    verb = arguments[0] if arguments else ""
    try:
        if verb == "run":
            return run(arguments[1:])
        if verb == "cell":
            return run_one(arguments[1:])
        if verb == "plan":
            return show_plan(arguments[1:])
        if verb == "page":
            from tools.grow_study.page import write_page

            return write_page(arguments[1:])
        if verb in ("-h", "--help"):
            return write(f"{__doc__}\nEach verb ({', '.join(VERBS)}) has --help.\n")
        raise UsageError(f"{verb!r} is no verb of the study; use one of {', '.join(VERBS)}")
    except ConfigError as error:
        print(f"grow_study: {error}", file=sys.stderr)
        return BAD_INPUT
    except FailureError as error:
        print(f"grow_study: {error}", file=sys.stderr)
        return FAILED


def run(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} run", "Run the study: every cell that is not done, side by side.")
    some = "NAME=FILES; FILES is a file or a pattern"
    parser.add_argument("--work", required=True, metavar="DIR", help="where texts, bases and branches lie")
    parser.add_argument("--base", nargs="+", required=True, metavar="TEXT", help=f"texts that bases learn: {some}")
    parser.add_argument("--domain", nargs="+", required=True, metavar="TEXT", help="texts that are grown, two or more")
    parser.add_argument("--unseen", nargs="+", required=True, metavar="TEXT", help="texts that nobody grows")
    parser.add_argument("--out", default="results/grow", metavar="DIR", help="results, one JSON a cell (results/grow)")
    parser.add_argument("--size", default="full", metavar="SIZE", help=f"{', '.join(SIZES)} (full)")
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cpu or cuda")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="cells side by side (1)")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="the first one tunes (0 1 2)"
    )
    parser.add_argument("--methods", nargs="+", metavar="M", help="some of them (default: all)")
    parser.add_argument("--fast", action="store_true", help="bases by the fast model (on a GPU)")
    parser.add_argument("--minutes", type=float, metavar="X", help="begin no cell that would not end by then")
    options = parser.parse(arguments)
    study = make_study(options, quote_command(["python", "-m", "tools.grow_study", "run", *map(hide_path, arguments)]))

    from tools.grow_study.cells import run_all

    run_all(study, lambda text: print(text, flush=True), minutes=options.minutes)
    return 0


def hide_path(word: str) -> str:
    """A word of the command as a result shows it: where files lie on a machine is nobody's business."""
    name, sign, _ = word.partition("=")
    return f"{name}=FILES" if sign else Path(word).name if os.sep in word else word


def make_study(options: Namespace, command: str) -> Study:
    """Lay the texts out, unless they are, and save what was asked for where cells find it."""
    from some_moe.data.dataset import prepare
    from tools.grow_study.texts import BASE, data_config, lay_out, learn_words, parse_texts

    given = {name: parse_texts(getattr(options, name), f"--{name}") for name in ("base", "domain", "unseen")}
    names = [name for texts in given.values() for name in texts]
    size, methods = options.size, options.methods
    all_methods = [name for name in METHODS if name not in BESIDE]
    for value, known, flag in (
        (size, list(SIZES), "--size"),
        *((one, all_methods, "--methods") for one in methods or []),
    ):
        if value not in known:
            raise UsageError(f"{flag} {value!r} is unknown; use {', '.join(known)}")
    if options.processes < 1:
        raise UsageError(f"--processes {options.processes} is out of range; use 1 or more")
    if len(set(names)) < len(names):
        raise UsageError("a text is given twice; each has a name of its own")
    if len(given["domain"]) < 2:
        raise UsageError("--domain needs two texts or more; there would be nothing to merge")
    work, out = (Path(getattr(options, name)).absolute() for name in ("work", "out"))
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    sizes, tokenizer = SIZES[size], work / "tokenizer.json"
    for name, cell in read_cells(out).items():
        if cell["size"] != {"name": size, **asdict(sizes)}:
            raise UsageError(
                f"--out {options.out!r} holds results of another size ({name}: {cell['size']['name']}); give another"
            )
    done = work / "texts" / "done"
    if not done.is_file():
        lay_out(given["base"] | given["domain"] | given["unseen"], list(given["base"]), work / "texts")
        write_whole(done, "")
    words = learn_words(tokenizer, work / "texts", sizes.vocab_size)
    digests = {}
    for name in (BASE, *names):
        config = data_config(work / "texts" / name, sizes.seq_len, sizes.batch_size, None)
        digests[name] = prepare(config, sizes.vocab_size, words).digest
    study = Study(
        work=work,
        out=out,
        size=size,
        device=options.device,
        base=tuple(given["base"]),
        domains=tuple(given["domain"]),
        unseen=tuple(given["unseen"]),
        seeds=tuple(options.seeds),
        methods=tuple(methods or all_methods),
        fast=options.fast,
        processes=options.processes,
        command=command,
        digests=digests,
    )
    write_whole(work / "study.json", study.save())
    return study


def run_one(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} cell", "Run one cell of a study that `run` has laid out, whatever was done before.")
    parser.add_argument("name", metavar="CELL", help="as base-gravity-seed0 or grow-rate0.0006-seed0")
    parser.add_argument("--work", required=True, metavar="DIR", help="the study's folder")
    options = parser.parse(arguments)

    try:
        cell = parse_cell(options.name)
    except (KeyError, ValueError):
        raise UsageError(f"{options.name!r} is no cell; those of a study are named in its folder `logs`") from None
    from tools.grow_study.cells import run_cell

    run_cell(Study.load(Path(options.work)), cell)
    return 0


def show_plan(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} plan", "Say what is left of the study, and how many minutes each slice of it takes.")
    parser.add_argument("--out", default="results/grow", metavar="DIR", help="results so far (results/grow)")
    parser.add_argument("--size", default="full", metavar="|".join(SIZES), help="(full)")
    parser.add_argument("--processes", type=int, default=16, metavar="N", help="cells side by side (16)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="(0 1 2)")
    parser.add_argument("--domains", type=int, default=6, metavar="N", help="texts that are grown (6)")
    parser.add_argument("--minutes", type=float, default=8.5, metavar="X", help="of a slice (8.5)")
    options = parser.parse(arguments)
    if options.size not in SIZES:
        raise UsageError(f"--size {options.size!r} is unknown; use {', '.join(SIZES)}")
    for name in ("processes", "domains", "minutes"):
        if not getattr(options, name) > 0:
            raise UsageError(f"--{name} {getattr(options, name)} is out of range; use more than 0")
    results = read_cells(Path(options.out))
    num_texts = options.domains + 4  # two of the base, one that nobody grows, and rows that change half-way
    clock = Clock(results, SIZES[options.size], options.domains, num_texts)
    said, first = [], options.seeds[0]
    for seed in options.seeds:
        left = [Cell("base", seed, family=family) for family in FAMILIES]
        for name, method in METHODS.items():
            if name in BESIDE:
                continue
            known = find_rates(name, results, first)
            chosen = choose_rates(name, results, first) or [sorted(known)[len(known) // 2]]
            rates = [*known, *([0.0] if seed == first and None in known.values() else [])]  # one beyond, as a rule
            left += [Cell(name, seed, rate, method.family) for rate in (rates if seed == first else chosen)]
        wanted = [cell for cell in left if cell.name not in results]
        if all(cell.method == "base" for cell in wanted):
            wanted = []  # which is not made again for its own sake
        slices = fill_slices([clock.expect(cell) for cell in wanted], options.processes, options.minutes)
        minutes = ", ".join(f"{one:.1f}" for one in slices)
        said.append(f"seed {seed}: {len(wanted)} cells, slices of {minutes or 'no'} minutes")
    source = f"measured in {len(results)} cells" if results else "guessed"
    title = f"{options.processes} cells side by side, at most {options.minutes:g} minutes a slice; seconds are {source}"
    return write("\n".join([title, *said, ""]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

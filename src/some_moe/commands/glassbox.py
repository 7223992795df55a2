"""`some analyze`: replay a run, measure, draw, and judge its guilds."""

import sys

from some_moe.cli import Parser, look, write, write_json
from some_moe.commands.training import add_branch_options
from some_moe.errors import UsageError
from some_moe.glass import MAX_TOKENS
from some_moe.system.reading import clean


def analyze_run(arguments: list[str]) -> int:
    """Look inside a run."""
    parser = Parser(
        "some analyze",
        "Look inside a run: replay it on its own text or another, measure how its experts share the work, map its keys "
        "and their movement, and test its guilds. Works on runs that are still training, too. Writes RUN/analysis/.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--collect-only", action="store_true", help="replay the model, keep what was seen, draw later")
    parser.add_argument("--draw-only", action="store_true", help="draw what was collected before; needs no model")
    parser.add_argument("--no-guilds", action="store_true", help="leave out the guilds, which take longest")
    parser.add_argument("--control", metavar="RUN", help="judge another run's guilds too, such as one with still keys")
    parser.add_argument("--split", default="valid", choices=("train", "valid", "test"), help="what is replayed")
    parser.add_argument("--data", metavar="TEXT", help="replay this instead: a file, a folder, or hf:OWNER/NAME")
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"tokens to replay (default {MAX_TOKENS:,})"
    )
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best (default), last, or step-N")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--out", metavar="DIR", help="where it goes instead of RUN/analysis; reports do not look there")
    parser.add_argument("--json", action="store_true", help="print one object")
    add_branch_options(parser)
    options = vars(parser.parse(arguments))
    if options["collect_only"] and options["draw_only"]:
        raise UsageError("--collect-only and --draw-only exclude each other; give one of them, or neither for both")
    if options["max_tokens"] < 1:
        raise UsageError(f"--max-tokens {options['max_tokens']} is out of range; use 1 or more")

    from some_moe.glass.api import analyze

    wants_json, guilds = options.pop("json"), not options.pop("no_guilds")
    found = analyze(**options, guilds=guilds, say=say)
    if wants_json:
        return write_json(clean(found.findings))
    return write(found.format(**look()))


def say(what: str) -> None:
    """Tell who waits what is going on."""
    print(clean(what), file=sys.stderr)

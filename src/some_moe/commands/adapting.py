"""`some adapt`: keys that move while they read."""

import sys
from pathlib import Path

from some_moe.cli import Parser, look, write, write_json
from some_moe.commands.training import take_settings
from some_moe.errors import UsageError


def adapt_keys(arguments: list[str]) -> int:
    """Read a stream with keys that move."""
    prog = "some adapt"
    parser = Parser(
        prog,
        "Let a run read texts, one after another: each chunk is scored first, then the keys move by the run's own "
        "gravity, without gradients. The run is not changed. Rules can be given as --gravity.FIELD VALUE.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--stream", nargs="+", required=True, metavar="F", help="texts, in the order they are read")
    parser.add_argument("--controls", metavar="A,B", help="also: still, random, bias, dynamic, trigram; or all (still)")
    parser.add_argument("--rate", default="1", metavar="0.3,1,3", help="factors on the rules and learning rates (1)")
    parser.add_argument("--valid", nargs="+", default=[], metavar="F", help="texts by which the best rate is chosen")
    parser.add_argument("--keep", metavar="F", help="old text, scored before and after (the run's valid split)")
    parser.add_argument("--chunk-tokens", type=int, metavar="N", help="so many are scored, then keys move (2048)")
    parser.add_argument("--out", metavar="DIR", help="save the moved keys as a run of its own")
    parser.add_argument("--html", metavar="F", help="write a page with the curves")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best (default), last, or step-N")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--json", action="store_true", help="print one object")
    settings, words = take_settings(arguments, prog)
    options = vars(parser.parse(words))
    as_json, page = options.pop("json"), options.pop("html")
    if page is not None and (Path(page).is_dir() or not Path(page).absolute().parent.is_dir()):
        raise UsageError(f"--html {page!r} is no place for a page; name a file in a folder that is there")
    options["rates"] = read_rates(options.pop("rate"))
    options["controls"] = [word.strip() for word in (options["controls"] or "still").split(",")]

    from some_moe.training.runs import load

    load(options["run"], checkpoint=options["checkpoint"])  # one that is none is refused before torch is loaded

    from some_moe.glass.adaptation import adapt
    from some_moe.system.files import write_whole
    from some_moe.system.staging import writing

    found = adapt(**options, changes=settings, say=lambda text: print(text, file=sys.stderr, flush=True))
    if page is not None:
        with writing(Path(page)):
            write_whole(Path(page), found.page())
    return write_json(found.to_dict()) if as_json else write(found.format(**look()))


def read_rates(text: str) -> list[float]:
    """Read "0.3,1,3", different numbers, as a list."""
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--rate {text[:80]!r} is not a list of numbers; write it like 0.3,1,3") from None
    if len(set(rates)) < len(rates):
        raise UsageError(f"--rate {text[:80]!r} names a rate twice; name each once")
    return rates

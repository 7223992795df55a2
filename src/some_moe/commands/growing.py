"""`some grow`, `some merge` and `some prune`: libraries that are put together like files."""

from some_moe.cli import Parser, look, write
from some_moe.commands.training import take_settings


def grow_branch(arguments: list[str]) -> int:
    """Grow a branch on a text."""
    prog = "some grow"
    parser = Parser(
        prog,
        "Add experts to a trained model and let them learn a text; nothing that was there changes. Settings of data "
        "and training can be given as --data.FIELD and --train.FIELD VALUE.",
    )
    parser.add_argument("run", metavar="RUN", help="the base: a run folder, which is not written to")
    parser.add_argument("--data", metavar="F", help="the text to learn: a file, a folder, or hf:OWNER/NAME")
    parser.add_argument("--out", metavar="DIR", help="the grown run (default: runs/RUN-grown)")
    parser.add_argument("--experts", type=int, default=16, metavar="N", help="new experts in every layer (16)")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="training steps (400)")
    parser.add_argument("--trainability", default="full", metavar="full|lora", help="how the new ones learn (full)")
    parser.add_argument("--lora-rank", type=int, default=8, metavar="R", help="rank of a low-rank update (8)")
    parser.add_argument(
        "--looks-back", type=float, default=0.7, metavar="X", help="weight of the text before a token (0.7; 0: none)"
    )
    parser.add_argument("--head-rank", type=int, default=32, metavar="R", help="rank of its update of the head (32)")
    parser.add_argument("--keep", metavar="F", help="text that must not be lost (default: what the base writes itself)")
    parser.add_argument(
        "--share", type=float, metavar="X", help="of the kept text, how much may use new experts (0.02)"
    )
    parser.add_argument(
        "--favour", type=float, default=0.0, metavar="X", help="choose new experts more (or less) readily"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, if it has begun")
    settings, words = take_settings(arguments, prog)
    options = vars(parser.parse(words))

    from some_moe.commands.tables import format_result
    from some_moe.growth.api import grow

    if options["share"] is None:
        del options["share"]
    run = grow(**options, changes=settings)
    assert run.result is not None
    return write(format_result(str(run.path), run.result, **look()))


def merge_branches(arguments: list[str]) -> int:
    """Put the branches of several runs into one."""
    parser = Parser("some merge", "Put the branches of grown runs side by side, in one run. Nothing is trained.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="grown or merged runs of one base")
    parser.add_argument("--out", required=True, metavar="DIR", help="the merged run")
    parser.add_argument("--base", metavar="DIR", help="where their base is, if it was moved")
    parser.add_argument("--favour", type=float, default=0.0, metavar="X", help="choose branches more (or less) readily")
    options = parser.parse(arguments)

    from some_moe.growth.api import merge
    from some_moe.growth.opening import read_grown

    run = merge(options.runs, options.out, base=options.base, favour=options.favour)
    return write(f"{run.path}: {', '.join(branch.name for branch in read_grown(run.path).branches)}\n")


def prune_branch(arguments: list[str]) -> int:
    """Take a branch out of a run."""
    parser = Parser("some prune", "Take a branch out of a run: what remains is as if it had never been there.")
    parser.add_argument("run", metavar="RUN", help="a merged run, which is not written to")
    parser.add_argument("--branch", required=True, metavar="NAME", help="the branch to take out")
    parser.add_argument("--out", required=True, metavar="DIR", help="the run without it")
    parser.add_argument("--base", metavar="DIR", help="where its base is, if it was moved")
    options = parser.parse(arguments)

    from some_moe.growth.api import prune
    from some_moe.growth.opening import read_grown

    run = prune(options.run, options.branch, options.out, base=options.base)
    return write(f"{run.path}: {', '.join(branch.name for branch in read_grown(run.path).branches)}\n")

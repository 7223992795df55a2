"""`some report`: a run as a page, or several beside each other."""

from pathlib import Path

from some_moe.cli import Parser, look, write
from some_moe.commands.glassbox import say
from some_moe.commands.training import add_branch_options
from some_moe.errors import UsageError


def write_report(arguments: list[str]) -> int:
    """Write a run, or a comparison of runs, as HTML and as Markdown."""
    parser = Parser(
        "some report",
        "Write a run as one page (RUN/report.html and report.md), or several runs as a comparison (./report.html). "
        "A run that was not analysed since its last checkpoint is analysed first.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument("--out", metavar="F.html", help="where the page goes; the Markdown lies beside it")
    parser.add_argument("--no-analyze", action="store_true", help="show what there is, and analyse nothing")
    add_branch_options(parser)
    options = parser.parse(arguments)
    if options.out is not None and not options.out.endswith(".html"):
        raise UsageError(f"--out {options.out} is not a page; give a name that ends in .html")
    if options.out is not None and not Path(options.out).absolute().parent.is_dir():
        raise UsageError(f"--out {options.out} lies in a folder that does not exist; make the folder first")

    from some_moe.glass.api import report

    branches = {"base": options.base, "favour": options.favour}
    found = report(options.runs, out=options.out, analyze=not options.no_analyze, **branches, say=say)
    return write(found.format(**look()))

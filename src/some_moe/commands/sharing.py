"""`some export` and `some push`: runs for those who use transformers."""

import sys
from pathlib import Path

from some_moe.cli import Parser, write


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

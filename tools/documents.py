"""Makes docs/results.md, its figures, and the tables and figures of docs/audit.md from the results.

Run from the repository's root: `python -m tools.documents`, or with --check to learn whether they are up to date.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from some_moe.cli import Parser, write
from some_moe.errors import BAD_INPUT, FAILED, ConfigError, UsageError
from some_moe.glass.page.markdown import plain, sentence
from some_moe.lab.published import compare_results, read_results, take_published_sizes
from some_moe.lab.published_tables import group_comparisons
from some_moe.system.files import write_whole
from tools.audit import draw_shown, fill_audit
from tools.audit_evidence import Evidence, read_lengths
from tools.experiment_index import write_index
from tools.published_document import link_to, write_document
from tools.published_figures import draw_losses, draw_usage, shows_the_same

COMMAND = "python -m tools.documents"
AUDIT = "audit.md"
INDEX_NOTE = (
    "The entries and fields of the published index, in its order, with what was measured here beside them. The MVP "
    "runs stand outside that index."
)


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    try:
        return write_documents(arguments)
    except ConfigError as error:
        print(f"documents: {error}", file=sys.stderr)
        return BAD_INPUT


def write_documents(arguments: list[str]) -> int:
    """Write the documents and their figures, or tell whether they are up to date."""
    parser = Parser(
        COMMAND,
        "Write the results as a document: tables, figures (in a folder `figures` beside it) and the experiment index. "
        "The tables of an audit.md beside it and the figures that it shows are made anew; its prose stays.",
    )
    parser.add_argument("--results", metavar="DIR", default="results", help="where the results are (results)")
    parser.add_argument("--out", metavar="F.md", default="docs/results.md", help="the document (docs/results.md)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not up to date")
    options = parser.parse(arguments)
    out = Path(options.out)
    if out.suffix != ".md":
        raise UsageError(f"--out {out} is not Markdown; give a name that ends in .md")
    if out.name == AUDIT:
        raise UsageError(f"--out {out} is the name of the audit, which is written by hand; give another name")
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file in it")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out} lies in a folder that does not exist; make the folder first")
    files = make_documents(Path(options.results), out)
    documents = ", ".join(str(path) for path in files if path.suffix == ".md")
    num_figures = sum(path.suffix == ".svg" for path in files)
    if not options.check:
        for path, contents in files.items():
            write_file(path, contents)
        return write(f"{documents}, and {num_figures} figures in {out.parent / 'figures'}\n")
    outdated = find_outdated(files)
    if not outdated:
        return write(f"{documents} and {num_figures} figures show the results\n")
    path, fault = outdated[0]
    others = f", and {len(outdated) - 1} more files are out of date" if len(outdated) > 1 else ""
    print(f"documents: {path} {fault}{others}; run `{COMMAND}`", file=sys.stderr)
    return FAILED


def make_documents(results: Path, out: Path) -> dict[Path, bytes]:
    """Return {path: contents} of the document at `out` and of its figures, in a folder `figures` beside it.

    Where an audit lies beside the document, it is there too, its tables made anew, with the figures that it shows.
    """
    found, _ = read_results(results)
    comparisons = compare_results(take_published_sizes(found, results))
    figures: dict[Path, bytes] = {}
    paragraphs: dict[str, list[str]] = {}
    for series, members in group_comparisons(comparisons).items():
        short = re.sub(r"[^a-z0-9]+", "-", series.split(" (")[0].lower()).strip("-")
        for kind, draw in (("loss", draw_losses), ("usage", draw_usage)):
            drawing = draw({series: members})
            if drawing is not None:
                file = out.parent / "figures" / f"{out.stem}-{kind}-{short}.svg"
                figures[file] = drawing.to_svg()
                picture = f"![{plain(f'{series}. {drawing.title}')}]({link_to(file, out.parent)})"
                paragraphs.setdefault(series, []).extend([picture, sentence(drawing.caption)])
    index = ["## Experiment index, v2 to v7", INDEX_NOTE, *write_index(comparisons)]
    text = write_document(comparisons, folder=out.parent, figures=paragraphs, closing=index)
    documents = {out: text.encode()}
    audit = out.with_name(AUDIT)
    if audit.is_file():
        evidence = Evidence(results=found, lengths=read_lengths(results / "audit"))
        prose = audit.read_text(encoding="utf-8")
        documents[audit] = fill_audit(prose, evidence, file=str(audit)).encode()
        for name, drawing in draw_shown(prose, evidence, file=str(audit)).items():
            figures[out.parent / "figures" / f"{name}.svg"] = drawing.to_svg()
    return documents | figures


def write_file(path: Path, contents: bytes) -> None:
    """Write a file whole; where that is impossible, say so in one sentence."""
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, contents)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written ({error.strerror}); choose another place") from None


def find_outdated(files: Mapping[Path, bytes]) -> list[tuple[Path, str]]:
    """Return (path, what is wrong with it) for each file that is not on disk as it would be made."""
    outdated = []
    for path, made in files.items():
        if not path.is_file():
            outdated.append((path, "is missing"))
        elif not shows_the_same(path.read_bytes(), made):
            outdated.append((path, "does not show the results"))
    return outdated


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

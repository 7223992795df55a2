"""docs/results.md: everything published beside everything measured, made by a command and never by hand.

Beside it may lie docs/audit.md, which is written by hand but for its tables and figures.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from some_moe.glass.page.markdown import plain, sentence, write_rows
from some_moe.lab.published import Comparison, compare_results, read_results
from some_moe.lab.published_tables import (
    Sheet,
    cost_sheet,
    epoch_sheets,
    final_sheets,
    group_comparisons,
    head_series,
    list_verdicts,
    make_overview,
    seed_sheet,
    size_sheet,
)
from some_moe.lab.result_notes import list_notes
from tools.audit import fill_audit
from tools.audit_evidence import Evidence, read_lengths
from tools.experiment_index import write_index

if TYPE_CHECKING:  # for its name alone: tables need no matplotlib
    from tools.figures_published import PublishedFigure

AUDIT = "audit.md"
TITLE = "# Results: published and measured"
ORIGIN = (
    "Made by `some experiments docs` from the files in {results}; `some experiments docs --check` tells whether it "
    "still shows them. Change nothing here by hand."
)
HOW_TO_READ = (
    "The published reports up to v4 average the validation loss over padding, which is easy to foresee (none says so, "
    "but their figures do: `docs/audit.md` tells how): their losses "
    "are not nats per real token. Each run here is therefore scored both ways, *with padding* to be compared with its "
    "report, and *over real tokens* to be believed. Gini, entropy and experts used are of the middle layer, in "
    "validation. A dash stands for what was not published, or not measured. Behind ± is the standard deviation over "
    "seeds; where there is none, one seed was run, and a small difference may be chance."
)


@dataclass(frozen=True)
class Illustration:
    """A figure in the document: its file, and its words."""

    file: Path
    title: str
    caption: str


def make_documents(results: Path, out: Path) -> dict[Path, bytes]:
    """Return {path: contents} of the document at `out` and of its figures, in a folder `figures` beside it.

    Where an audit lies beside the document, it is there too, its tables made anew, with the figures that it shows.
    """
    from tools.figures_audit import draw_shown

    found = read_results(results)[0]
    comparisons = compare_results(found)
    files: dict[Path, bytes] = {}
    illustrations: dict[str, list[Illustration]] = {}
    for series, name, drawing in _draw_all(comparisons):
        file = out.parent / "figures" / f"{out.stem}-{name}.svg"
        files[file] = drawing.to_bytes("svg")
        illustrations.setdefault(series, []).append(Illustration(file, f"{series}. {drawing.title}", drawing.caption))
    text = write_document(comparisons, folder=out.parent, illustrations=illustrations, index=True)
    documents = {out: text.encode()}
    audit = out.with_name(AUDIT)
    if audit.is_file():
        evidence = Evidence(results=found, lengths=read_lengths(results / "audit"))
        prose = audit.read_text(encoding="utf-8")
        documents[audit] = fill_audit(prose, evidence, file=str(audit)).encode()
        for name, drawing in draw_shown(prose, evidence, file=str(audit)).items():
            files[out.parent / "figures" / f"{name}.svg"] = drawing.to_bytes("svg")
    return documents | files


def _draw_all(comparisons: Sequence[Comparison]) -> "list[tuple[str, str, PublishedFigure]]":
    """Return (series, name, figure): the losses and the usage of each series in which there is something to compare."""
    from tools.figures_published import draw_losses, draw_usage

    drawn = []
    for series, members in group_comparisons(comparisons).items():
        short = re.sub(r"[^a-z0-9]+", "-", series.split(" (")[0].lower()).strip("-")
        for kind, draw in (("loss", draw_losses), ("usage", draw_usage)):
            drawing = draw({series: members})
            if drawing is not None:
                drawn.append((series, f"{kind}-{short}", drawing))
    return drawn


def find_outdated(files: Mapping[Path, bytes]) -> list[tuple[Path, str]]:
    """Return (path, what is wrong with it) for each file that is not on disk as it would be made."""
    from tools.figures_published import shows_the_same

    outdated = []
    for path, made in files.items():
        if not path.is_file():
            outdated.append((path, "is missing"))
        elif not shows_the_same(path.read_bytes(), made):
            outdated.append((path, "does not show the results"))
    return outdated


# --- the document ---------------------------------------------------------------------------------------------


def write_document(
    comparisons: Sequence[Comparison],
    *,
    folder: Path,
    illustrations: Mapping[str, Sequence[Illustration]] | None = None,
    index: bool = False,
) -> str:
    """The whole document as Markdown, for a file in `folder`, from which its links count."""
    places = sorted({result.file.parent for comparison in comparisons for result in comparison.results})
    origin = ORIGIN.format(results=", ".join(f"`{place.name or place}`" for place in places))
    parts = [TITLE, origin, HOW_TO_READ, "## In short", *_write_sheets(make_overview(comparisons))]
    parts.append("\n".join(f"- **{meaning}**: {plain(which)}" for meaning, which in list_verdicts(comparisons)))
    for series, members in group_comparisons(comparisons).items():
        parts += _write_series(series, members, folder, (illustrations or {}).get(series, ()))
    notes = list_notes(comparisons)
    if notes:
        parts += ["## Where a run is not the published one", "\n".join(f"- {plain(note)}" for note in notes)]
    if index:
        parts += ["## Experiment index, v2 to v7", INDEX_NOTE, *write_index(comparisons)]
    return "\n\n".join(part for part in parts if part) + "\n"


INDEX_NOTE = (
    "The entries and fields of the published index, in its order, with what was measured here beside them. The MVP "
    "runs stand outside that index."
)


def _write_series(
    series: str, members: Sequence[Comparison], folder: Path, illustrations: Sequence[Illustration]
) -> list[str]:
    results = [result for comparison in members for result in comparison.results]
    parts = [f"## {plain(head_series(series, members))}"]
    if not results:
        return [*parts, *_write_sheets(final_sheets(members)), "None of these runs has been measured yet."]
    for figure in illustrations:
        parts += [f"![{plain(figure.title)}]({_link(figure.file, folder)})", sentence(figure.caption)]
    parts += _write_sheets([*final_sheets(members), *seed_sheet(members), *size_sheet(members)])
    files = {result.file.name: f"[{plain(result.file.stem)}]({_link(result.file, folder)})" for result in results}
    parts += _write_sheets(cost_sheet(results), name=lambda cell: files[cell])
    epochs = _write_sheets(epoch_sheets(members))
    if epochs:
        parts += ["<details><summary>Every epoch</summary>", *epochs, "</details>"]
    return parts


def _write_sheets(sheets: Sequence[Sheet], name: Callable[[str], str] = plain) -> list[str]:
    """Each table under its title and note. name: how the first cell of a row is written."""
    parts = []
    for sheet in sheets:
        parts.append(f"**{plain(sheet.title)}.** {sentence(sheet.note)}".rstrip())
        parts.append(write_rows(sheet.columns, sheet.rows, name=name))
    return parts


def _link(file: Path, folder: Path) -> str:
    """The way from a folder to a file, as a link that no character of it can end."""
    return quote(os.path.relpath(file, folder).replace(os.sep, "/"))

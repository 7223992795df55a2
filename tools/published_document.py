"""Everything published beside everything measured, as a Markdown document made from the results alone."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from some_moe.glass.page.markdown import plain, sentence, write_rows
from some_moe.lab.published import Comparison
from some_moe.lab.published_tables import (
    Sheet,
    epoch_sheets,
    group_comparisons,
    head_series,
    list_sheets,
    list_verdicts,
    make_overview,
)
from some_moe.lab.result_notes import list_notes

TITLE = "# Results: published and measured"
ORIGIN = (
    "Made by `make docs` from the files in {results}; `make docs-check` tells whether it still shows them. Change "
    "nothing here by hand."
)
HOW_TO_READ = (
    "The published reports up to v4 average the validation loss over padding, which is easy to foresee (none says so, "
    "but their figures do: `docs/audit.md` tells how): their losses "
    "are not nats per real token. Each run here is therefore scored both ways, *with padding* to be compared with its "
    "report, and *over real tokens* to be believed. Gini, entropy and experts used are of the middle layer, in "
    "validation. A dash stands for what was not published, or not measured. Behind ± is the standard deviation over "
    "seeds; where there is none, one seed was run, and a small difference may be chance."
)


def write_document(
    comparisons: Sequence[Comparison],
    *,
    folder: Path,
    figures: Mapping[str, Sequence[str]],
    closing: Sequence[str],
) -> str:
    """The whole document as Markdown, for a file in `folder`, from which its links count.

    figures: paragraphs to stand first under a series; closing: those at the end.
    """
    places = sorted({result.file.parent for comparison in comparisons for result in comparison.results})
    origin = ORIGIN.format(results=", ".join(f"`{place.name or place}`" for place in places))
    parts = [TITLE, origin, HOW_TO_READ, "## In short", *_write_sheets(make_overview(comparisons))]
    parts.append("\n".join(f"- **{meaning}**: {plain(which)}" for meaning, which in list_verdicts(comparisons)))
    for series, members in group_comparisons(comparisons).items():
        parts += [f"## {plain(head_series(series, members))}", *figures.get(series, ())]
        parts += _write_series(members, folder)
    notes = list_notes(comparisons)
    if notes:
        parts += ["## Where a run is not the published one", "\n".join(f"- {plain(note)}" for note in notes)]
    return "\n\n".join(part for part in (*parts, *closing) if part) + "\n"


def _write_series(members: Sequence[Comparison], folder: Path) -> list[str]:
    results = [result for run in members for result in run.results]
    links = {result.file.name: f"[{plain(result.file.stem)}]({link_to(result.file, folder)})" for result in results}
    parts = _write_sheets(list_sheets(members), links)
    if not results:
        return [*parts, "None of these runs has been measured yet."]
    epochs = _write_sheets(epoch_sheets(members))
    return [*parts, "<details><summary>Every epoch</summary>", *epochs, "</details>"] if epochs else parts


def _write_sheets(sheets: Sequence[Sheet], links: Mapping[str, str] | None = None) -> list[str]:
    """Each table under its title and note. links: what stands for a row's first cell."""
    parts = []
    for sheet in sheets:
        parts.append(f"**{plain(sheet.title)}.** {sentence(sheet.note)}".rstrip())
        parts.append(write_rows(sheet.columns, sheet.rows, name=lambda cell: (links or {}).get(cell) or plain(cell)))
    return parts


def link_to(file: Path, folder: Path) -> str:
    """The way from a folder to a file, as a link that no character of it can end."""
    return quote(os.path.relpath(file, folder).replace(os.sep, "/"))

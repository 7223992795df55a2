"""Everything published beside everything measured, as a Markdown document made from the results alone."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from urllib.parse import quote

from some_moe.data.sources import SPLITS
from some_moe.glass.page.markdown import plain, sentence, write_rows
from some_moe.lab.published import OUTSIDE, WITHIN, Comparison, Result, list_rows
from some_moe.lab.published_tables import (
    EPOCH,
    RUN,
    figure_column,
    group_comparisons,
    head_series,
    list_notes,
    list_tables,
    list_verdicts,
    make_tables,
    tabulate_points,
)
from some_moe.lab.registry import EXPERIMENTS
from some_moe.layout import ABSENT, Column, Table

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
    "seeds; where there is none, one seed was run, and a small difference may be chance. Runs of V, A and B read "
    "10,000 stories or, where 20,000 were published, the 17,996 that are there, and are validated on 1,500; the others "
    "read a first sample of 6,903, more often, and are validated on 400. With 400 a padded loss has a standard error "
    "of 1 to 3 % besides, one over real tokens of about 0.03 nats; with 1,500 half of that. *Within* and *outside* "
    "assume that the published rows held as "
    "much text as ours: `docs/audit.md` says more on both."
)

DATA_NOTE = (
    "Digests are of the token ids that were read, of the files' bytes, and of the tokenizer; sizes are documents. "
    "Records from before 18 November 2026 have none."
)
NOTES = {
    "Published losses": "Within and outside (on either side) count published losses, of every epoch that a report "
    "prints.",
    "Validation loss": "Validation, in nats; difference: measured minus published.",
    "Validation over real tokens": "Loss in nats per real token at the end and at the best step, and the perplexity at "
    "the end. The reports up to v4 count padding, which is easy to foresee: their perplexities belong beside the "
    "column with padding.",
    "Gini of the middle layer": "Of selections in validation. The reports up to v4 count all positions, padding too.",
    "Validation loss over seeds": "Mean ± standard deviation at the last step; lowest and highest are over real "
    "tokens.",
    "Steps and speed": "Seconds are of training steps alone, on a machine that other runs may have shared.",
}
"""How to read a table, by its title up to a comma."""


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
    parts = [TITLE, origin, HOW_TO_READ, "## In short", *_write_tables(make_overview(comparisons))]
    parts.append("\n".join(f"- **{meaning}**: {plain(which)}" for meaning, which in list_verdicts(comparisons).items()))
    for series, members in group_comparisons(comparisons).items():
        parts += [f"## {plain(head_series(series, members))}", *figures.get(series, ())]
        parts += _write_series(members, folder)
    data = tabulate_data([result for comparison in comparisons for result in comparison.results])
    if data:
        parts += ["## What they read", DATA_NOTE, *_write_tables(data)]
    notes = list_notes(comparisons)
    if notes:
        parts += ["## Where a run is not the published one", "\n".join(f"- {plain(note)}" for note in notes)]
    return "\n\n".join(part for part in (*parts, *closing) if part) + "\n"


def _write_series(members: Sequence[Comparison], folder: Path) -> list[str]:
    results = [result for run in members for result in run.results]
    links = {result.file.name: f"[{plain(result.file.stem)}]({link_to(result.file, folder)})" for result in results}
    parts = _write_tables(list_tables(members), links)
    if not results:
        return [*parts, "None of these runs has been measured yet."]
    points = [point for run in members if run.results for point in run.epochs]
    epochs = _write_tables(tabulate_points(points, (RUN, EPOCH)))
    return [*parts, "<details><summary>Every epoch</summary>", *epochs, "</details>"] if epochs else parts


def make_overview(comparisons: Sequence[Comparison]) -> dict[str, Table]:
    """One row a series: how many of its runs were measured, and how many published losses were met."""
    registered = Counter(experiment.series for experiment in EXPERIMENTS)

    def count_column(verdict: str) -> Column:
        return figure_column(verdict, lambda members: str(sum(p.verdict == verdict for c in members for p in c.judged)))

    columns = (
        Column("series", lambda members: members[0].experiment.series),
        Column("tolerance", lambda members: str(members[0].tolerance or ABSENT)),
        figure_column("registered", lambda members: str(registered[members[0].experiment.series])),
        figure_column("measured", lambda members: str(sum(bool(c.results) for c in members))),
        count_column(WITHIN),
        count_column(OUTSIDE),
    )
    return make_tables(("Published losses", columns, list(group_comparisons(comparisons).values())))


def tabulate_data(results: Sequence[Result]) -> dict[str, Table]:
    """One row for each data that was read, where the records describe it, with the runs that read it."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        data = result.data
        tokenizer = data.get("tokenizer")
        if not isinstance(tokenizer, dict) or not isinstance(data.get("digest"), str):
            continue
        files = [f"{file.get('name')} ({file.get('digest')})" for file in list_rows(data.get("files"))]
        sizes = " / ".join(f"{result.documents[split]:,}" for split in SPLITS if split in result.documents)
        words = f"{tokenizer.get('vocab_size')} ids ({tokenizer.get('digest')})"
        rows.setdefault((data["digest"][:12], ", ".join(files), sizes, words), []).append(result.file.stem)
    heads = ("digest", "files", "train / valid / test", "tokenizer")
    columns = [Column(head, itemgetter(place)) for place, head in enumerate((*heads, "runs"))]
    return make_tables(("Data", columns, [(*told, ", ".join(runs)) for told, runs in rows.items()]))


def _write_tables(tables: Mapping[str, Table], links: Mapping[str, str] | None = None) -> list[str]:
    """Each table under its title and note. links: what stands for a row's first cell."""
    parts = []
    for title, table in tables.items():
        parts.append(f"**{plain(title)}.** {sentence(NOTES.get(title.partition(',')[0], ''))}".rstrip())
        parts.append(write_rows(*table, name=lambda cell: (links or {}).get(cell) or plain(cell)))
    return parts


def link_to(file: Path, folder: Path) -> str:
    """The way from a folder to a file, as a link that no character of it can end."""
    return quote(os.path.relpath(file, folder).replace(os.sep, "/"))

"""The page of the study and its figure, from the cells' results alone."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from some_moe.cli import Parser, write
from some_moe.errors import FAILED, ConfigError
from some_moe.system.files import write_whole
from tools.grow_study.plan import (
    BESIDE,
    CHOSEN_AT,
    FAMILIES,
    LIMITS,
    METHODS,
    TOLD,
    Cell,
    best_point,
    choose_rate,
    find_rates,
    read_cells,
    rows_of,
)

SHOWN = "results/grow/laptop"  # until a larger size is done
OURS = "grow-context"  # as `some grow` makes it
EACH_TOKEN = "grow"  # with `--looks-back 0`
LATER = ("adapters-words", "alone-words")  # controls that no plan named, added when the library was ahead of the others
WHOLE_ROW = ("adapters", *LATER)  # a model is chosen for a row that was read to its end
AHEAD, WITHIN = 0.05, 0.1  # nats, of the claim
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95 %, by the number of seeds
CEILINGS = ("grow-told", "adapters-told", "alone-told", "joint", "joint-dense")
Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """All cells that are done; a method's figures are those of its chosen rate, one a seed."""

    cells: Mapping[str, Mapping[str, Any]]

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({cell["seed"] for cell in self.cells.values()})

    @cached_property
    def any(self) -> Mapping[str, Any]:
        return next(iter(self.cells.values()))

    def rate(self, method: str) -> float | None:
        """The chosen rate; before all are tried, the best so far."""
        tried = find_rates(method, self.cells, self.seeds[0])
        done = {rate: gained for rate, gained in tried.items() if gained is not None}
        return min(done, key=lambda rate: done[rate]) if done else None

    def base(self, method: str, seed: int) -> Mapping[str, Any] | None:
        return self.cells.get(Cell("base", seed, family=METHODS[method].family).name)

    def records(self, method: str) -> dict[int, Mapping[str, Any]]:
        """The cells of a method at its chosen rate, by seed, where their base was scored too."""
        rate = self.rate(method)
        found = (
            {}
            if rate is None
            else {s: self.cells.get(Cell(BESIDE.get(method, method), s, rate).name) for s in self.seeds}
        )
        return {seed: cell for seed, cell in found.items() if cell is not None and self.base(method, seed) is not None}

    def rows(self, method: str, seed: int) -> list[Row]:
        return rows_of(method, self.records(method)[seed])

    def lost(self, method: str, seed: int, row: Row, split: str = "test") -> float:
        base = self.base(method, seed)
        assert base is not None
        return float(row[split]["base"] - base["rows"][0][split]["base"])

    def at(self, method: str, limit: float) -> dict[int, Row]:
        """The point of each seed's curve that valid chooses where no more than `limit` is lost."""
        found = {}
        for seed in self.records(method):
            base = self.base(method, seed)
            assert base is not None
            found[seed] = best_point(self.rows(method, seed), base, limit)
        return found

    def curve(self, method: str) -> list[tuple[float, float]]:
        """Lost and gained on test at each point, means over seeds."""
        seeds = list(self.records(method))
        if not seeds:
            return []
        points = zip(*(self.rows(method, seed) for seed in seeds), strict=True)
        return [
            (
                mean(self.lost(method, seed, row) for seed, row in zip(seeds, rows, strict=True)),
                mean(row["test"]["gained"] for row in rows),
            )
            for rows in points
        ]


def write_page(arguments: list[str]) -> int:
    parser = Parser("python -m tools.grow_study page", "Write the study's page and its figure from the results.")
    parser.add_argument("--results", default=SHOWN, metavar="DIR", help=f"the cells' results ({SHOWN})")
    parser.add_argument("--out", default="docs/studies/grow.md", metavar="F.md", help="the page (docs/studies/grow.md)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    options = parser.parse(arguments)
    files = make_page(Path(options.results), Path(options.out))
    if options.check:
        from tools.documents import find_outdated

        for path, fault in find_outdated(files):
            print(f"grow_study: {path} {fault}; run `python -m tools.grow_study page`", file=sys.stderr)
            return FAILED
        return write(f"{options.out} shows the results\n")
    for path, contents in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, contents)
    return write(f"{', '.join(map(str, files))}\n")


def make_page(folder: Path, out: Path) -> dict[Path, bytes]:
    """{path: contents} of the page at `out` and of its figure."""
    from tools.grow_study.figure import draw_frontier

    cells = read_cells(folder)
    if not cells:
        raise ConfigError(
            f"{str(folder)!r} holds no results; run the study first: python -m tools.grow_study run --help"
        )
    results = Results(cells)
    figure = out.parent.parent / "figures" / f"study-{out.stem}.svg"
    drawing = draw_frontier(results)
    link = os.path.relpath(figure, out.parent)
    parts = [
        "# Grow and merge: prove or break",
        f"Made from `{folder}` by `python -m tools.grow_study page`. What was expected, written before the first run: "
        "[predictions](grow-predictions.md). How it is used: [growing](../growing.md).",
        "## Verdict",
        conclude(results),
        "## What was run",
        *describe(results),
        "## The claim",
        *judge(results),
        "### Each token alone",
        "Branches are chosen by each token's query and nothing before it, as `some grow --looks-back 0` makes them. "
        "The same claim:",
        *judge(results, EACH_TOKEN),
        "## Lost against gained",
        f"![{drawing.title}]({link})",
        drawing.caption,
        "## At equal loss on the base",
        *compare(results),
        "## Ceilings",
        *show_ceilings(results),
        "## Each domain",
        *show_domains(results),
        "## One, two, six",
        *show_merging(results),
        "## What was tuned",
        *show_rates(results),
    ]
    return {out: ("\n\n".join(part for part in parts if part) + "\n").encode(), figure: drawing.to_svg()}


# --- words and tables -----------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column is words, the others are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """A mean, and the standard deviation over seeds."""
    if not values:
        return "–"
    more = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{more}"


def interval(differences: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean over seeds; infinite for one seed."""
    num = len(differences)
    return STUDENT.get(num, 2.6) * stdev(differences) / math.sqrt(num) if num > 1 else math.inf


def describe(results: Results) -> list[str]:
    first = results.any
    size, texts = first["size"], first["texts"]
    machines, commits = (sorted({str(cell[name]) for cell in results.cells.values()}) for name in ("machine", "commit"))
    hours = sum(cell["cell_seconds"] for cell in results.cells.values()) / 3600
    bases = []
    for family in FAMILIES:
        found = [results.cells.get(Cell("base", seed, family=family).name) for seed in results.seeds]
        tests = [cell["rows"][0]["test"] for cell in found if cell]
        names = (*texts["base"], "gained", "mixed", "unseen")
        bases.append([family, *(spread([test[name] for test in tests]) for name in names)])
    experts = f"{size['num_experts']} trained experts of {size['d_ffn']}, {size['top_k']} a token"
    return [
        f"A base of {size['num_layers']} layers of width {size['d_model']} ({experts}; the dense one is as wide as "
        f"what a token passes) learns {' and '.join(texts['base'])} in {size['base_steps']:,} steps. Domains: "
        f"{', '.join(texts['domains'])}. Nobody grows {', '.join(texts['unseen'])}. Seeds: "
        f"{', '.join(map(str, results.seeds))}. {len(results.cells)} cells, {hours:.1f} hours of processes side by "
        f"side ({first['processes']} at a time) on {', '.join(machines)}; commit {', '.join(commits)}.",
        "All losses are nats a token on test, means over seeds with the standard deviation between them; every choice "
        "(rate, point of a curve) was made by valid. *Lost*: on the base's own text, against the method's own base. "
        "*Gained*: the mean loss over the domains, lower is better. *Mixed*: rows that change text half-way. *Unseen*: "
        "what nobody grew.",
        table(["base", *texts["base"], "domains", "mixed", "unseen"], bases),
    ]


def conclude(results: Results) -> str:
    """Two sentences, at the size that was run."""
    blocks = judge(results)
    size = results.any["size"]["name"]
    return blocks[0] if len(blocks) == 1 else f"At size {size}: {blocks[1]} {blocks[2]}"


def judge(results: Results, library: str = OURS) -> list[str]:
    """The claim, item by item."""
    ours = results.at(library, CHOSEN_AT)
    if not ours:
        return ["Not measured yet: the library's cells are missing."]
    rivals = [name for name, method in METHODS.items() if not method.needs and not name.startswith("grow")]
    rows, faults = [], {}
    for name in rivals:
        theirs = results.at(name, CHOSEN_AT)
        both = sorted(ours.keys() & theirs.keys())
        if not both:
            rows.append([label(name), "–", "–", "not measured"])
            faults[name] = f"{METHODS[name].words} is not measured"
            continue
        ahead = [theirs[seed]["test"]["gained"] - ours[seed]["test"]["gained"] for seed in both]
        half = interval(ahead)
        fits = mean(ahead) >= AHEAD and mean(ahead) > half
        if not fits:
            side = "ahead" if mean(ahead) > 0 else "behind"
            faults[name] = f"against {METHODS[name].words} it is {side} by {abs(mean(ahead)):.3f}"
        width = "–" if math.isinf(half) else f"± {half:.3f}"
        rows.append([label(name), f"{mean(ahead):+.3f}", width, "yes" if fits else "**no**"])
    told = results.records("adapters-told")
    both = sorted(ours.keys() & told.keys())
    behind = [ours[seed]["test"]["gained"] - results.rows("adapters-told", seed)[0]["test"]["gained"] for seed in both]
    near = bool(behind) and mean(behind) <= WITHIN
    distance = f"{mean(behind):+.3f}" if behind else "not measured"
    planned, later = ([faults[name] for name in faults if (name in LATER) == is_later] for is_later in (False, True))
    if not near:
        planned.append(f"it is behind adapters that are told the domain by {distance}, and {WITHIN} was allowed")
    verdict = (
        f"**The claim does not hold**: {planned[0]}." if planned else "**The claim holds** against what was planned."
    )
    harder = f"**it does not hold**: {'; '.join(later)}." if later else "it holds there too."
    lost = [results.lost(library, seed, row) for seed, row in ours.items()]
    return [
        f"For the library merged from all domains, where valid loses at most {CHOSEN_AT} nats: gained at least {AHEAD} "
        "below every control without old text and labels, by more than the interval over seeds (95 %, paired), "
        f"and within {WITHIN} of adapters that are told the domain.",
        verdict,
        f"Against two harder controls that were added later (models chosen by the words of a whole row): {harder}",
        f"The library gains {spread([row['test']['gained'] for row in ours.values()])} and loses {spread(lost)}.",
        table(["control", "the library is ahead by", "interval", "holds"], rows),
        "§ A model is chosen for a row after all of it was read, what is to be predicted included: so no text can be "
        "written. A library chooses by what came before.",
        f"Behind adapters that are told the domain: {distance} ({'within' if near else 'not within'} {WITHIN}).",
    ]


def compare(results: Results) -> list[str]:
    rows = []
    for name in METHODS:
        records = results.records(name)
        if name in CEILINGS or not records:
            continue
        cells = [spread([row["test"]["gained"] for row in results.at(name, limit).values()]) for limit in LIMITS]
        chosen = results.at(name, CHOSEN_AT)
        lost = spread([results.lost(name, seed, row) for seed, row in chosen.items()])
        more = [spread([row["test"][text] for row in chosen.values()]) for text in ("mixed", "unseen")]
        stored = "told_stored_bytes" if name in BESIDE else "stored_bytes"
        rows.append([label(name), *cells, lost, *more, *costs(list(records.values()), stored)])
    heads = [
        "method",
        *(f"gained at ≤ {limit}" for limit in LIMITS),
        f"lost at ≤ {CHOSEN_AT}",
        "mixed there",
        "unseen there",
    ]
    note = (
        "A method whose every point loses more stands there with the base itself, unchanged. † has old text, § reads a "
        "row to its end before it chooses. MB trained and stored: of all domains together, at four bytes a number; "
        "seconds: of learning, beside other cells."
    )
    return [table([*heads, "MB trained", "MB stored", "seconds"], rows), note]


def label(name: str) -> str:
    method = METHODS[name]
    mark = " ‡" if method.needs == TOLD else " †" if method.needs else " §" if name in WHOLE_ROW else ""
    return f"**{method.words}**" if name in (OURS, EACH_TOKEN) else method.words + mark


def costs(records: Sequence[Mapping[str, Any]], stored: str = "stored_bytes") -> list[str]:
    trained, kept = (mean(record.get(name, 0) for record in records) / 1e6 for name in ("trained_bytes", stored))
    return [f"{trained:.1f}", f"{kept:.1f}", f"{mean(record['seconds'] for record in records):.0f}"]


def show_ceilings(results: Results) -> list[str]:
    rows = []
    for name in CEILINGS:
        records = results.records(name)
        only = {seed: results.rows(name, seed)[0] for seed in records}
        if only:
            lost = spread([results.lost(name, seed, row) for seed, row in only.items()])
            more = [spread([row["test"][text] for row in only.values()]) for text in ("gained", "mixed", "unseen")]
            stored = "told_stored_bytes" if name in BESIDE else "stored_bytes"
            rows.append([label(name), lost, *more, *costs(list(records.values()), stored)])
    heads = ["method", "lost", "gained", "mixed", "unseen", "MB trained", "MB stored", "seconds"]
    return [table(heads, rows) if rows else "Not measured yet.", "† has old text, ‡ is told the domain of each token."]


def show_domains(results: Results) -> list[str]:
    texts = results.any["texts"]
    names = [*texts["base"], *texts["domains"], *texts["unseen"]]
    rows = []
    for name in METHODS:
        found = (
            {s: results.rows(name, s)[0] for s in results.records(name)}
            if name in CEILINGS
            else results.at(name, CHOSEN_AT)
        )
        if found:
            rows.append([label(name), *(f"{mean(row['test'][text] for row in found.values()):.3f}" for text in names)])
    return [f"At ≤ {CHOSEN_AT} lost; ceilings as they are.", table(["method", *names], rows)]


def show_merging(results: Results) -> list[str]:
    """What merging costs: each branch alone, with one other, and with all, at favour 0."""
    texts = results.any["texts"]
    records = results.records(OURS)
    if not records:
        return ["Not measured yet."]
    columns: dict[str, list[list[float]]] = {name: [[], [], []] for name in (*texts["domains"], "lost")}
    for seed, record in records.items():
        base, all_merged = results.base(OURS, seed), at_rest(results, seed)["test"]
        assert base is not None
        own = base["rows"][0]["test"]
        several = [list(record[kind].items()) for kind in ("alone", "pairs")]
        several.append([("+".join(texts["domains"]), all_merged)])
        for place, models in enumerate(several):
            for name in texts["domains"]:
                columns[name][place].append(mean(of[name] for key, of in models if name in key.split("+")))
            lost = [mean(of[text] - own[text] for text in texts["base"]) for _, of in models]
            columns["lost"][place].append(mean(lost))
    rows = [[name, *map(spread, values)] for name, values in columns.items()]
    return ["Branches of the library at favour 0.", table(["", "alone", "with one other", "all merged"], rows)]


def at_rest(results: Results, seed: int) -> Row:
    return next(row for row in results.rows(OURS, seed) if row["point"] == 0)


def show_rates(results: Results) -> list[str]:
    rows = []
    for name, method in METHODS.items():
        tried = find_rates(name, results.cells, results.seeds[0])
        if any(gained is not None for gained in tried.values()):
            done = [f"{rate:g}" for rate, gained in tried.items() if gained is not None]
            chosen = f"{results.rate(name):g}"
            so_far = "" if choose_rate(name, results.cells, results.seeds[0]) else " (so far)"
            rows.append([method.words, ", ".join(done), chosen + so_far, str(len(results.records(name)))])
    digests = [f"`{name}` {digest[:12]}" for name, digest in results.any["data"].items()]
    commands = sorted({str(cell["command"]) for cell in results.cells.values()})
    return [
        f"Rates were chosen in the first seed, by what is gained on valid at ≤ {CHOSEN_AT} lost; where the best was "
        "the highest or lowest tried, a further one was tried beyond it, three times at most. What is measured in the "
        "cells of another method has a rate of its own among those.",
        table(["method", "tried", "chosen", "seeds"], rows),
        "Digests of the encoded texts: " + ", ".join(digests) + ".",
        "Commands:\n\n```\n" + "\n".join(commands) + "\n```",
    ]

"""Several runs beside each other: what differs in their settings, what came out, and how much of it is chance."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from some_moe.config.run import EXECUTION, HOUSEKEEPING
from some_moe.glass.inspect.runs import RunRecord
from some_moe.glass.page.blocks import Block, Figure, Notice, Page, Record, Section, Table, Text
from some_moe.glass.page.guild_sections import show_interval
from some_moe.glass.page.pages import final_figures, middle_layer, show_millions
from some_moe.lab.card import format_value
from some_moe.layout import Column, format_number, number_column, text_column

IGNORED = EXECUTION | HOUSEKEEPING | {"name", "experiment", "format_version"}
SEED = "train.seed"
TEXT_FIELDS = ("data.source", "data.tokenizer", "data.train_subset_size", "data.val_subset_size", "model.vocab_size")
MOST_DIFFERENCES = 6  # more settings than these get a table of their own
ONE_SEED = "Each experiment has one random seed here: a small difference may be chance."
OTHER_TEXT = (
    "These runs read different text or cut it into different tokens. Compare their bits per byte, not their losses "
    "per token, and only where they are scored on the same text."
)
OVER_SEEDS = (
    "Runs that differ in their random seed alone, taken together. A difference between two experiments that is not "
    "clearly larger than their standard deviations says nothing."
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One run in the comparison."""

    run: RunRecord
    label: str  # its name, made unique
    group: str  # shared by the runs that differ in their random seed alone
    figures: Record

    @property
    def row(self) -> Record:
        """All that tables show of it: its settings as text, its figures, and those of its middle layer."""
        layer = middle_layer(self.figures)
        settings = {name: format_value(value) for name, value in self.run.config.flatten().items()}
        return settings | {"steps": self.figures.get("step")} | self.figures | {
            "run": self.label, "gini": layer.get("gini"), "entropy_bits": layer.get("entropy_bits"),
        }  # fmt: skip


def compare(runs: Sequence[RunRecord]) -> list[Compared]:
    """Give each run a name of its own, and find the runs that repeat one experiment with another seed."""
    labels = name_runs(runs)
    groups = name_groups(labels, [_find_essence(run) for run in runs])
    return [
        Compared(run=run, label=label, group=group, figures=final_figures(run))
        for run, label, group in zip(runs, labels, groups, strict=True)
    ]


def _find_essence(run: RunRecord) -> str:
    """All that decides a run's result, but for chance."""
    return repr([pair for pair in run.config.flatten().items() if pair[0] not in IGNORED | {SEED}])


def name_runs(runs: Sequence[RunRecord]) -> list[str]:
    """The runs' names; where two are alike, their folders' names; where those are alike too, their paths."""
    for names in ([run.name for run in runs], [run.path.resolve().name for run in runs]):
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]


def name_groups(labels: Sequence[str], essences: Sequence[str]) -> list[str]:
    """Each run's group: `wide` for wide-s0 and wide-s1, or the name of its first run where that is not clear."""
    bare = [re.sub(r"[-_. ]*(seed|s)?[-_=. ]*\d+$", "", label) for label in labels]
    names = {}
    for essence, count in Counter(essences).items():
        first = essences.index(essence)
        alike = [other == essence for other in essences]
        clear = count > 1 and bare[first] != "" and alike == [name == bare[first] for name in bare]
        names[essence] = bare[first] if clear else labels[first]
    return [names[essence] for essence in essences]


def find_differences(runs: Sequence[RunRecord]) -> list[str]:
    """The settings in which the runs differ, in the order of the config."""
    flat = [run.config.flatten() for run in runs]
    return [name for name in flat[0] if name not in IGNORED and any(other[name] != flat[0][name] for other in flat)]


def make_comparison(compared: Sequence[Compared], figures: Sequence[Figure]) -> Page:
    """The page. figures: the curves, drawn."""
    differences = find_differences([one.run for one in compared])
    groups = Counter(one.group for one in compared)
    blocks: list[Block] = [Text(_describe_best(compared)), *_make_tables(compared, differences)]
    if max(groups.values()) == 1:
        blocks.append(Notice(ONE_SEED))
    if set(TEXT_FIELDS) & set(differences):
        blocks.append(Notice(OTHER_TEXT))
    sections = [Section("Ablation table", blocks)]
    if max(groups.values()) > 1:
        sections.append(Section("Over seeds", [Text(OVER_SEEDS), _make_spread_table(compared)]))
    sections += [Section(figure.alt, [figure]) for figure in figures]
    unfinished = ", ".join(one.label for one in compared if one.run.result is None)
    if unfinished:
        text = f"Not finished: {unfinished}. Their rows show the last evaluation, and they have no test loss."
        sections.append(Section("What is missing", [Notice(text)]))
    of = f" of {len(groups)} experiments" if len(groups) < len(compared) else ""
    return Page(
        title="Runs beside each other",
        kicker="SoME comparison",
        summary=f"{len(compared)} runs{of}. Losses are nats per real token: padding is never text.",
        sections=sections,
    )


def _describe_best(compared: Sequence[Compared]) -> str:
    scored = [one for one in compared if one.figures.get("test_loss") is not None]
    if not scored:
        return "No run has a test loss yet."
    best = min(scored, key=lambda one: float(one.figures["test_loss"]))
    return f"Lowest test loss: {best.label}, {best.figures['test_loss']:.4f} nats per real token."


# --- tables -------------------------------------------------------------------------------------------------

RESULT_COLUMNS = [
    number_column("Test loss", "test_loss", ".4f"),
    number_column("Val loss", "val_loss", ".4f"),
    number_column("Perplexity", "perplexity", ",.2f"),
    number_column("Bits per byte", "bits_per_byte", ".4f"),
    number_column("Padded loss (old protocol)", "val_loss_padded", ".4f"),
    number_column("Gini", "gini", ".3f"),
    number_column("Entropy, bits", "entropy_bits", ".3f"),
    Column("Trained", lambda row: show_millions(row["trainable_parameters"]), numeric=True),
    Column("All parameters", lambda row: show_millions(row["total_parameters"]), numeric=True),
    number_column("Steps", "steps", ","),
    number_column("Tokens", "tokens", ","),
    number_column("Tokens/s", "tokens_per_second", ",.0f"),
]


def _make_tables(compared: Sequence[Compared], differences: Sequence[str]) -> list[Block]:
    """One row a run: what is set differently, then what came out. Many differences have a table of their own."""
    rows = [one.row for one in compared]
    many = len(differences) > MOST_DIFFERENCES
    settings = [name for name in differences if name == SEED or not many]
    columns = [text_column(name, name) for name in settings]
    caption = "Settings that differ, then results. Validation is of the last step, test of the best."
    results = Table.of([text_column("Run", "run"), *columns, *RESULT_COLUMNS], rows, caption)
    if not many:
        return [results]
    every = [[name, *(row[name] for row in rows)] for name in differences]
    runs = [Column(one.label) for one in compared]
    return [results, Table([Column("Setting"), *runs], every, "All settings that differ.")]


def _make_spread_table(compared: Sequence[Compared]) -> Table:
    """Mean and standard deviation over the seeds of each experiment that has several."""
    groups: dict[str, list[Record]] = {}
    for one in compared:
        groups.setdefault(one.group, []).append(one.row)
    spreads = {"Test loss": ("test_loss", ".4f"), "Val loss": ("val_loss", ".4f"), "Perplexity": ("perplexity", ".2f"),
               "Bits per byte": ("bits_per_byte", ".4f"), "Gini": ("gini", ".3f")}  # fmt: skip
    names = ["Experiment", "Seeds", *spreads, "Test loss, lowest to highest"]
    columns = [Column(name, numeric=name != "Experiment") for name in names]
    rows = []
    for group, runs in groups.items():
        if len(runs) > 1:
            known = {name: [run[name] for run in runs if run.get(name) is not None] for name, _ in spreads.values()}
            cells = [_show_spread(known[name], form) for name, form in spreads.values()]
            losses = known["test_loss"]
            extremes = show_interval([min(losses), max(losses)] if losses else None, ".4f")
            rows.append([group, str(len(runs)), *cells, extremes])
    return Table(columns, rows, "Mean ± standard deviation over seeds.")


def _show_spread(known: Sequence[float], form: str) -> str:
    if len(known) < 2:
        return format_number(known[0] if known else None, form)
    return f"{mean(known):{form}} ± {stdev(known):{form}}"

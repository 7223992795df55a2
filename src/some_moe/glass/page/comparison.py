"""Several runs beside each other: what differs in their settings, what came out, and how much of it is chance."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from some_moe.glass.inspect.runs import RunRecord
from some_moe.glass.page.blocks import Block, Figure, Notice, Page, Section, Table, Text
from some_moe.glass.page.pages import HOUSEKEEPING, final_figures, middle_layer
from some_moe.glass.page.tables import Record, Show, figure, interval, make_table, millions, number, word
from some_moe.lab.card import EXECUTION, format_value
from some_moe.layout import Column

IGNORED = EXECUTION | HOUSEKEEPING | {"name", "experiment", "format_version"}
SEED = "train.seed"
TEXT_FIELDS = ("data.source", "data.tokenizer", "data.train_subset_size", "data.val_subset_size", "model.vocab_size")
MOST_DIFFERENCES = 6  # more settings than these get a table of their own


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One run in the comparison."""

    run: RunRecord
    label: str  # its name, made unique
    group: str  # shared by the runs that differ in their random seed alone
    figures: dict[str, Any]


def compare(runs: Sequence[RunRecord]) -> list[Compared]:
    """Give each run a name of its own, and find the runs that repeat one experiment with another seed."""
    labels = name_runs(runs)
    essences = [_essence(run) for run in runs]
    experiments = Counter(runs[essences.index(essence)].config.experiment for essence in dict.fromkeys(essences))
    names = name_groups(labels, essences)
    compared = []
    for run, label, essence in zip(runs, labels, essences, strict=True):
        experiment = run.config.experiment
        # A registered name stands for the group, unless two groups with other settings both bear it.
        group = experiment if experiment and experiments[experiment] == 1 else names[essence]
        compared.append(Compared(run=run, label=label, group=group, figures=final_figures(run)))
    return compared


def _essence(run: RunRecord) -> str:
    """All that decides a run's result, but for chance."""
    return repr([pair for pair in run.config.flatten().items() if pair[0] not in IGNORED | {SEED}])


def name_runs(runs: Sequence[RunRecord]) -> list[str]:
    """The runs' names; where two are alike, their folders' names; where those are alike too, their paths."""
    for names in ([run.name for run in runs], [run.path.resolve().name for run in runs]):
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]


def name_groups(labels: Sequence[str], essences: Sequence[str]) -> dict[str, str]:
    """A name for each essence: `wide` for wide-s0 and wide-s1, or the first run's name where that is not clear."""
    bare = [re.sub(r"[-_. ]*(seed|s)?[-_=. ]*\d+$", "", label) for label in labels]
    names = {}
    for essence in dict.fromkeys(essences):
        shared = {name for name, other in zip(bare, essences, strict=True) if other == essence}
        others = {name for name, other in zip(bare, essences, strict=True) if other != essence}
        first = essences.index(essence)
        clear = essences.count(essence) > 1 and len(shared) == 1 and not shared & (others | {""})
        names[essence] = bare[first] if clear else labels[first]
    return names


def find_differences(runs: Sequence[RunRecord]) -> list[str]:
    """The settings in which the runs differ, in the order of the config."""
    flat = [run.config.flatten() for run in runs]
    return [name for name in flat[0] if name not in IGNORED and any(other[name] != flat[0][name] for other in flat)]


def make_comparison(compared: Sequence[Compared], figures: Sequence[Figure]) -> Page:
    """The page. figures: the curves, drawn."""
    runs = [one.run for one in compared]
    differences = find_differences(runs)
    blocks: list[Block] = [Text(_describe_best(compared)), _ablation_table(compared, differences)]
    if len(differences) > MOST_DIFFERENCES:
        blocks.append(_difference_table(compared, differences))
    blocks += _cautions(compared, differences)
    sections = [Section("Ablation table", blocks)]
    spread = _spread_table(compared)
    if spread is not None:
        text = "Runs that differ in their random seed alone, taken together. A difference between two experiments "
        text += "that is not clearly larger than their standard deviations says nothing."
        sections.append(Section("Over seeds", [Text(text), spread]))
    sections += [Section(figure.alt, [figure]) for figure in figures]
    unfinished = [one.label for one in compared if one.run.result is None]
    if unfinished:
        text = (
            f"Not finished: {', '.join(unfinished)}. Their rows show the last evaluation, and they have no test loss."
        )
        sections.append(Section("What is missing", [Notice(text)]))
    kinds = len({one.group for one in compared})
    summary = f"{len(compared)} runs of {kinds} experiments." if kinds < len(compared) else f"{len(compared)} runs."
    return Page(
        title="Runs beside each other",
        kicker="SoME comparison",
        summary=f"{summary} Losses are nats per real token: padding is never text.",
        sections=sections,
    )


# --- tables -------------------------------------------------------------------------------------------------


def _middle(name: str, digits: int) -> Show:
    """A figure of the middle layer."""
    return lambda figures: number(middle_layer(figures).get(name), digits)


RESULT_COLUMNS: dict[str, Show] = {
    "Test loss": figure("test_loss", 4),
    "Val loss": figure("val_loss", 4),
    "Perplexity": figure("perplexity", 2),
    "Bits per byte": figure("bits_per_byte", 4),
    "Padded loss (old protocol)": figure("val_loss_padded", 4),
    "Gini": _middle("gini", 3),
    "Entropy, bits": _middle("entropy_bits", 3),
    "Trained": lambda f: millions(f["trainable_parameters"]),
    "All parameters": lambda f: millions(f["total_parameters"]),
    "Steps": lambda f: number(f.get("steps", f.get("step")), 0),
    "Tokens": figure("tokens", 0),
    "Tokens/s": figure("tokens_per_second", 0),
}


def _ablation_table(compared: Sequence[Compared], differences: Sequence[str]) -> Table:
    """One row a run: what is set differently, then what came out. Columns that no run fills are left out."""
    settings = list(differences) if len(differences) <= MOST_DIFFERENCES else [n for n in differences if n == SEED]
    columns = [Column("Run"), *(Column(header) for header in shorten_names(settings))]
    rows = [[one.label, *(format_value(one.run.config.flatten()[name]) for name in settings)] for one in compared]
    results = make_table([one.figures for one in compared], RESULT_COLUMNS, drop_empty=True)
    rows = [[*row, *cells] for row, cells in zip(rows, results.rows, strict=True)]
    caption = "Settings that differ, then results. Validation is of the last step, test of the best."
    return Table([*columns, *results.columns], rows, caption)


def shorten_names(settings: Sequence[str]) -> list[str]:
    """Settings without their room, where no other is called the same."""
    short = [name.rpartition(".")[2] for name in settings]
    return [name if short.count(last) > 1 else last for name, last in zip(settings, short, strict=True)]


def _difference_table(compared: Sequence[Compared], differences: Sequence[str]) -> Table:
    """One row a setting, one column a run."""
    flat = [one.run.config.flatten() for one in compared]
    rows = [[name, *(format_value(settings[name]) for settings in flat)] for name in differences]
    return Table([Column("Setting"), *(Column(one.label) for one in compared)], rows, "All settings that differ.")


def _spread_table(compared: Sequence[Compared]) -> Table | None:
    """Mean and standard deviation over seeds; None where no experiment has several."""
    groups: dict[str, list[Record]] = {}
    for one in compared:
        groups.setdefault(one.group, []).append(one.figures | {"gini": middle_layer(one.figures).get("gini")})
    records = [{"group": group, "runs": runs} for group, runs in groups.items() if len(runs) > 1]
    columns: dict[str, Show] = {
        "Experiment": word("group"),
        "Seeds": lambda record: str(len(record["runs"])),
        "Test loss": _spread("test_loss", 4),
        "Lowest to highest": lambda record: interval(_extremes(record, "test_loss"), 4),
        "Val loss": _spread("val_loss", 4),
        "Perplexity": _spread("perplexity", 2),
        "Bits per byte": _spread("bits_per_byte", 4),
        "Gini": _spread("gini", 3),
    }
    caption = "Mean ± standard deviation over seeds."
    return make_table(records, columns, caption, words=("Experiment",)) if records else None


def _known(record: Record, name: str) -> list[float]:
    return [figures[name] for figures in record["runs"] if figures.get(name) is not None]


def _extremes(record: Record, name: str) -> list[float]:
    known = _known(record, name)
    return [min(known), max(known)] if known else []


def _spread(name: str, digits: int) -> Show:
    def show(record: Record) -> str:
        known = _known(record, name)
        if len(known) < 2:
            return number(known[0] if known else None, digits)
        return f"{mean(known):.{digits}f} ± {stdev(known):.{digits}f}"

    return show


# --- words --------------------------------------------------------------------------------------------------


def _describe_best(compared: Sequence[Compared]) -> str:
    scored = [one for one in compared if one.figures.get("test_loss") is not None]
    if not scored:
        return "No run has a test loss yet."
    best = min(scored, key=lambda one: float(one.figures["test_loss"]))
    return f"Lowest test loss: {best.label}, {best.figures['test_loss']:.4f} nats per real token."


def _cautions(compared: Sequence[Compared], differences: Sequence[str]) -> list[Block]:
    """What must be known before two rows are compared."""
    notices: list[Block] = []
    groups = Counter(one.group for one in compared)
    if max(groups.values()) == 1:
        notices.append(Notice("Each experiment has one random seed here: a small difference may be chance."))
    if any(name in differences for name in TEXT_FIELDS):
        notices.append(
            Notice(
                "These runs read different text or cut it into different tokens. Compare their bits per byte, not "
                "their losses per token, and only where they are scored on the same text."
            )
        )
    return notices

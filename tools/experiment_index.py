"""The index of the experiments v2 to v7: the entries and fields of the published index, made from the registry.

What a report states and what is assumed here are kept apart, and each published figure has the measured one beside it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from some_moe.glass.page.markdown import plain, sentence
from some_moe.lab.card import format_value
from some_moe.lab.published import NOT_MEASURED, OUTSIDE, WITHIN, Comparison
from some_moe.lab.published_tables import LOSSES, show_experts, show_spread
from some_moe.lab.registry.records import Experiment, Published
from tools.audit_cells import A_NAMES, B_NAMES, V_NAMES


class Entry(NamedTuple):
    """One entry: a version, what it was about, its runs, and those whose figures the published index names."""

    version: str
    title: str
    runs: tuple[str, ...]
    named: tuple[str, ...] = ()


ENTRIES = (
    Entry("v2", "professional ablation runs", ("v2-professional",)),
    Entry("v3", "ablation runs", V_NAMES, ("V3", "V6", "V7")),
    Entry("v3.5", "decay fix", ("v3.5-decay-fix",)),
    Entry("v4", "ablation series A, B and C", (*A_NAMES, *B_NAMES), ("A1", "A4", "B1")),
    Entry("v5", "eight fixes, linear and MLP query network", ("v5-linear", "v5-mlp")),
    Entry("v6", "decay fix", ("v6-decay-fix",)),
    Entry("v7", "clamp fix", ("v7-clamp-fix",)),
)
FIELDS = {
    "Dataset": ("data.source", "data.train_subset_size", "data.val_subset_size", "model.vocab_size"),
    "Config": (
        "model.num_experts", "model.top_k", "gravity.alpha", "gravity.beta", "gravity.delta",
        "gravity.theta_percentile", "gravity.ema_decay", "model.init_method", "model.query",
    ),
    "Sequence length": ("data.seq_len", "data.batch_size"),
}  # fmt: skip


def write_index(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the index as paragraphs of Markdown, one heading and one list an entry."""
    found = {comparison.name: comparison for comparison in comparisons}
    return [part for entry in ENTRIES for part in _write_entry(entry, found)]


def _write_entry(entry: Entry, found: Mapping[str, Comparison]) -> list[str]:
    runs = [found[name].experiment for name in entry.runs]
    named = [found[name] for name in entry.named or entry.runs]
    lines = [f"- **{title}**: {_describe_fields(fields, runs)}" for title, fields in FIELDS.items()]
    lines += ["- **Reported metrics**:", *(f"  - {_report(comparison)}" for comparison in named)]
    lines += ["- **Measured here**:", *(f"  - {_measure(comparison)}" for comparison in named)]
    findings = {run.name: run.published.findings if run.published else () for run in runs}
    lines += _list("Observations", findings)
    lines += _list("Read with care", {run.name: run.notes for run in runs})
    files = dict.fromkeys(file for run in runs for file in run.source.files)
    lines.append(f"- **Source**: {', '.join(f'`{file}`' for file in files)}")
    return [f"### {entry.version}: {entry.title}", "\n".join(lines)]


def _list(title: str, texts: Mapping[str, Sequence[str]]) -> list[str]:
    """Sentences by run, each once, with the names of its runs where it is not about all of them."""
    runs: dict[str, list[str]] = {}
    for name, sentences in texts.items():
        for text in sentences:
            runs.setdefault(text, []).append(name)
    lines = [text if len(names) == len(texts) else f"{', '.join(names)}: {text}" for text, names in runs.items()]
    return [f"- **{title}**:", *(f"  - {sentence(line)}" for line in lines)] if lines else []


def _describe_fields(fields: Sequence[str], runs: Sequence[Experiment]) -> str:
    """Say what the report states; then, apart, what is registered without its word."""
    stated: list[str] = []
    assumed: list[str] = []
    for field in fields:
        values = dict.fromkeys(_show_value(run.config.flatten()[field]) for run in runs)
        text = f"{field.rpartition('.')[2]} {', '.join(values)}"
        (assumed if all(field in run.assumed for run in runs) else stated).append(text)
    parts = [f"{'; '.join(stated)}."] if stated else []
    parts += [f"Not stated, and registered as {'; '.join(assumed)}."] if assumed else []
    return plain(" ".join(parts))


def _show_value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else format_value(value)


def _report(comparison: Comparison) -> str:
    published = comparison.experiment.published or Published()
    figures = [
        (published.val_loss, "validation loss {}"),
        (published.perplexity, "perplexity {}"),
        (published.gini, "gini {}"),
        (published.entropy_bits, "entropy {} bits"),
        (published.experts_used, f"{{}} of {published.num_experts} experts used"),
    ]
    text = ", ".join(pattern.format(value) for value, pattern in figures if value is not None)
    # The share of experts used says the same as their number.
    also = [line for line in published.also_printed if not line.startswith("Experts used")]
    return plain(" ".join([f"{comparison.name}: {text}.", *also]))


def _measure(comparison: Comparison) -> str:
    """The same figures as measured, and the loss over real tokens."""
    measured = comparison.measured
    if not comparison.results:
        return plain(f"{comparison.name}: {NOT_MEASURED} yet.")
    counted = "all" if comparison.experiment.config.data.count_padding else "real"
    padded = "val_loss_padded" in measured
    figures = [
        ("val_loss_padded", 4, f"validation loss {{}} with {LOSSES['val_loss_padded']}"),
        ("val_loss", 4, "{} over real tokens" if padded else "validation loss {} over real tokens"),
        ("perplexity", 2, "perplexity {} over real tokens" if padded else "perplexity {}"),
        (f"gini_{counted}", 3, "gini {}"),
        (f"entropy_bits_{counted}", 3, "entropy {} bits"),
        ("experts_used", 0, f"{{}} of {show_experts(comparison)} experts used"),
    ]
    text = ", ".join(p.format(show_spread(measured[name], digits)) for name, digits, p in figures if name in measured)
    verdict = comparison.verdict
    judged = f" {verdict.capitalize()} {comparison.tolerance}." if verdict in (WITHIN, OUTSIDE) else ""
    return plain(f"{comparison.name}: {text}.{judged}")

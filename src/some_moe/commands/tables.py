"""Tables in the terminal: a finished run, an evaluation, one model at several row lengths, a queue of experiments."""

from collections.abc import Callable, Sequence
from typing import Any

from some_moe.lab.estimate import describe_seconds
from some_moe.layout import (
    ABSENT,
    Column,
    Style,
    format_number,
    format_table,
    make_table,
    number_column,
    number_columns,
    text_column,
    wrap,
)
from some_moe.memory import format_bytes
from some_moe.system.reading import clean

Records = Sequence[dict[str, Any]]
LAYERS = (
    Column("layer", lambda layer: f"{layer['layer']}{' ·' if layer['is_middle'] else '  '}", numeric=True),
    number_column("gini", "gini", ".3f"),
    Column("entropy bits", lambda f: f"{f['entropy_bits']:.3f} of {f['max_entropy_bits']:.0f}", numeric=True),
    Column("experts used", lambda layer: f"{layer['experts_used']} of {layer['num_experts']}", numeric=True),
    number_column("max load", "max_load", ".1f", "×"),
    number_column("gate entropy", "gate_entropy_nats", ".3f"),
)
EPOCHS = number_columns(
    epoch="", step=",", train_loss=".4f", val_loss=".4f", perplexity=".2f", gini=".3f", entropy_bits=".3f"
)
TEXTS = (
    text_column("text", "data"),
    number_column("loss", "loss", ".4f"),
    number_column("perplexity", "perplexity", ".2f"),
    number_column("bits/byte", "bits_per_byte", ".4f"),
    number_column("tokens", "num_tokens", ",d"),
)
LENGTH = number_column("length", "seq_len")
LENGTH_LOSSES = (
    LENGTH,
    number_column("text", "text_share", ".1%"),
    number_column("loss", "loss", ".4f"),
    number_column("constant", "constant_loss", ".4f"),
    number_column("padded loss", "loss_padded", ".4f"),
    number_column("padded constant", "constant_loss_padded", ".4f"),
    number_column("on padding", "loss_on_padding", ".4f"),
)
LENGTHS_LEGEND = (
    "loss: nats per real token; padded: over padding too, as published up to v4; constant: of a predictor",
    "that ignores its input and knows how frequent each token is in the training split",
    "this run learned from text alone: it was never taught padding, and its padded loss pays for that",
)
LENGTH_TEXTS = (LENGTH, *number_columns(perplexity=".2f", bits_per_byte=".4f", num_tokens=",", num_stories_cut=","))
LENGTH_USAGE = (LENGTH, *number_columns(gini=".3f", gini_padded=".3f", entropy_bits=".3f", entropy_bits_padded=".3f"))
QUEUE = (
    text_column("name", "experiment"),
    *number_columns(seed="", steps=",d", val_loss=".4f"),
    number_column("padded", "val_loss_padded", ".4f"),
    number_column("published", "published_val_loss", ".4f"),
    number_column("gini", "gini", ".3f"),
    number_column("tokens/s", "tokens_per_second", ",.0f"),
    number_column("seconds", "seconds", ",.0f"),
    number_column("parameters", "total_parameters", ",d"),
    Column("memory", lambda row: _say(row.get("memory_bytes"), format_bytes), numeric=True),
    Column("time, roughly", lambda row: _say(row.get("estimated_seconds"), describe_seconds), numeric=True),
    text_column("state", "state"),
)
QUEUE_LEGEND = (
    "val loss: nats per real token. padded: over padding too, as the published losses up to v4 are; compare those "
    "with it, and the later ones with val loss. seconds: of training steps."
)


def _say(value: float | None, say: Callable[[float], str]) -> str:
    return ABSENT if value is None else say(value)


def _fit(texts: Sequence[str], width: int | None) -> list[str]:
    """Sentences on as many lines as they need on a terminal; in a file or a pipe one line each."""
    return list(texts) if width is None else [line for text in texts for line in wrap(text, width=width) or [""]]


def _tabulate(columns: Sequence[Column], records: Records, width: int | None, style: Style) -> list[str]:
    return format_table(*make_table(columns, records), width=width, style=style, indent="  ")


def format_layers(layers: Records, width: int | None, style: Style) -> list[str]:
    """How each layer's experts share the work; a dot marks the middle layer."""
    middle = len(layers) // 2
    marked = [layer | {"is_middle": layer["layer"] == middle} for layer in layers]
    return _tabulate(LAYERS, marked, width, style) if layers else ["no SoME layers"]


def format_result(folder: str, result: dict[str, Any], *, width: int | None, style: Style) -> str:
    """What `some train` prints last."""

    def figure(name: str, form: str = ".4f") -> str:
        return format_number(result[name], form)  # what was not a number is not there

    lines = [
        "",
        style.bold(f"{result['name']}: {result['status']} after {result['steps']:,} steps"),
        *_tabulate(EPOCHS, result["epochs"], width, style),
        "",
        style.bold("How the experts share the work") + " (validation, · middle layer)",
        *format_layers(result["layers"], width, style),
        "",
    ]
    sentences = [
        f"test loss {figure('test_loss')} nats per token ({figure('test_bits_per_byte')} bits per byte), "
        f"validation {figure('val_loss')}, best {figure('best_val_loss')} at step {figure('best_step', ',')}",
        *_explain_padding(result["val_loss_padded"], result["text_share"]),
        f"{result['tokens']:,} tokens in {figure('seconds', '.0f')} s of training steps, "
        f"{figure('tokens_per_second', ',.0f')} tokens/s on {result['device']}",
        *_explain_time(result.get("phases") or {}),
        f"{result['trainable_parameters']:,} parameters trained of {result['total_parameters']:,}",
        f"everything is in {folder}",
    ]
    return "\n".join([*lines, *_fit(sentences, width)]) + "\n"


def _explain_time(phases: dict[str, float]) -> list[str]:
    """Where a run's time went: what took a tenth of a second or more, the longest first."""
    longest = sorted((item for item in phases.items() if item[1] >= 0.1), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in longest)
    return [f"{sum(phases.values()):.1f} s from command to result: {parts}"] if parts else []


def _explain_padding(loss: float | None, text_share: float | None) -> list[str]:
    if loss is None:
        return []
    share = format_number(text_share, ".1%")
    return [f"over padding too, as published up to v4: {loss:.4f} ({share} of the positions are text)"]


def format_evaluation(record: dict[str, Any], *, width: int | None, style: Style) -> str:
    """What `some eval` prints."""
    keys = "moving after each chunk" if record["adapt"] else "still"
    title = style.bold(f"{record['run']}, step {record['step']:,}, on {record['data']}") + f", keys {keys}"
    lines = [
        f"loss {record['loss']:.4f} nats per token, perplexity {record['perplexity']:.2f}, "
        f"{record['bits_per_byte']:.4f} bits per byte, over {record['num_tokens']:,} tokens",
        *_explain_padding(record["loss_padded"], record["text_share"]),
    ]
    if "trigram_loss" in record:
        lines.append(
            f"a Kneser–Ney trigram of the training split (discount {record['trigram_discount']}): "
            f"{record['trigram_loss']:.4f} nats per token on the same tokens"
        )
    return "\n".join([title, *_fit(lines, width), *format_layers(record["layers"], width, style)]) + "\n"


def format_texts(records: Records, *, width: int | None, style: Style) -> str:
    """What `some eval --data a b …` prints: a row a text, and who serves it where the run has branches."""
    names = list(records[0].get("shares", {}))
    columns = (*TEXTS, *(number_column(f"by {clean(name)}", f"by {name}", ".1%") for name in names))
    rows = [record | {f"by {name}": share for name, share in record.get("shares", {}).items()} for record in records]
    title = style.bold(f"{records[0]['run']}, step {records[0]['step']:,}")
    return "\n".join([title, *_tabulate(columns, rows, width, style)]) + "\n"


def format_lengths(record: dict[str, Any], *, width: int | None, style: Style) -> str:
    """What `some eval --seq-lens` prints: by row length the losses, what was read, and the middle layer's usage."""
    split, lengths = record["split"], record["lengths"]
    lines = [
        style.bold(f"{record['run']}, step {record['step']:,}, on {split} split")
        + f", {record['stories'][split]:,} stories; trained with rows of {record['trained_seq_len']}",
        *_tabulate(LENGTH_LOSSES, lengths, width, style),
    ]
    lines += _fit(LENGTHS_LEGEND[: 2 + (record["loss_on"] == "text")], width)
    lines += ["", *_tabulate(LENGTH_TEXTS, lengths, width, style), ""]
    if record["middle_layer"] is None:
        lines.append("no SoME layers")
    else:
        lines.append(style.bold("How the experts share the work") + f" (middle layer, {record['middle_layer']})")
        lines += _tabulate(LENGTH_USAGE, lengths, width, style)
    return "\n".join(lines) + "\n"


def format_queue(rows: Records, *, width: int | None, style: Style) -> str:
    """What `some experiments run` prints last: one row a job, then why some failed."""
    text_width = min(width or 100, 100)
    lines = ["", *format_table(*make_table(QUEUE, rows, silence=ABSENT), width=width, style=style)]
    foretold = [row for row in rows if row.get("memory_bytes")]
    lines += [] if foretold else wrap(QUEUE_LEGEND, width=text_width)
    if foretold and (free := foretold[0]["free_bytes"]) is not None:
        lines += wrap(
            f"{format_bytes(free)} of memory are free; the time may be half or twice as much", width=text_width
        )
    for row in rows:
        if row["reason"]:
            lines += wrap(f"{row['experiment']}, seed {row['seed']}: {row['reason']}", width=text_width, bullet="- ")
    return "\n".join(lines) + "\n"

"""Tables in the terminal: a finished run, an evaluation, one model at several row lengths."""

from collections.abc import Sequence
from typing import Any

from some_moe.layout import Style, format_table, number_columns

LAYER_COLUMNS = number_columns("layer", "gini", "entropy bits", "experts used", "max load", "gate entropy")
EPOCH_COLUMNS = number_columns("epoch", "step", "train loss", "val loss", "perplexity", "gini", "entropy bits")
LENGTH_LOSS_COLUMNS = number_columns(
    "length", "text", "loss", "constant", "padded loss", "padded constant", "on padding"
)
LENGTH_TEXT_COLUMNS = number_columns("length", "perplexity", "bits per byte", "tokens scored", "stories cut")
LENGTH_USAGE_COLUMNS = number_columns("length", "gini", "padded gini", "entropy bits", "padded entropy bits")


def _figure(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def layer_rows(layers: Sequence[dict[str, Any]], middle: int | None) -> list[list[str]]:
    return [
        [
            f"{layer['layer']}{' ·' if layer['layer'] == middle else '  '}",
            _figure(layer["gini"], 3),
            f"{layer['entropy_bits']:.3f} of {layer['max_entropy_bits']:.0f}",
            f"{layer['experts_used']} of {layer['num_experts']}",
            f"{layer['max_load']:.1f}×",
            _figure(layer["gate_entropy_nats"], 3),
        ]
        for layer in layers
    ]


def format_layers(layers: Sequence[dict[str, Any]], *, width: int | None, style: Style) -> list[str]:
    """How each layer's experts share the work; a dot marks the middle layer."""
    if not layers:
        return ["no SoME layers"]
    middle = len(layers) // 2
    return format_table(LAYER_COLUMNS, layer_rows(layers, middle), width=width, style=style, indent="  ")


def format_result(folder: str, result: dict[str, Any], *, width: int | None, style: Style) -> str:
    """What `some train` prints last."""
    epochs = [
        [
            str(epoch["epoch"]),
            f"{epoch['step']:,}",
            _figure(epoch["train_loss"], 4),
            _figure(epoch["val_loss"], 4),
            _figure(epoch["perplexity"], 2),
            _figure(epoch.get("gini"), 3),
            _figure(epoch.get("entropy_bits"), 3),
        ]
        for epoch in result["epochs"]
    ]
    lines = ["", style.bold(f"{result['name']}: {result['status']} after {result['steps']:,} steps")]
    lines += format_table(EPOCH_COLUMNS, epochs, width=width, style=style, indent="  ")
    lines += ["", style.bold("How the experts share the work") + " (validation, · middle layer)"]
    lines += format_layers(result["layers"], width=width, style=style)
    lines += [
        "",
        f"test loss {result['test_loss']:.4f} nats per token ({result['test_bits_per_byte']:.4f} bits per byte), "
        f"validation {result['val_loss']:.4f}, best {result['best_val_loss']:.4f} at step {result['best_step']:,}",
    ]
    if result["val_loss_padded"] is not None:
        lines.append(
            f"over padding too, as published up to v4: {result['val_loss_padded']:.4f} "
            f"({result['text_share']:.1%} of the positions are text)"
        )
    lines += [
        f"{result['tokens']:,} tokens in {result['seconds']:.0f} s of training steps, "
        f"{result['tokens_per_second']:,.0f} tokens/s on {result['device']}",
        f"{result['trainable_parameters']:,} parameters trained of {result['total_parameters']:,}",
        f"everything is in {folder}",
    ]
    return "\n".join(lines) + "\n"


def format_evaluation(record: dict[str, Any], *, width: int | None, style: Style) -> str:
    """What `some eval` prints."""
    keys = "moving after each batch" if record["adapt"] else "still"
    lines = [
        style.bold(f"{record['run']}, step {record['step']:,}, on {record['data']}") + f", keys {keys}",
        f"loss {record['loss']:.4f} nats per token, perplexity {record['perplexity']:.2f}, "
        f"{record['bits_per_byte']:.4f} bits per byte, over {record['num_tokens']:,} tokens",
    ]
    if record["loss_padded"] is not None:
        lines.append(
            f"over padding too, as published up to v4: {record['loss_padded']:.4f} "
            f"({record['text_share']:.1%} of the positions are text)"
        )
    if "trigram_loss" in record:
        lines.append(
            f"a Kneser–Ney trigram of the training split (discount {record['trigram_discount']}): "
            f"{record['trigram_loss']:.4f} nats per token on the same tokens"
        )
    lines += format_layers(record["layers"], width=width, style=style)
    return "\n".join(lines) + "\n"


def format_lengths(record: dict[str, Any], *, width: int | None, style: Style) -> str:
    """What `some eval --seq-lens` prints: by row length the losses, what was read, and the middle layer's usage."""
    split, lengths = record["split"], record["lengths"]
    losses = [
        [
            str(found["seq_len"]),
            f"{found['text_share']:.1%}",
            _figure(found["loss"], 4),
            _figure(found["constant_loss"], 4),
            _figure(found["loss_padded"], 4),
            _figure(found["constant_loss_padded"], 4),
            _figure(found["loss_on_padding"], 4),
        ]
        for found in lengths
    ]
    texts = [
        [
            str(found["seq_len"]),
            _figure(found["perplexity"], 2),
            _figure(found["bits_per_byte"], 4),
            f"{found['num_tokens']:,}",
            f"{found['num_stories_cut']:,}",
        ]
        for found in lengths
    ]
    lines = [
        style.bold(f"{record['run']}, step {record['step']:,}, on {split} split")
        + f", {record['stories'][split]:,} stories; trained with rows of {record['trained_seq_len']}",
        *format_table(LENGTH_LOSS_COLUMNS, losses, width=width, style=style, indent="  "),
        "loss: nats per real token; padded: over padding too, as published up to v4; constant: of a predictor",
        "that ignores its input and knows how frequent each token is in the training split",
    ]
    if record["loss_on"] == "text":
        lines.append("this run learned from text alone: it was never taught padding, and its padded loss pays for that")
    lines += ["", *format_table(LENGTH_TEXT_COLUMNS, texts, width=width, style=style, indent="  "), ""]
    if record["middle_layer"] is None:
        return "\n".join([*lines, "no SoME layers"]) + "\n"
    usage = [
        [
            str(found["seq_len"]),
            _figure(found["gini"], 3),
            _figure(found["gini_padded"], 3),
            _figure(found["entropy_bits"], 3),
            _figure(found["entropy_bits_padded"], 3),
        ]
        for found in lengths
    ]
    lines.append(style.bold("How the experts share the work") + f" (middle layer, {record['middle_layer']})")
    lines += format_table(LENGTH_USAGE_COLUMNS, usage, width=width, style=style, indent="  ")
    return "\n".join(lines) + "\n"

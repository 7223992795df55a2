"""Tables in the terminal: a finished run, an evaluation."""

from collections.abc import Sequence
from typing import Any

from some_moe.report.layout import Column, Style, format_table

LAYER_COLUMNS = (
    Column("layer", numeric=True),
    Column("gini", numeric=True),
    Column("entropy bits", numeric=True),
    Column("experts used", numeric=True),
    Column("max load", numeric=True),
    Column("gate entropy", numeric=True),
)
EPOCH_COLUMNS = (
    Column("epoch", numeric=True),
    Column("step", numeric=True),
    Column("train loss", numeric=True),
    Column("val loss", numeric=True),
    Column("perplexity", numeric=True),
    Column("gini", numeric=True),
    Column("entropy bits", numeric=True),
)


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
        f"{result['trainable_parameters']:,} parameters trained of {result['total_parameters']:,}; "
        f"dropped tokens: {sum(layer['dropped_tokens'] for layer in result['layers'])}",
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

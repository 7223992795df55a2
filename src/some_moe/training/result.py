"""result.json: the figures of a finished run, under the names that every reader of runs knows."""

from typing import Any

from torch import Tensor

from some_moe.config import RunConfig
from some_moe.metrics.usage import summarize_usage
from some_moe.model.transformer import SomeLM
from some_moe.training.evaluate import Evaluation


def epoch_record(start: dict[str, Any], found: Evaluation, train_counts: Tensor) -> dict[str, Any]:
    """One epoch's line, as far as it is known: losses, and the middle layer's usage in evaluation and in training."""
    record = start | {f"val_{name}": getattr(found, name) for name in ("loss", "loss_on_padding", "loss_padded")}
    record |= {"perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
    if found.layers:
        middle = len(found.layers) // 2
        in_training = summarize_usage(train_counts[middle])
        record |= {name: found.layers[middle][name] for name in ("gini", "entropy_bits", "experts_used")}
        record |= {f"train_{name}": in_training[name] for name in ("gini", "entropy_bits", "experts_used")}
    return record


def make_result(
    config: RunConfig, model: SomeLM, progress: dict[str, Any], found: tuple[Evaluation, Evaluation, Evaluation]
) -> dict[str, Any]:
    """All figures of a run. found: on valid at the last step; on test at the best step by valid, and at the last."""
    valid, test_best, test_last = found
    trainable, total = model.count_parameters()
    layers = []
    for layer, usage in zip(model.layers, valid.layers, strict=True):
        layers.append(usage | {"respawns": 0 if layer.state is None else int(layer.state.respawns.sum())})
    seconds = progress["seconds"]
    return {
        "name": config.name,
        "experiment": config.experiment,
        "status": "stopped early" if progress["stopped_early"] else "finished",
        "steps": progress["step"],
        "tokens": progress["tokens"],
        "seconds": seconds,
        "compile_seconds": progress["compile_seconds"],
        "tokens_per_second": progress["tokens"] / seconds if seconds else 0.0,
        "train_loss": progress["epochs"][-1]["train_loss"] if progress["epochs"] else None,
        "val_loss": valid.loss,
        "best_val_loss": progress["best_val_loss"],
        "best_step": progress["best_step"],
        "test_loss": test_best.loss,
        "test_loss_last_step": test_last.loss,
        "val_loss_padded": valid.loss_padded,
        "val_loss_on_padding": valid.loss_on_padding,
        "text_share": valid.text_share,
        "perplexity": valid.perplexity,
        "bits_per_byte": valid.bits_per_byte,
        "test_bits_per_byte": test_best.bits_per_byte,
        "total_parameters": total,
        "trainable_parameters": trainable,
        "middle_layer": len(model.layers) // 2 if layers else None,
        "layers": layers,
        "seed": config.train.seed,
    }

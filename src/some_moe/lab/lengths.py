"""One trained model, scored with its rows cut or padded to several lengths.

The loss of the published reports up to v4 averages over padding, which costs next to nothing once it is learned:
longer rows alone make it fall. The honest loss beside it, and a predictor that knows nothing, say how much of that is
the model's doing.

Shapes: V ids in the tokenizer's vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from some_moe.config import RunConfig
from some_moe.data.batches import Rows
from some_moe.data.tokenizer import BOS, EOS, PAD, Tokenizer
from some_moe.environment import describe_program
from some_moe.lab.jobs import hide_place
from some_moe.memory import refuse_too_large
from some_moe.model.transformer import SomeLM
from some_moe.training.evaluate import evaluate, evaluation_batches
from some_moe.training.machine import choose_machine
from some_moe.training.runs import load

EVERY_POSITION = {"data.batching": "padded", "data.loss_on": "all_positions", "data.count_padding": True}


def score_run(
    path: str | Path, lengths: Sequence[int], *, split: str = "test", checkpoint: str = "best", device: str = "auto"
) -> dict[str, Any]:
    """Score a run's own data at each length, and return all about it as one plain object. No absolute paths."""
    run, program = load(path, checkpoint=checkpoint), describe_program()
    config, data, model = run.config, run.config.data, run.model
    machine = choose_machine(config.train.override({"device": device}))
    longest = max(data.seq_len, *lengths)
    refuse_too_large(resize(config, longest).override(EVERY_POSITION), machine.device, training=False)
    dataset = run.read_data(longest)
    scored = getattr(dataset, split)
    scores = score_lengths(machine.adopt(model), dataset.train, scored, lengths, config, run.tokenizer)
    return {
        "run": hide_place(str(run.path)),
        "experiment": config.experiment,
        "seed": config.train.seed,
        "step": run.step,
        "split": split,
        "stories": {part: len(getattr(dataset, part)) for part in ("train", "valid", "test")},
        "source": hide_place(data.source),
        "data": dataset.describe(),
        "trained_seq_len": data.seq_len,
        "loss_on": data.loss_on,
        "middle_layer": len(model.layers) // 2 if model.layers else None,
        "device": machine.describe(),
        "precision": "bf16" if machine.bf16 else "fp32",
        "commit": program["commit"],
        "versions": {name: program[name] for name in ("python", "torch", "some_moe")},
        "lengths": scores,
    }


def score_lengths(
    model: SomeLM, train: Rows, scored: Rows, lengths: Sequence[int], config: RunConfig, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Score the rows of `scored` at each length; the constant predictor learns from those of `train`.

    Both must have been encoded at least as long as the longest of `lengths`. `padded` figures count every position,
    the others real tokens alone; usage is that of the middle layer, None without SoME layers.
    """
    token_bytes, device = tokenizer.token_bytes(), next(model.parameters()).device
    scores = []
    for seq_len in lengths:
        rows, own = cut_rows(scored, seq_len), resize(config, seq_len)
        padded = evaluate(model, rows, own.override(EVERY_POSITION), token_bytes, device)
        # The run's own way of batching gives the bits that `some eval` prints; often it is this same one.
        same = evaluation_batches(rows, own).config.batching == "padded"
        honest = padded if same else evaluate(model, rows, own, token_bytes, device)
        share, on_padding = padded.text_share, padded.loss_on_padding
        every, real = (found.layers[len(found.layers) // 2] if found.layers else {} for found in (padded, honest))
        learned = count_targets(cut_rows(train, seq_len), seq_len, tokenizer.vocab_size)
        asked = count_targets(rows, seq_len, tokenizer.vocab_size)
        scores.append(
            {
                "seq_len": seq_len,
                "text_share": share,  # r: share of the positions that are text when every row is seq_len long
                "loss": honest.loss,  # nats per real token
                "loss_on_padding": on_padding,  # None where no row has padding
                # r·loss + (1−r)·loss_on_padding, whatever the run was trained on
                "loss_padded": share * honest.loss + (1 - share) * (on_padding or 0.0),
                # of a predictor that ignores its input, on the same targets
                "constant_loss": constant_loss(without_padding(learned), without_padding(asked)),
                "constant_loss_padded": constant_loss(learned, asked),
                "perplexity": honest.perplexity,
                "bits_per_byte": honest.bits_per_byte,
                "num_tokens": honest.num_tokens,  # real targets scored
                "num_stories_cut": count_cut(rows),
                "gini": real.get("gini_real", real.get("gini")),
                "gini_padded": every.get("gini"),
                "entropy_bits": real.get("entropy_bits_real", real.get("entropy_bits")),
                "entropy_bits_padded": every.get("entropy_bits"),
            }
        )
    return scores


def resize(config: RunConfig, seq_len: int) -> RunConfig:
    """The config with another row length, and fewer rows a batch where they are longer than the run's own."""
    data = config.data
    fitting = max(1, data.batch_size * data.seq_len // seq_len)
    return config.override({"data.seq_len": seq_len, "data.batch_size": min(data.batch_size, fitting)})


def cut_rows(rows: Rows, seq_len: int) -> Rows:
    """The same stories as if they had been encoded with a shorter seq_len."""
    if len(rows) == 0 or rows.lengths.max() <= seq_len:
        return rows
    pieces = [rows[story][: seq_len + 1] for story in range(len(rows))]
    ids = np.concatenate(pieces)
    return Rows(ids, np.cumsum([0, *map(len, pieces)]), rows.num_cut + len(rows.ids) - len(ids))


def count_cut(rows: Rows) -> int:
    """Stories that lost their end: a whole one ends with eos, which no text contains."""
    return int((rows.ids[rows.starts[1:] - 1] != EOS).sum())


def count_targets(rows: Rows, seq_len: int, vocab_size: int) -> np.ndarray:
    """How often each id is a target when every row is padded to seq_len: (V,) int64. bos never is one."""
    counts = np.bincount(rows.ids, minlength=vocab_size)
    counts[BOS] -= len(rows)
    counts[PAD] += len(rows) * seq_len - int(rows.lengths.sum())
    return counts


def without_padding(counts: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(counts)) == PAD, 0, counts)


def constant_loss(learned: np.ndarray, asked: np.ndarray) -> float:
    """Nats per target of `asked` (V,) when each id has the chance of its count in `learned` (V,), one added to each."""
    chances = (learned + 1) / (learned.sum() + len(learned))
    return float(-(asked * np.log(chances)).sum() / asked.sum())

"""Sizes so small that a run proves only that it runs: the rehearsal of a slice on a CPU, in seconds."""

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "full": {},
    "mini": {
        "model.d_model": 32, "model.num_heads": 2, "model.d_ffn": 16, "model.vocab_size": 512,
        "data.seq_len": 64, "data.batch_size": 8,
        "data.train_subset_size": 96, "data.val_subset_size": 16, "train.epochs": 1, "train.max_steps": 4,
        "train.device": "cpu", "train.threads": 1,
    },
}  # fmt: skip

"""A1, shrunk until a run of it takes seconds."""

from typing import Any

from some_moe.lab.registry import find_experiment

A1 = find_experiment("A1")
TINY: dict[str, Any] = {
    "model.d_model": 32, "model.num_layers": 2, "model.num_heads": 2, "model.vocab_size": 512,
    "model.num_experts": 8, "model.d_ffn": 32, "model.top_k": 2,
    "data.source": "stories", "data.seq_len": 64, "data.batch_size": 8,
    "data.train_subset_size": 16, "data.val_subset_size": 4,
    "train.epochs": 1, "train.device": "cpu", "train.sample_tokens": 0, "train.log_every": 1,
}  # fmt: skip

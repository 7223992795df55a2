"""Made-up records in a results folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from some_moe.lab.registry import find_experiment

MakeUp = Callable[..., Path]


@pytest.fixture
def make_up(tmp_path: Path) -> MakeUp:
    """Return a function that writes results/NAME-seedS.json with made-up figures, as `some experiments run` would.

    `loss` is the loss that the published one is compared with, at the end; each epoch before is 0.1 higher. Fields of
    the file can be replaced, or, with None for its value, left out.
    """

    def write(name: str, seed: int = 0, *, loss: float = 1.1111, file: str = "", **fields: Any) -> Path:
        config, counts = find_experiment(name).config, find_experiment(name).parameters
        padded = config.data.loss_on == "all_positions"
        usage = {"gini": 0.7777, "entropy_bits": 4.4444, "experts_used": 44}
        usage |= {"gini_real": 0.5555, "entropy_bits_real": 5.5555} if padded else {}
        epochs = []
        for epoch in range(1, config.train.epochs + 1):
            here = loss + 0.1 * (config.train.epochs - epoch)
            figures = {"val_loss": here + 2 if padded else here, "val_loss_padded": here if padded else None}
            figures |= {"perplexity": 22.22, "bits_per_byte": 0.9999}
            epochs.append({"epoch": epoch, "step": 100 * epoch, "train_loss": 3.3333, **figures, **usage})
        middle = config.model.num_layers // 2
        losses = ("val_loss", "val_loss_padded", "perplexity", "bits_per_byte")
        record = {
            "name": f"{name}-seed{seed}", "experiment": name, "status": "finished", "seed": seed,
            "steps": 100 * config.train.epochs, "seconds": 12.3, "tokens_per_second": 45678.9,
            "total_parameters": counts.total, "trainable_parameters": counts.trainable,
            "middle_layer": middle, "layers": [{"layer": middle, **usage}], "device": "a made-up device",
            "published_epochs": epochs, "epochs_scaled": None, "source": config.data.source, "overrides": {},
            **{name: epochs[-1][name] for name in losses},
        } | fields  # fmt: skip
        path = tmp_path / "results" / (file or f"{name}-seed{seed}.json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({name: value for name, value in record.items() if value is not None}))
        return path

    return write

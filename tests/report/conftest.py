"""One tiny run, trained and analysed once: all that the pages show, with a name that tries to be a script."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from some_moe.cli import main
from some_moe.experiments.registry import find_experiment

NASTY = "<script>alert(1)</script>"

GUILDS: dict[str, Any] = {
    "level": 0.01,
    "split": "valid",
    "num_tokens": 400,
    "families": [
        {
            "family": "part of speech",
            "classes": ["noun", "verb"],
            "layers": [
                {
                    "layer": 0, "mi_bits": 0.2, "mi_corrected_bits": 0.15, "nmi": 0.125, "p_value": 0.002,
                    "null_mean_bits": 0.05, "null_high_bits": 0.07, "random_keys_nmi": [0.08, 0.1],
                    "interval": [0.106, 0.132],
                }
            ],
        }
    ],
    "communities": [
        {"layer": 0, "modularity": 0.7, "null_mean": 0.01, "null_sd": 0.005, "p_value": 0.1, "groups": [[0, 1], [2]]}
    ],
    "depth": {"statement": "Fewer than three layers have no beginning, middle and end to compare.", "slopes": []},
    "swap": [{"layer": 0, "loss_change": 0.1177, "interval": [0.1012, 0.1352]}],
    "guilds": [
        {
            "name": "noun (part of speech), layer 0", "layer": 0, "family": "part of speech", "class": "noun",
            "experts": [1, 3], "npmi": 0.39, "q_value": 0.006, "p_association": 0.0005,
            "random_keys": {"p_adjusted": 0.002, "own_bits": 0.1294, "random_bits": [0.01, 0.03]},
            "words": [{"text": NASTY, "count": 12}], "contexts": [{"before": "the ", "word": NASTY, "after": " & co"}],
            "knockout": {
                "class_change": 0.2047, "other_change": 0.005, "random_class_change": 0.0061,
                "random_other_change": 0.0337, "effect": 0.2274, "p_value": 0.001, "p_adjusted": 0.002,
                "interval": [0.2, 0.25],
            },
            "verdict": "supported", "reason": "Its experts stand out.",
        },
        {
            "name": "verb (part of speech), layer 0", "layer": 0, "family": "part of speech", "class": "verb",
            "experts": [2], "npmi": 0.2, "q_value": 0.008, "words": [], "contexts": [], "knockout": None,
            "verdict": "not supported", "reason": "Random keys do about as well.",
        },
    ],
    "passed": {"enrichment": 2, "association": 2, "random_keys": 1, "knockout": 1},
    "control": None,
    "notes": ["Information is counted by selection."],
}  # fmt: skip


@pytest.fixture(scope="session")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the preset smoke, cut down, with its analysis. Nobody may write into it: see `run`."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    path = tmp_path_factory.mktemp("pages") / "run"
    train = ["train", "--preset", "smoke", "--name", NASTY, "--out", str(path), "--model.num-experts", "6"]
    train += ["--data.train-subset-size", "32", "--data.val-subset-size", "6", "--train.epochs", "1"]
    assert main([*train, "--train.snapshot-every", "2"]) == 0
    assert main(["analyze", str(path), "--no-guilds", "--max-tokens", "400"]) == 0
    patch.undo()
    with (path / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 4, "text": f"Once {NASTY} upon a time.\nThe end."}) + "\n")
    (path / "analysis" / "guilds.json").write_text(json.dumps(GUILDS), encoding="utf-8")
    return path


@pytest.fixture
def run(analysed: Path, tmp_path: Path) -> Path:
    """A copy to write into."""
    path = tmp_path / "run"
    shutil.copytree(analysed, path)
    return path


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

"""Short CPU runs of every kind of model, by the command line alone: what they leave is kept in cpu.json.

python tests/golden/kinds.py            prints the record of this machine as JSON
python tests/golden/kinds.py --renew    writes it to cpu.json: see "How to renew goldens" in CONTRIBUTING.md

What must be equal where: on the same torch, kind of CPU and number of threads every loss and every tensor is equal to
the bit, whatever was rebuilt. Elsewhere sums are made in another order: losses agree to LOOSE, and tensors are not
compared. One thread, for trained experts (`full`) are not repeatable on two.
"""

import contextlib
import hashlib
import io
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from some_moe.cli import main

HERE = Path(__file__).parent
LOOSE = 2e-3  # nats: what 12 steps make of another order of sums
STEPS = 12
BASE = [
    *("train", "--preset", "smoke", "--model.query", "mlp", "--data.train-subset-size", "64"),
    *("--data.val-subset-size", "8", "--train.epochs", "12", "--train.max-steps", str(STEPS), "--train.log-every", "1"),
    *("--train.save-every", "0", "--train.sample-tokens", "8", "--train.compile", "false"),
]
KINDS: dict[str, list[str]] = {
    "plain": [],
    "lora": ["--model.trainability", "lora", "--model.lora-rank", "4"],
    "full": ["--model.trainability", "full"],
    "gains": ["--model.gains", "true"],
    "shared-down": ["--model.shared-down", "true"],
    "hash": [
        *("--model.router", "hash", "--gravity.use-alpha", "false"),
        *("--gravity.use-beta", "false", "--gravity.use-delta", "false"),
    ],
    "learned-keys": [
        *("--model.router", "learned", "--gravity.use-alpha", "false"),
        *("--gravity.use-beta", "false", "--gravity.use-delta", "false", "--gravity.balance-rate", "0.01"),
    ],
    "post-norm": ["--model.norm", "post", "--model.positions", "alibi", "--model.query", "linear"],
    "dropout": ["--model.dropout", "0.2", "--model.positions", "sinusoidal", "--model.score", "cosine"],
    "centred-respawn": [
        *("--model.center-queries", "true", "--gravity.respawn-below", "0.7", "--gravity.respawn-patience", "1"),
        *("--gravity.normalize", "true", "--gravity.key-ema", "0.5", "--gravity.token-fraction", "0.5"),
    ],
    "packed": ["--data.batching", "packed", "--model.learn-temperature", "true", "--model.entropy-band", "[0.5, 1.0]"],
    "bucketed-accumulated": ["--train.global-batch-tokens", "2048", "--train.top-k-warmup", "0.3"],
    "padded": ["--data.batching", "padded", "--data.loss-on", "all_positions", "--data.count-padding", "true"],
    "every-study": [
        *("--model.shared-expert", "12", "--model.query-residual", "true", "--model.output-scale", "true"),
        *("--model.gains", "true", "--model.grounding", "0.1", "--model.balance-loss", "0.01"),
    ],
    "frozen-dense": [
        *("--model.ffn", "frozen_dense", "--model.dense-width", "48", "--gravity.use-alpha", "false"),
        *("--gravity.use-beta", "false", "--gravity.use-delta", "false"),
    ],
}


def describe_machine() -> dict[str, Any]:
    """What the bits depend on."""
    words = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            words[name.strip()] = value.strip()
    cpu = " ".join(words.get(name, "") for name in ("vendor_id", "cpu family", "model")) or platform.processor()
    return {"torch": torch.__version__, "cpu": cpu, "instructions": torch.backends.cpu.get_cpu_capability()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def run_kind(name: str, folder: Path) -> dict[str, Any]:
    """Train one kind for twelve steps; return the losses as hex floats and the digests of what was saved."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*BASE, *KINDS[name], "--out", str(folder)])
    if code != 0:
        raise RuntimeError(f"{name}: exit code {code}: {said.getvalue()}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    place = folder / "checkpoints" / f"step-{STEPS}"
    model, optimizer = (load_file(place / f"{part}.safetensors") for part in ("model", "optimizer"))
    keys = {path: tensor for path, tensor in model.items() if ".state." in path}
    result = json.loads((folder / "result.json").read_text())
    return {
        "losses": [line["train_loss"].hex() for line in lines if "train_loss" in line],
        "gradient_norms": [line["gradient_norm"].hex() for line in lines if "train_loss" in line],
        "test_loss": result["test_loss"].hex(),
        "parameters": digest({path: tensor for path, tensor in model.items() if path not in keys}),
        "keys": digest(keys),
        "optimizer": digest(optimizer),
    }


def run_all() -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        os.environ["SOME_CACHE"] = str(Path(place) / "cache")
        return {
            "machine": describe_machine(),
            "kinds": {name: run_kind(name, Path(place) / name) for name in KINDS},
        }


if __name__ == "__main__":
    text = json.dumps(run_all(), indent=1) + "\n"
    if "--renew" in sys.argv:
        (HERE / "cpu.json").write_text(text)
    else:
        print(text, end="")

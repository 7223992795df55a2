"""A run as the glass box sees it, read without a model and without torch: what it holds, and what is missing.

Shapes: E experts, D model width.
"""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from some_moe.config import ConfigError, ModelConfig, RunConfig
from some_moe.system.files import inside
from some_moe.system.reading import read_bytes, refuse_irregular
from some_moe.system.records import Grown
from some_moe.training.run_folder import RunFolder, list_steps, read_log

UNFINISHED = "training or killed"  # the two look alike from outside


@dataclass(frozen=True, kw_only=True)
class KeySnapshots:
    """The key stores at some steps of training. Arrays are read when they are asked for."""

    files: dict[int, Path] = field(default_factory=dict)  # by step, in order
    layers: tuple[int, ...] = ()  # the blocks that have a key store

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self.files)

    def read(self, what: str, step: int, layer: int) -> np.ndarray:
        """The "keys" (E, D) of a block after `step` steps, or their "usage" (E,): the share of the load times E."""
        with safe_open(self.files[step], framework="numpy") as file:
            found = np.asarray(file.get_tensor(f"{layer}.{what}"))
        if not np.isfinite(found).all():
            raise ConfigError(f"{str(self.files[step])!r} holds what is no number; restore it, or remove it")
        return found


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run folder, opened for reading."""

    path: Path
    config: RunConfig
    env: dict[str, Any]  # env.json; empty where it is missing
    steps: list[dict[str, Any]]  # metrics.jsonl, the lines of training steps: step, tokens, train_loss, …
    evaluations: list[dict[str, Any]]  # metrics.jsonl, the lines of evaluations: step, tokens, val_loss, layers, …
    result: dict[str, Any] | None  # result.json; None until the run has finished
    samples: list[dict[str, Any]]  # step, text
    snapshots: KeySnapshots
    checkpoints: tuple[int, ...]  # steps that have a checkpoint, oldest first
    grown: dict[str, Any] | None = None  # grown.json, of a run with branches
    status: str  # "finished", "stopped early", "merged" or UNFINISHED
    missing: tuple[str, ...]  # what is not there, and what follows from it: one sentence each

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def last_step(self) -> int:
        """The last step that the folder knows of."""
        logged = [int(record["step"]) for record in (*self.steps, *self.evaluations)]
        return max([0, *logged, *self.snapshots.steps, *self.checkpoints])

    @property
    def has_keys(self) -> bool:
        """Whether this kind of model has a key store."""
        return self.config.model.ffn == "some" and self.config.model.router != "hash"


def read_run(path: str | Path) -> RunRecord:
    """Read a run folder: finished, still training, killed, or with parts missing. Only config.yaml must be there."""
    folder = RunFolder(path)
    damaged: list[str] = []
    config = folder.read_config()
    lines, samples = (read_log(folder.path / name, damaged) for name in ("metrics.jsonl", "samples.jsonl"))
    result, env, grown = (_read_object(folder, name, damaged) for name in ("result.json", "env.json", "grown.json"))
    record = RunRecord(
        path=folder.path,
        config=config,
        env=env or {},
        steps=[line for line in lines if "train_loss" in line],
        evaluations=[line for line in lines if "val_loss" in line],
        result=result,
        samples=samples,
        snapshots=KeySnapshots(),
        checkpoints=tuple(s for s, place in list_steps(folder.checkpoints).items() if (place / "state.json").is_file()),
        grown=None
        if grown is None
        else Grown.model_validate(grown).model_dump(),  # what may be missing has its default
        status=_find_status(result, grown),
        missing=(),
    )
    if record.has_keys:
        record = replace(record, snapshots=_find_snapshots(folder, config.model, damaged))
    return replace(record, missing=(*damaged, *_describe_missing(record)))


def hash_state(checkpoint: Path) -> str | None:
    """What a checkpoint is known by, wherever it is copied: a hash of its state.json; None where it is gone."""
    try:
        return hashlib.sha256(read_bytes(checkpoint / "state.json")).hexdigest()
    except (ConfigError, OSError):
        return None


def _read_object(folder: RunFolder, name: str, damaged: list[str]) -> dict[str, Any] | None:
    try:
        return folder.read_object(name)
    except ConfigError:
        damaged.append(f"{name} is damaged and left out.")
        return None


def _find_status(result: dict[str, Any] | None, grown: dict[str, Any] | None) -> str:
    if result is not None:
        return str(result.get("status", "finished"))
    return "merged" if grown and grown.get("merged") else UNFINISHED


def _find_snapshots(folder: RunFolder, model: ModelConfig, damaged: list[str]) -> KeySnapshots:
    """The snapshots that hold the key stores of such a model, by step. Headers alone are read."""
    layers, found = range(model.num_layers), {}
    sizes = {"keys": [model.num_experts, model.d_model], "usage": [model.num_experts]}
    for step, path in list_steps(folder.snapshots, ".safetensors").items():
        try:
            refuse_irregular(inside(folder.path, path.relative_to(folder.path)))
            with safe_open(path, framework="numpy") as file:
                names = file.keys() if len(file.keys()) == len(sizes) * len(layers) else ()
                parts = {name: file.get_slice(name) for name in names}
            wanted = {f"{layer}.{what}": size for layer in layers[: len(parts)] for what, size in sizes.items()}
            if {n: part.get_shape() for n, part in parts.items() if part.get_dtype() == "F32"} != wanted or not parts:
                raise ConfigError(f"{path.name} is of another model")
        except (SafetensorError, ConfigError, OSError):
            damaged.append(f"The key snapshot {path.name} is damaged and left out.")
        else:
            found[step] = path
    return KeySnapshots(files=found, layers=tuple(layers) if found else ())


def _describe_missing(run: RunRecord) -> list[str]:
    """What is not in the folder, and what follows: one sentence each."""
    train, num_snapshots = run.config.train, len(run.snapshots.files)
    kind = "hash routing" if run.config.model.ffn == "some" else "dense blocks"
    no_keys = "train.snapshot_every is 0" if train.snapshot_every == 0 else "the folder keys/ is empty or missing"
    no_text = "train.sample_tokens is 0" if train.sample_tokens == 0 else "none was written yet"
    has_tokenizer = (run.path / "tokenizer.json").is_file()
    absent = {
        "No result.json: the run is still training or was killed, so its test loss is not known.": run.result is None,
        "No env.json: the versions and the machine of this run are not known.": not run.env,
        "No training steps in metrics.jsonl: there is no training curve.": not run.steps,
        "No evaluation in metrics.jsonl: there is no validation curve.": not run.evaluations,
        f"This model has no keys ({kind}): there is no key map and no key movement.": not run.has_keys,
        f"No key snapshots ({no_keys}): there is no key movement.": run.has_keys and num_snapshots == 0,
        "Only one key snapshot: key movement needs two.": run.has_keys and num_snapshots == 1,
        "No checkpoint: the model cannot be replayed, so its experts cannot be watched at work.": not run.checkpoints,
        "No tokenizer.json: the model cannot be replayed on text.": run.checkpoints and not has_tokenizer,
        f"No sample texts: {no_text}.": not run.samples,
    }
    return [sentence for sentence, holds in absent.items() if holds]

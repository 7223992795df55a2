"""Checkpoints: safetensors and JSON only, written whole and renamed into place, verified before use.

A checkpoint folder step-N holds `model.safetensors` (trained parameters and key stores; frozen experts are a
seed and a checksum), `optimizer.safetensors` and `state.json`, which carries a hash of the other two.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from some_moe.config import FORMAT_VERSION, ConfigError
from some_moe.files import sync, write_beside, write_whole
from some_moe.model.library import ExpertLibrary
from some_moe.model.transformer import SomeLM
from some_moe.training.run_folder import CURE, list_checkpoints, read_state_file

TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file so that it is there whole or not at all."""
    try:
        with write_beside(path) as scratch:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, scratch)
    except SafetensorError as error:
        raise OSError(str(error)) from None


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_remade(model: SomeLM) -> list[ExpertLibrary]:
    """The libraries whose weights are not in the checkpoint, but made again."""
    return [library for library in model.libraries if not library.trained and library.init_method != "orthogonal"]


def describe_libraries(model: SomeLM) -> list[dict[str, Any]]:
    """Seed and checksum of each library that is made again."""
    return [library.describe() for library in list_remade(model)]


def save_checkpoint(
    folder: Path, model: SomeLM, optimizer: torch.optim.Optimizer, state: dict[str, Any], extra: dict[str, Tensor]
) -> Path:
    """Write checkpoints/step-N; state["step"] is N. Returns its path."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    memory = {
        f"{names[parameter]}/{part}": value
        for parameter, parts in optimizer.state.items()
        for part, value in parts.items()
    }
    place = folder / f"step-{state['step']}"
    scratch = folder / f".step-{state['step']}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        write_tensors(scratch / "model.safetensors", dict(model.state_dict()))
        write_tensors(scratch / "optimizer.safetensors", memory | extra)
        hashes = {name: _hash_file(scratch / name) for name in TENSOR_FILES}
        record = {"format_version": FORMAT_VERSION, "hashes": hashes} | state
        write_whole(scratch / "state.json", json.dumps(record, indent=1))
        if place.exists():
            shutil.rmtree(place)
        os.replace(scratch, place)
        sync(folder)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return place


def prune_checkpoints(folder: Path, keep_last: int, best_step: int | None) -> None:
    """Remove all but the last few and the best, and whatever a killed process left half-written."""
    kept = list_checkpoints(folder)[-keep_last:]
    for path in list_checkpoints(folder):
        if path not in kept and path.name != f"step-{best_step}":
            shutil.rmtree(path)
    for scratch in folder.glob(".step-*.tmp"):
        shutil.rmtree(scratch, ignore_errors=True)


def read_state(place: Path) -> dict[str, Any]:
    """Read a checkpoint's state.json and verify the files that it vouches for."""
    state = read_state_file(place)
    for name in TENSOR_FILES:
        path = place / name
        if not path.is_file():
            raise ConfigError(f"{str(place)!r} is not a whole checkpoint: {name} is missing; {CURE}")
        if _hash_file(path) != state["hashes"].get(name):
            raise ConfigError(f"{str(path)!r} is truncated or was changed since it was written; {CURE}")
    return state


def load_model(place: Path, model: SomeLM) -> dict[str, Any]:
    """Load the trained parameters and key stores into a model with the same experts. Returns the checkpoint's state."""
    state = read_state(place)
    saved = load_file(place / "model.safetensors")
    refuse_other_shapes(place, saved, model.state_dict())
    for library, description in zip(list_remade(model), state["libraries"], strict=True):
        library.verify(description)
    model.load_state_dict(saved)
    return state


def refuse_other_shapes(place: Path, saved: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Name the first tensor in which a saved model differs from the one that it is for."""
    for name in wanted | saved:
        there, here = (
            f"shape {tuple(tensors[name].shape)}" if name in tensors else "none" for tensors in (saved, wanted)
        )
        if there != here:
            raise ConfigError(
                f"{str(place)!r} does not fit this config: of {name} it has {there}, the config {here}; use the config "
                "that was saved with it"
            )


def load_optimizer(place: Path, model: SomeLM, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Restore the optimizer; return the extra tensors that were saved beside it."""
    parameters, extra = dict(model.named_parameters()), {}
    for name, value in load_file(place / "optimizer.safetensors").items():
        path, _, part = name.rpartition("/")
        if path in parameters:
            optimizer.state[parameters[path]][part] = value.to(parameters[path].device)
        else:
            extra[name] = value
    return extra

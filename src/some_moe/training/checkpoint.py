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
from safetensors.torch import save_file
from torch import Tensor

from some_moe.config import FORMAT_VERSION, ConfigError
from some_moe.files import inside, sync, write_beside, write_whole
from some_moe.model.library import ExpertLibrary
from some_moe.model.transformer import SomeLM
from some_moe.reading import clean, read_tensors, refuse_irregular
from some_moe.training.run_folder import CURE, list_checkpoints, read_state_file

TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")
MEMORY = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps of each parameter
HEADER_BYTES = 1 << 24  # room for the names in a safetensors file


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
        path = inside(place, name)
        if not path.exists():
            raise ConfigError(f"{str(place)!r} is not a whole checkpoint: {name} is missing; {CURE}")
        refuse_irregular(path)
        if _hash_file(path) != state["hashes"].get(name):
            raise ConfigError(f"{str(path)!r} is truncated or was changed since it was written; {CURE}")
    return state


def read_fitting(place: Path, name: str, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint's file, which must have the names, shapes and types of `wanted`, and be numbers."""
    largest = HEADER_BYTES + sum(tensor.nbytes for tensor in wanted.values())
    saved, _ = read_tensors(place / name, "pt", largest)
    for one in wanted | saved:
        there, here = (_describe(tensors.get(one)) for tensors in (saved, wanted))
        if there != here:
            raise ConfigError(
                f"{str(place)!r} does not fit this config: of {clean(one)} it has {there}, the config {here}; use the "
                "config that was saved with it"
            )
        if saved[one].is_floating_point() and not bool(saved[one].isfinite().all()):
            raise ConfigError(f"{str(place / name)!r} has nan or infinity in {one}; {CURE}")
    return saved


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    kind = "" if tensor.dtype == torch.float32 else f" of {str(tensor.dtype).removeprefix('torch.')}"
    return f"shape {tuple(tensor.shape)}{kind}"


def load_model(place: Path, model: SomeLM) -> dict[str, Any]:
    """Load the trained parameters and key stores into a model with the same experts. Returns the checkpoint's state."""
    state = read_state(place)
    saved = read_fitting(place, "model.safetensors", model.state_dict())
    remade = list_remade(model)
    if len(remade) != len(state["libraries"]):
        raise ConfigError(
            f"{str(place)!r} does not fit this config: it has experts of {len(state['libraries'])} layers, the config "
            f"of {len(remade)}; use the config that was saved with it"
        )
    for library, description in zip(remade, state["libraries"], strict=True):
        library.verify(description)
    model.load_state_dict(saved)
    return state


def load_optimizer(
    place: Path, model: SomeLM, optimizer: torch.optim.Optimizer, extra: dict[str, Tensor], *, begun: bool
) -> dict[str, Tensor]:
    """Restore the optimizer; return the tensors that were saved beside it, which must be like `extra`.

    begun: whether a step was made; before it there is nothing to remember.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and begun}
    one = torch.zeros((), dtype=torch.float32)
    wanted = {f"{name}/{part}": one if part == "step" else p for name, p in trained.items() for part in MEMORY}
    saved = read_fitting(place, "optimizer.safetensors", wanted | extra)
    for name, parameter in trained.items():
        optimizer.state[parameter] = {part: saved[f"{name}/{part}"].to(parameter.device) for part in MEMORY}
    return {name: saved[name] for name in extra}

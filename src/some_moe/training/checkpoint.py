"""Checkpoints: safetensors and JSON only, written whole and renamed into place, verified before use.

A checkpoint folder step-N holds `model.safetensors` (trained parameters and key stores; frozen experts are a
seed and a checksum), `optimizer.safetensors` and `state.json`, which carries a hash of the other two.
"""

import json
import os
import shutil
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from some_moe.config import FORMAT_VERSION, ConfigError, RunConfig
from some_moe.config.run import WITHOUT_EFFECT
from some_moe.model.library import ExpertLibrary
from some_moe.model.transformer import SomeLM
from some_moe.parallel.process_group import SINGLE, Files, ProcessGroup, hold_like, local, read_held
from some_moe.system.files import hash_file, inside, name_scratch, remove_whole, sync, write_tensors, write_whole
from some_moe.system.reading import refuse_irregular, refuse_other_shapes
from some_moe.training.run_folder import CURE, list_steps, read_state_file

TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")
MEMORY = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps of each parameter


def list_remade(model: SomeLM) -> list[ExpertLibrary]:
    """The libraries whose weights are not in the checkpoint, but made again."""
    return [library for library in model.libraries if not library.trained and library.init_method != "orthogonal"]


def describe_libraries(model: SomeLM) -> list[dict[str, Any]]:
    """Seed and checksum of each library that is made again."""
    return [library.describe() for library in list_remade(model)]


def name_memory(model: SomeLM, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimizer remembers, by the names of the model's parameters."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    memory = optimizer.state.items()
    return {f"{names[parameter]}/{part}": value for parameter, parts in memory for part, value in parts.items()}


def copy_to_cpu(tensors: dict[str, Tensor], places: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Copies on the host. places: tensors that are filled by them, and of which missing ones are made, page-locked, to
    which a GPU copies several times as fast."""
    if places is None:
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if name not in places:
            places[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
        places[name].copy_(tensor, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {name: places[name] for name in tensors}


def save_checkpoint(
    folder: Path,
    weights: dict[str, Tensor],
    memory: dict[str, Tensor],
    state: dict[str, Any],
    group: ProcessGroup = SINGLE,
) -> Path:
    """Write checkpoints/step-N; state["step"] is N. Returns its path. All that have parts of the model call it."""
    files = {"model.safetensors": weights, "optimizer.safetensors": memory}
    place = folder / f"step-{state['step']}"
    if group.is_main:
        folder.mkdir(exist_ok=True)  # but not the run folder: one that was moved away is not made again
    with group.put_together(folder, files) as whole:
        if group.is_main:
            write_checkpoint(place, whole, state)
    return place


def write_checkpoint(place: Path, files: Files, state: dict[str, Any]) -> None:
    """Write a checkpoint folder so that it is there whole or not at all."""
    scratch = name_scratch(place)
    try:
        scratch.mkdir()
        for name, tensors in files.items():
            write_tensors(scratch / name, tensors)
        hashes = {name: hash_file(scratch / name) for name in TENSOR_FILES}
        record = {"format_version": FORMAT_VERSION, "hashes": hashes} | state
        write_whole(scratch / "state.json", json.dumps(record, indent=1))
        if place.exists():
            remove_whole(place)
        os.replace(scratch, place)
        sync(place.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def prune_checkpoints(folder: Path, keep_last: int, best_step: int | None) -> None:
    """Remove all but the last few and the best."""
    found = [*list_steps(folder).values()]
    for path in found[: max(0, len(found) - keep_last)]:
        if path.name != f"step-{best_step}":
            remove_whole(path)


def read_state(place: Path) -> dict[str, Any]:
    """Read a checkpoint's state.json and verify the files that it vouches for."""
    state = read_state_file(place)
    for name in TENSOR_FILES:
        path = inside(place, name)
        if not path.exists():
            raise ConfigError(f"{str(place)!r} is not a whole checkpoint: {name} is missing; {CURE}")
        refuse_irregular(path)
        if hash_file(path) != state["hashes"].get(name):
            raise ConfigError(f"{str(path)!r} is truncated or was changed since it was written; {CURE}")
    return state


def list_changes(place: Path, config: RunConfig, saved: RunConfig, accepted: Container[str]) -> list[dict[str, Any]]:
    """The fields in which a config differs from the one that a checkpoint was trained with, as a run records them.

    Those that change no result are left out; one that was not accepted is refused. saved: the run's config.yaml, which
    is believed where the checkpoint is of an older version, and does not say.
    """
    state = read_state_file(place)
    found = config.differences(state.get("config") or saved.flatten())
    found = {name: values for name, values in found.items() if name not in WITHOUT_EFFECT}
    refused = {name: values for name, values in found.items() if name not in accepted}
    if refused:
        before = ", ".join(f"{name} {value}" for name, (value, _) in refused.items())
        now = ", ".join(str(value) for _, value in refused.values())
        raise ConfigError(
            f"{str(place)!r} was trained with {before} up to step {state['step']}, config.yaml now says {now}; restore "
            "it, or add --accept-changes"
        )
    return [
        {"step": state["step"], "field": name, "before": before, "after": after}
        for name, (before, after) in found.items()
    ]


def refuse_other_model(place: Path, config: RunConfig) -> None:
    """Refuse a checkpoint that does not fit a config before its model is made, which takes memory and time."""
    file = inside(place, "model.safetensors")
    if file.exists():
        refuse_other_shapes(file, SomeLM(config.model, config.gravity, device="meta").state_dict())


def load_model(place: Path, model: SomeLM) -> dict[str, Any]:
    """Load the trained parameters and key stores into a model with the same experts. Returns the checkpoint's state."""
    state = read_state(place)
    saved = read_held(place / "model.safetensors", model.state_dict(), CURE)
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
    place: Path, model: SomeLM, optimizer: torch.optim.Optimizer, extra: dict[str, Tensor], *, steps: int
) -> dict[str, Tensor]:
    """Restore the optimizer; return the tensors that were saved beside it, which must be like `extra`.

    steps: how many were made; before the first there is nothing to remember.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and steps}
    one, held = torch.zeros((), dtype=torch.float32), model.state_dict()
    wanted = {f"{name}/{part}": one if part == "step" else held[name] for name in trained for part in MEMORY}
    saved = read_held(place / "optimizer.safetensors", wanted | extra, CURE)
    for name, parameter in trained.items():
        memory = {part: hold_like(saved[f"{name}/{part}"], parameter) for part in MEMORY}
        if not (0 <= memory["step"] <= steps and bool((local(memory["exp_avg_sq"]) >= 0).all())):
            raise ConfigError(f"{str(place / 'optimizer.safetensors')!r} holds what no optimizer remembers; {CURE}")
        optimizer.state[parameter] = memory
    return {name: saved[name] for name in extra}

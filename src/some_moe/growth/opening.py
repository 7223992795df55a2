"""A run with branches: what it says of its base, whether that is still the same, and its model."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from some_moe.config import ConfigError
from some_moe.growth.context import Context
from some_moe.growth.library import BranchedLibrary, BranchRouter, widen
from some_moe.model.transformer import SomeLM
from some_moe.system.reading import read_bytes
from some_moe.system.records import Grown
from some_moe.training.run_folder import RunFolder, read_state_file
from some_moe.training.runs import Run, load

GROWN = "grown.json"
VERSION = 2  # of grown.json; branches of version 1 took the place of their base, and these are added to it


def digest_base(run: Run) -> str:
    """What a branch depends on: the weights, keys, frozen experts and sizes of its base, and its vocabulary."""
    state = read_state_file(run.checkpoint)
    words = hashlib.sha256(read_bytes(run.path / "tokenizer.json")).hexdigest()
    sizes = run.config.model.model_dump(mode="json")
    parts = [state["hashes"]["model.safetensors"], state["libraries"], words, sizes]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_grown(path: Path) -> Grown:
    """grown.json of a run with branches; any other run is refused."""
    found = RunFolder(path).read_object(GROWN)
    if found is None:
        raise ConfigError(f"{str(path)!r} has no branches; give a run that `some grow` or `some merge` made")
    grown = Grown.model_validate(found)
    if grown.format_version != VERSION:
        raise ConfigError(
            f"{str(path)!r} has branches of format {grown.format_version}, and this program reads format {VERSION}; "
            "grow them again, or use the version of some-moe that made them"
        )
    return grown


def open_base(path: Path, grown: Grown, base: str | Path | None = None, device: str = "cpu") -> Run:
    """The base of the run at `path`, looked for where it was or at `base`; another one is refused."""
    if base is None and os.path.isabs(grown.base):
        raise ConfigError(f"{str(path / GROWN)!r} names its base by an absolute path; give the folder with --base")
    place = Path(path / grown.base if base is None else base)
    if not RunFolder(place).exists():
        where = os.path.normpath(place)
        raise ConfigError(f"the base of {str(path)!r} is not at {where!r}; give its folder with --base")
    if (place / GROWN).exists():
        raise ConfigError(f"{os.path.normpath(place)!r} has branches of its own, so it is no base; give another --base")
    run = load(place, checkpoint=f"step-{grown.base_step}", device=device)
    if digest_base(run) != grown.base_digest:
        raise ConfigError(
            f"{os.path.normpath(place)!r} is not the base that {str(path)!r} was grown on, or was changed since; "
            "restore it, or give the right one with --base"
        )
    return run


def open_branches(path: Path, **options: Any) -> SomeLM | None:
    """The model of a run that was grown or merged, its base's part loaded; None for any other run."""
    return open_model(path, **options) if (path / GROWN).exists() else None


def open_model(
    path: Path,
    *,
    device: str = "cpu",
    base: str | Path | None = None,
    favour: float | None = None,
    learns: bool = False,
) -> SomeLM:
    """The model of a run with branches, its base's part loaded: its own comes from a checkpoint.

    favour: added to the branches' selection bias when they are loaded (default: what grown.json says).
    learns: the branches are to be trained further, at no favour.
    """
    grown = read_grown(path)
    if learns and grown.merged:
        raise ConfigError(f"{str(path)!r} was merged, and is not trained; grow a branch on its base and merge that")
    model = widen(open_base(path, grown, base, device).model, grown.branches)
    if learns:
        return let_learn(model)
    offset = grown.favour if favour is None else favour
    refuse_favour(offset)

    def lean(loaded: torch.nn.Module, _: object) -> None:
        assert isinstance(loaded, SomeLM)
        set_favour(loaded, offset)

    model.register_load_state_dict_post_hook(lean)  # type: ignore[no-untyped-call]
    return model


def refuse_favour(favour: float) -> None:
    if not math.isfinite(favour):
        raise ConfigError(f"--favour {favour} is no number; use one such as -1 or 0.5")


def let_learn(model: SomeLM) -> SomeLM:
    """Let the branches of a widened model learn, and nothing else."""
    model.train()
    for library in model.libraries:
        assert isinstance(library, BranchedLibrary)
        library.branches.requires_grad_(True)
    return model


def move_favour(model: SomeLM, offset: float) -> list[tuple[nn.Module, str, Tensor]]:
    """What says how readily branches are chosen, by so much more: owner, name and value of each.

    That is the selection bias of a branch's experts; of a branch that looks back it is its prior.
    """
    moved = []
    for layer in model.layers:
        router = layer.key_router
        assert isinstance(router, BranchRouter)
        more = torch.full_like(router.state.bias, offset)
        for place in (slice(router.num_old), *router.looking):
            more[place] = 0
        moved.append((router.state, "bias", router.state.bias + more))
    speaking = model.context.speaking if isinstance(model.context, Context) else ()
    return [*moved, *((branch, "prior", branch.get_buffer("prior") + offset) for branch in speaking)]


@torch.no_grad()
def set_favour(model: SomeLM, offset: float) -> None:
    """Choose branches more readily, or less."""
    for owner, name, value in move_favour(model, offset):
        getattr(owner, name).copy_(value)

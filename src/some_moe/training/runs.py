"""A finished or living run, opened again: its config, tokenizer and model."""

from dataclasses import dataclass
from pathlib import Path

import torch

from some_moe.config import ConfigError, RunConfig
from some_moe.data.tokenizer import Tokenizer
from some_moe.model.transformer import SomeLM
from some_moe.training.checkpoint import list_checkpoints, load_model, read_state
from some_moe.training.recorder import RunFolder


@dataclass(frozen=True)
class Run:
    """What `load` returns."""

    path: Path
    config: RunConfig
    tokenizer: Tokenizer
    model: SomeLM
    step: int


def load(path: str | Path, *, checkpoint: str = "best", device: str = "cpu") -> Run:
    """Open a run folder with the model of its best, last or a named checkpoint (step-N), ready to use."""
    folder = RunFolder(path)
    config = folder.read_config()
    place = choose_checkpoint(folder, checkpoint)
    state = read_state(place)
    model = SomeLM(config.model, config.gravity, seed=config.train.seed, device=device)
    load_model(place, model, state)
    model.eval()
    return Run(folder.path, config, folder.read_tokenizer(), model, int(state["step"]))


def choose_checkpoint(folder: RunFolder, which: str) -> Path:
    """Find the checkpoint called best, last or step-N."""
    found = list_checkpoints(folder.checkpoints)
    if not found:
        raise ConfigError(f"{str(folder)!r} has no checkpoint yet; wait for its first one, or train it")
    if which == "last":
        return found[-1]
    if which == "best":
        best = read_state(found[-1])["best_step"]
        return next((place for place in found if place.name == f"step-{best}"), found[-1])
    for place in found:
        if place.name == which:
            return place
    names = ", ".join(place.name for place in found)
    raise ConfigError(f"{str(folder)!r} has no checkpoint {which!r}; it has {names} (or say best or last)")


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint folder, or the best checkpoint of a run folder."""
    path = Path(path)
    if (path / "state.json").is_file():
        return path
    folder = RunFolder(path)
    folder.read_config()
    return choose_checkpoint(folder, "best")


def find_run(path: str | Path) -> tuple[RunFolder, Path | None]:
    """What to resume: a run folder, and its checkpoint where `path` is one."""
    path = Path(path)
    is_checkpoint = (path / "state.json").is_file()
    folder = RunFolder(path.parent.parent if is_checkpoint else path)
    folder.read_config()  # refuses what is no run
    return folder, path if is_checkpoint else None


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"

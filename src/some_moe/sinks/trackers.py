"""The same figures for Weights & Biases and for trackio, which take the same calls: train.wandb, train.trackio.

Where they go is said as their users know it: WANDB_PROJECT, WANDB_MODE=offline, WANDB_ENTITY; TRACKIO_DIR.
"""

import hashlib
import os
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

from some_moe.config import ConfigError, RunConfig
from some_moe.sinks.board import Board, flatten_figures
from some_moe.system.files import inside, write_whole
from some_moe.system.reading import read_text

PROJECT = "some-moe"
ID = "tracking-id"  # in a run folder: a run that is resumed goes on in the same curve


class Sink(Protocol):
    def add(self, figures: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Tracker:
    """One run of a tracker, begun at the first record and gone on with where the run is resumed."""

    def __init__(self, package: str, path: Path, config: RunConfig) -> None:
        self.package, self.path, self.config = package, path, config
        self.begun = self.lost = False
        try:
            self.module = import_module(package)
        except ImportError:
            raise ConfigError(f"train.{package} needs the {package} package; run pip install {package}") from None

    def add(self, figures: dict[str, Any]) -> None:
        if not self.begun:
            self.begin()
        if not self.lost:
            try:
                self.module.log(flatten_figures(figures), step=figures["step"])
            except Exception as error:  # the run itself goes on: its folder has everything
                self.lost = True
                print(f"{self.package} has failed ({error}); training goes on without it", file=sys.stderr)

    def begin(self) -> None:
        settings = self.config.flatten()
        own = f"{self.config.name}-{read_id(self.path, str(settings))}"
        named: dict[str, Any] = {"project": PROJECT, "name": own}
        if self.package == "wandb":
            os.environ.setdefault("WANDB_SILENT", "true")
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            named = {"project": project, "name": self.config.name, "id": own.rsplit("-", 1)[1], "dir": str(self.path)}
        try:
            with redirect_stdout(StringIO()):  # they greet
                self.module.init(config=settings, resume="allow", **named)
        except Exception as error:
            said = " ".join(str(error).split())[:200] or type(error).__name__
            cure = "run wandb login, or set WANDB_MODE=offline" if self.package == "wandb" else "leave it out"
            raise ConfigError(f"train.{self.package} cannot begin ({said.rstrip('.')}); {cure}") from None
        self.begun = True

    def close(self) -> None:
        if self.begun:
            self.begun = False
            with suppress(Exception), redirect_stdout(StringIO()):  # the run itself is whole in its folder
                self.module.finish()


def read_id(path: Path, about: str) -> str:
    """Letters that a run folder is known by, made when they are first asked for."""
    place = inside(path, ID)
    with suppress(OSError, ConfigError):
        found = read_text(place, 64).strip()
        if found.isalnum():
            return found
    fresh = hashlib.sha256(f"{about} {os.urandom(16).hex()}".encode()).hexdigest()[:12]
    write_whole(place, fresh)
    return fresh


def open_sinks(path: Path, config: RunConfig) -> list[Sink]:
    """What a run's figures go to besides its folder; a package that is missing is refused now."""
    train = config.train
    sinks: list[Sink] = [Board(path / "tensorboard")] if train.tensorboard else []
    return sinks + [Tracker(name, path, config) for name in ("wandb", "trackio") if getattr(train, name)]

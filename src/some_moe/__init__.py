"""SoME: Self-Organizing Mixtures of Experts. The public names load torch only when they are used."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from some_moe.api import train
    from some_moe.config import DataConfig, GravityConfig, ModelConfig, RunConfig, TrainConfig
    from some_moe.fast import accelerate
    from some_moe.glass.adaptation import adapt
    from some_moe.glass.api import analyze, report, trace
    from some_moe.growth.api import grow, merge, prune
    from some_moe.hf.exporting import export
    from some_moe.hf.grafting import graft
    from some_moe.model.layer import SomeLayer
    from some_moe.model.transformer import SomeLM
    from some_moe.training.runs import load

_HOMES = {
    "SomeLM": "some_moe.model.transformer",
    "SomeLayer": "some_moe.model.layer",
    "accelerate": "some_moe.fast",
    "load": "some_moe.training.runs",
    "adapt": "some_moe.glass.adaptation",
    "analyze": "some_moe.glass.api",
    "trace": "some_moe.glass.api",
    "report": "some_moe.glass.api",
    "train": "some_moe.api",
    "grow": "some_moe.growth.api",
    "merge": "some_moe.growth.api",
    "prune": "some_moe.growth.api",
    "export": "some_moe.hf.exporting",
    "graft": "some_moe.hf.grafting",
    "ModelConfig": "some_moe.config",
    "GravityConfig": "some_moe.config",
    "DataConfig": "some_moe.config",
    "TrainConfig": "some_moe.config",
    "RunConfig": "some_moe.config",
}
__all__ = [
    "DataConfig",
    "GravityConfig",
    "ModelConfig",
    "RunConfig",
    "SomeLM",
    "SomeLayer",
    "TrainConfig",
    "accelerate",
    "adapt",
    "analyze",
    "export",
    "graft",
    "grow",
    "load",
    "merge",
    "prune",
    "report",
    "trace",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'some_moe' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)

"""Every setting of a run: frozen, validated once, saved with the run. Imports no torch.

Five rooms: `ModelConfig` (what is computed), `GravityConfig` (how the keys move), `DataConfig` (what is
read), `TrainConfig` (how it is learned), and `RunConfig`, which holds one of each.
"""

from some_moe.config.base import Config, did_you_mean
from some_moe.config.gravity import GravityConfig, check_gravity_fits
from some_moe.config.model import ModelConfig
from some_moe.config.run import FORMAT_VERSION, RunConfig
from some_moe.config.training import DataConfig, TrainConfig
from some_moe.errors import ConfigError, TrainingStoppedError

__all__ = [
    "FORMAT_VERSION",
    "Config",
    "ConfigError",
    "DataConfig",
    "GravityConfig",
    "ModelConfig",
    "RunConfig",
    "TrainConfig",
    "TrainingStoppedError",
    "check_gravity_fits",
    "did_you_mean",
]

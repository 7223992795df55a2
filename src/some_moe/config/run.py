"""One run: a room of each kind, and what must hold between them."""

import math
from typing import Self

from pydantic import model_validator

from some_moe.config.base import Config, ConfigError, Count
from some_moe.config.gravity import GravityConfig, check_gravity_fits
from some_moe.config.model import ModelConfig
from some_moe.config.training import DataConfig, TrainConfig

FORMAT_VERSION = 1


class RunConfig(Config):
    """One run: everything that is needed to repeat it."""

    name: str = "run"
    """Name of the run, and of its folder."""
    experiment: str | None = None
    """The registered experiment that it repeats, if any."""
    model: ModelConfig = ModelConfig()
    gravity: GravityConfig = GravityConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    format_version: Count = FORMAT_VERSION
    """Version of this file's format."""

    @property
    def rows_a_step(self) -> int:
        """Rows of one optimizer step: a batch, or as many batches as make global_batch_tokens."""
        rows = self.data.batch_size
        return rows * max(1, math.ceil((self.train.global_batch_tokens or 0) / (rows * self.data.seq_len)))

    @model_validator(mode="after")
    def _check_rooms_agree(self) -> Self:
        if self.format_version > FORMAT_VERSION:
            raise ConfigError(
                f"format_version {self.format_version} is newer than this program's {FORMAT_VERSION}; update some-moe"
            )
        check_gravity_fits(self.model, self.gravity)
        return self

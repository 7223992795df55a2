"""One run: a room of each kind, and what must hold between them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from some_moe.config.base import Config, Count
from some_moe.config.gravity import GravityConfig, find_misfits
from some_moe.config.model import ModelConfig
from some_moe.config.training import DataConfig, TrainConfig

FORMAT_VERSION = 1
EXECUTION = frozenset({
    "model.expert_dtype", "model.residual_dtype", "train.device", "train.precision", "train.fast", "train.compile",
    "train.kernel", "train.checkpoint_activations", "train.expert_parallel", "train.fsdp",
})  # fmt: skip
"""Fields that say how a machine computes a run, not what is computed."""
HOUSEKEEPING = frozenset({
    "train.log_every", "train.eval_every", "train.save_every", "train.keep_last", "train.checkpoints",
    "train.snapshot_every", "train.sample_every", "train.sample_prompt", "train.sample_tokens", "train.story_losses",
    "train.tensorboard", "train.wandb", "train.trackio", "data.workers", "data.prefetch",
})  # fmt: skip
"""Fields that say what is written down and how often."""
ROUNDING = frozenset({"model.expert_dtype", "model.residual_dtype", "train.precision", "train.eval_every"})
"""Those of both that decide the last digits, or which step is the best."""
# A digest knows the data, wherever it lies; a run's own tokenizer is used, whatever the config says.
WITHOUT_EFFECT = (EXECUTION | HOUSEKEEPING) - ROUNDING | {
    "name", "experiment", "format_version", "train.deterministic", "data.source", "data.tokenizer",
}  # fmt: skip
"""Fields that may change within a run: they change no result."""
SETTLED = ("model.expert_dtype", "data.long")  # `auto` until a run begins
LENGTH = frozenset({"train.epochs", "train.max_steps"})


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

    def count_steps(self, num_rows: int) -> int:
        """Optimizer steps of a run over so many training rows; the last partial step of an epoch is dropped."""
        steps = num_rows // self.rows_a_step * self.train.epochs
        return min(steps, self.train.max_steps or steps)

    @property
    def splits_long(self) -> bool:
        """Whether a new run splits what is longer than a row: own texts, unless data.long says otherwise."""
        own = self.data.source != "stories" and self.experiment is None
        return self.data.long == "split" or (self.data.long == "auto" and own)

    @property
    def known_steps(self) -> int | None:
        """Optimizer steps where the config alone tells; None where the data must be read."""
        num_rows = self.data.train_subset_size  # one story is one row, unless they are packed or split
        if num_rows is None or self.data.batching == "packed" or self.splits_long:
            return self.train.max_steps
        return self.count_steps(num_rows)

    def differences(self, before: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The fields that had another value in `before`, a flattened config: {name: (before, now)}."""
        now = self.flatten()
        return {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}

    def settle_as(self, saved: "RunConfig") -> "RunConfig":
        """The same, with what was left to be settled when a run begins as it was settled in `saved`."""
        here, there = self.flatten(), saved.flatten()
        return self.override({name: there[name] for name in SETTLED if here[name] == "auto"})

    def find_problems(self) -> Iterator[str]:
        name, version = self.name, self.format_version
        if not 0 < len(name.encode()) <= 200 or name in (".", "..") or set(name) & set("/\\\n\t"):
            yield f"name {name[:80]!r} cannot be a folder's; use 1 to 200 letters, without / and line breaks"
        if version > FORMAT_VERSION:
            yield f"format_version {version} is newer than this program's {FORMAT_VERSION}; update some-moe"
        yield from find_misfits(self.model, self.gravity)

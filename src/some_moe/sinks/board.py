"""The same figures for TensorBoard, for those who like it. Optional: train.tensorboard."""

from pathlib import Path
from typing import Any, cast

from some_moe.config import ConfigError


def flatten_figures(figures: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by name, those of its layers as "layer 0/gini"; the step is left out."""
    usage = ("gini", "entropy_bits", "experts_used")
    layers = {f"layer {a['layer']}/{name}": a[name] for a in figures.get("layers", ()) for name in usage}
    return {
        name: value
        for name, value in (figures | layers).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }


class Board:
    """Writes the numbers of each record as scalars."""

    def __init__(self, path: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("train.tensorboard needs the tensorboard package; run pip install tensorboard") from None
        # The writer is made at the first record: a run that is refused leaves nothing behind.
        self.path, self.make_writer, self.writer = path, cast(Any, SummaryWriter), cast(Any, None)

    def add(self, figures: dict[str, Any]) -> None:
        step = figures["step"]
        if self.writer is None:
            self.writer = self.make_writer(str(self.path), purge_step=step)
        for name, value in flatten_figures(figures).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

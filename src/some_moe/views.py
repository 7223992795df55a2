"""What an open run shows of itself: words and a curve, the experts of a text, its keys, who does the work.

The one place that brings `glass` to a run, when it is asked for.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from some_moe.errors import in_a_sentence
from some_moe.sinks.words import describe_run, draw_run

if TYPE_CHECKING:
    from torch import Tensor

    from some_moe.glass.inspect.traces import Trace
    from some_moe.glass.notebook import LayerKeys, Usage
    from some_moe.training.runs import Run

USAGE_TOKENS = 20_000  # of a split, unless more are asked for: a few seconds for a small model


class Views:
    """The looking part of a `Run`."""

    def trace(self, text: str, layers: Sequence[int] | None = None) -> "Trace":
        """Let the model read a text once: the experts of every token, in these SoME layers (default: all)."""
        from some_moe.glass.inspect.traces import trace

        with in_a_sentence():
            return trace(cast("Run", self), text, layers)

    def keys(self, layer: int) -> "LayerKeys":
        """Where the experts of a SoME layer are found, and what gravity remembers of each."""
        from some_moe.glass.notebook import read_keys

        with in_a_sentence():
            return read_keys(cast("Run", self), layer)

    def usage(self, text: str | None = None, *, split: str = "valid", max_tokens: int = USAGE_TOKENS) -> "Usage":
        """How the experts share the work on a text, or on the first tokens of a split of the run's own data."""
        from some_moe.glass.notebook import measure_usage

        with in_a_sentence():
            return measure_usage(cast("Run", self), text, split=split, max_tokens=max_tokens)

    def tokens(self, text: str) -> "Tensor":
        """bos and a text's ids (1, T), where the model is: what `run.model` and `some_moe.hooks` take."""
        import torch

        from some_moe.glass.inspect.traces import encode_text

        run = cast("Run", self)
        return torch.tensor([encode_text(run, text)], device=run.model.head.weight.device)

    def __repr__(self) -> str:
        """Name, state, the losses of each epoch, and where everything is."""
        run = cast("Run", self)
        return describe_run(run.config.name, run.result, run.path)

    def _repr_html_(self) -> str:
        """The same for a notebook, with the training loss as a line."""
        lines = cast("Run", self).metrics
        return draw_run(repr(self), [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line])

"""Linear maps that can read their numbers from copies in another type, made for a whole model at once.

Shapes: I inputs, O outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Copies = tuple[Tensor, Tensor]  # weight (O, I), by which its gradient goes back, and bias (O,), by which none does


class BiasGradient(torch.autograd.Function):
    """y (…, O), which biases of O numbers in all are part of already: autograd learns of them here."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *biases: Tensor) -> Tensor:
        ctx.sizes = [len(bias) for bias in biases]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        # Added up and left in float32: a bias's gradient is small enough not to be rounded on its way.
        sums = grad.flatten(0, -2).sum(0, dtype=torch.float32)
        return grad, *sums.split_with_sizes(ctx.sizes)


def cut_bias(layer: nn.Linear) -> Copies:
    """What the layer computes by: its weight, and its bias, which is cut off for autograd."""
    copies = layer.copies if isinstance(layer, Linear) else None
    return copies or (layer.weight, layer.bias.detach())


def multiply(x: Tensor, layer: nn.Linear) -> Tensor:
    """layer(x), whose bias is cut off for autograd: whoever takes it makes the bias's gradient."""
    return F.linear(x, *cut_bias(layer))


class Linear(nn.Linear):
    """A linear map with a bias. Where it has copies it computes by them, and its own parameters get the gradients."""

    def __init__(self, num_inputs: int, num_outputs: int, device: torch.device | None = None) -> None:
        super().__init__(num_inputs, num_outputs, device=device)
        self.copies: Copies | None = None

    @property
    def maps(self) -> tuple[nn.Linear, ...]:
        """The maps that the copies are of."""
        return (self,)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, I) → (…, O)."""
        if self.copies is None:
            return super().forward(x)
        y: Tensor = BiasGradient.apply(multiply(x, self), self.bias)  # type: ignore[no-untyped-call]
        return y

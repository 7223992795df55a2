"""Linear layers that can compute with casts of their parameters, made for a whole model at once.

Shapes: I inputs, O outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Casts = tuple[Tensor, Tensor]  # weight (O, I), with a gradient, and bias (O,), detached


class AttachBias(torch.autograd.Function):
    """y (…, O), to which detached biases, of O elements in all, were added: here they get their gradient, dbias."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *biases: Tensor) -> Tensor:
        ctx.sizes = [len(bias) for bias in biases]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        # In float32 and left so: dbias is small enough not to be rounded on its way.
        sums = grad.flatten(0, -2).sum(0, dtype=torch.float32)
        return grad, *sums.split_with_sizes(ctx.sizes)


def detach_bias(layer: nn.Linear) -> Casts:
    """What the layer computes with: its weight, or the cast of it, and its bias, detached."""
    copies = layer.copies if isinstance(layer, Linear) else None
    return copies or (layer.weight, layer.bias.detach())


def linear_detached(x: Tensor, layer: nn.Linear) -> Tensor:
    """layer(x) with a detached bias: dbias is left to the operation that takes the output."""
    return F.linear(x, *detach_bias(layer))


class Linear(nn.Linear):
    """nn.Linear with a bias. Where it has casts (`copies`) it computes with them; its parameters get the gradients."""

    def __init__(self, num_inputs: int, num_outputs: int, device: torch.device | None = None) -> None:
        super().__init__(num_inputs, num_outputs, device=device)
        self.copies: Casts | None = None

    @property
    def maps(self) -> tuple[nn.Linear, ...]:
        """The layers that the casts are of."""
        return (self,)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, I) → (…, O)."""
        if self.copies is None:
            return super().forward(x)
        y: Tensor = AttachBias.apply(linear_detached(x, self), self.bias)  # type: ignore[no-untyped-call]
        return y

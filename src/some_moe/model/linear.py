"""Layers that compute in the type of their input, whatever type their parameters are kept in."""

import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.experts.weights import activate
from some_moe.precision import at_least_float32


class Linear(nn.Linear):
    """A linear map with a bias."""

    def forward(self, x: Tensor) -> Tensor:
        """x (…, I) → (…, O)."""
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """LayerNorm, computed in float32 or better."""

    def forward(self, x: Tensor) -> Tensor:
        """x (…, D) → (…, D)."""
        wide = at_least_float32(x)
        weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        return F.layer_norm(wide, self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class DenseFFN(nn.Module):
    """A trained network d → width → d with GELU or SwiGLU: the dense baseline, the shared expert, the query network."""

    def __init__(self, d_model: int, width: int, activation: str = "gelu") -> None:
        super().__init__()
        self.gated = activation == "swiglu"
        self.expand = Linear(d_model, 2 * width if self.gated else width)
        self.project = Linear(width, d_model)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(activate(self.expand(x), gated=self.gated))
        return y

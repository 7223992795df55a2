"""What the kernels compute with: the stacked weights of one layer's experts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LoraWeights:
    """Trained low-rank updates of both matrices: W + out @ in (E experts, rank R)."""

    up_in: Tensor  # (E, R, D)
    up_out: Tensor  # (E, F, R)
    down_in: Tensor  # (E, R, F)
    down_out: Tensor  # (E, D, R)

    def to(self, dtype: torch.dtype) -> "LoraWeights":
        return LoraWeights(  # name by name, as torch's compiler can follow it
            up_in=self.up_in.to(dtype),
            up_out=self.up_out.to(dtype),
            down_in=self.down_in.to(dtype),
            down_out=self.down_out.to(dtype),
        )

    def unbind(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """One (up_in, up_out, down_in, down_out) per expert."""
        return list(zip(self.up_in, self.up_out, self.down_in, self.down_out, strict=True))


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """E experts, each x ↦ down @ (gain · gelu(up @ x + up_bias)) + down_bias, as one stack per matrix.

    Gated ones (SwiGLU) have up-projections twice as high, and silu(upper half) · lower half in the place of GELU.
    """

    up: Tensor  # (E, F, D); gated (E, 2F, D)
    up_bias: Tensor  # (E, F); gated (E, 2F)
    down: Tensor | None = None  # (E, D, F); None: the combined hidden activations are the output
    down_bias: Tensor | None = None  # (E, D)
    gain: Tensor | None = None  # (E, F)
    lora: LoraWeights | None = None

    @property
    def num_experts(self) -> int:
        return self.up.shape[0]

    @property
    def gated(self) -> bool:
        return self.down is not None and self.up.shape[1] == 2 * self.down.shape[2]

    @property
    def is_frozen(self) -> bool:
        """No weight needs a gradient, so backward may skip them all."""
        return self.gain is None and self.lora is None and not self.up.requires_grad


def activate(pre: Tensor, *, gated: bool) -> Tensor:
    """GELU of pre-activations (…, F); or SwiGLU of gates and what they let through, (…, 2F) → (…, F)."""
    if not gated:
        return F.gelu(pre)
    gate, linear = pre.chunk(2, dim=-1)
    return F.silu(gate) * linear

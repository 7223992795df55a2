"""The path for few tokens, as generation has them: each slot gathers its expert's weights, for one batched GEMM.

No permutation and no host sync. Shapes: N tokens, K experts each, S = N·K slots.
"""

import torch
from torch import Tensor

from some_moe.experts.weights import ExpertWeights, activate

FEW_SLOTS = 32  # for more, permuting tokens costs less than gathering weights


def can_mix(experts: Tensor) -> bool:
    """Whether this path is the better one: no gradient is needed, and slots are few."""
    return experts.numel() <= FEW_SLOTS and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def mix_experts(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """See `some_moe.experts`."""
    chosen = experts.reshape(-1)

    def multiply(stack: Tensor, rows: Tensor) -> Tensor:
        """Each of rows (S, W) by its expert's matrix."""
        return torch.bmm(take(stack), rows[:, :, None]).squeeze(-1)

    def take(stack: Tensor) -> Tensor:
        return stack.index_select(0, chosen).to(x.dtype)

    rows = x.repeat_interleave(experts.shape[1], dim=0)
    hidden = multiply(weights.up, rows) + take(weights.up_bias)
    if weights.lora is not None:
        hidden = hidden + multiply(weights.lora.up_out, multiply(weights.lora.up_in, rows))
    hidden = activate(hidden, gated=weights.gated)
    if weights.gain is not None:
        hidden = hidden * take(weights.gain)
    out = hidden
    if weights.down is not None and weights.down_bias is not None:
        out = multiply(weights.down, hidden) + take(weights.down_bias)
        if weights.lora is not None:
            out = out + multiply(weights.lora.down_out, multiply(weights.lora.down_in, hidden))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (gates.to(wide)[:, :, None] * out.view(*experts.shape, -1)).sum(1).to(x.dtype)

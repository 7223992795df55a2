"""The obvious version, in any precision: every other kernel must equal it."""

from torch import Tensor

from some_moe.experts.weights import ExpertWeights, activate


def run_expert(x: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    """Return one expert's output for every row of x."""
    up, up_bias = weights.up[expert].to(x.dtype), weights.up_bias[expert].to(x.dtype)
    if weights.lora is not None:
        lora = weights.lora.to(x.dtype)
        up = up + lora.up_out[expert] @ lora.up_in[expert]
    hidden = activate(x @ up.T + up_bias, gated=weights.gated)
    if weights.gain is not None:
        hidden = hidden * weights.gain[expert].to(x.dtype)
    if weights.down is None or weights.down_bias is None:
        return hidden
    down, down_bias = weights.down[expert].to(x.dtype), weights.down_bias[expert].to(x.dtype)
    if weights.lora is not None:
        down = down + lora.down_out[expert] @ lora.down_in[expert]
    return hidden @ down.T + down_bias


def mix_experts(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """Add up gate · expert(x) over each token's experts, one expert after another."""
    gates = gates.to(x.dtype)
    width = weights.up.shape[1] if weights.down is None else weights.down.shape[1]
    y = x.new_zeros(x.shape[0], width)
    for expert in range(weights.num_experts):
        token, slot = (experts == expert).nonzero(as_tuple=True)
        y = y.index_add(0, token, gates[token, slot, None] * run_expert(x[token], weights, expert))
    return y

"""The experts' arithmetic: one signature, an obvious reference and faster paths that equal it.

mix_experts(x_ND, experts_NK, gates_NK, weights) -> y_ND

N tokens of width D, K chosen experts each; y = Σ_k gate_k · expert_k(x), and with no down-projection
(`weights.down is None`) the mixed hidden activations (N, F) instead.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from some_moe.config import ConfigError
from some_moe.kernels import cpu, grouped, reference
from some_moe.kernels.weights import ExpertWeights, LoraWeights

__all__ = ["KERNELS", "ExpertWeights", "LoraWeights", "MixExperts", "choose_kernel", "has_triton"]

MixExperts = Callable[[Tensor, Tensor, Tensor, ExpertWeights], Tensor]


_TRITON = find_spec("triton") is not None and torch.cuda.is_available()


def has_triton() -> bool:
    """Whether Triton kernels can run here."""
    return _TRITON


def mix_triton(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """Frozen experts by the fused kernels; trained ones have weight gradients and take the grouped path."""
    from some_moe.kernels import fused

    if not fused.can_mix(x, weights):
        return grouped.mix_experts(x, experts, gates, weights)
    return fused.mix_experts(x, experts, gates, weights)


def mix_auto(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """The fastest path that takes these weights on this device."""
    if x.is_cuda and has_triton():
        from some_moe.kernels import fused

        if fused.can_mix(x, weights):
            return fused.mix_experts(x, experts, gates, weights)
    if x.is_cuda and grouped.can_mix(x, weights):
        return grouped.mix_experts(x, experts, gates, weights)
    y: Tensor = cpu.mix_experts(x, experts, gates, weights)
    return y


KERNELS: dict[str, MixExperts] = {
    "auto": mix_auto,
    "reference": reference.mix_experts,
    "cpu": cpu.mix_experts,
    "grouped": grouped.mix_experts,
    "triton": mix_triton,
}


def choose_kernel(name: str) -> MixExperts:
    """Return the implementation called `name`."""
    if name not in KERNELS:
        raise ValueError(f"kernel {name!r} is unknown; choose one of {', '.join(KERNELS)}")
    if name == "triton" and not has_triton():
        raise ConfigError("train.kernel triton needs a CUDA GPU and the triton package; use auto or grouped")
    return KERNELS[name]

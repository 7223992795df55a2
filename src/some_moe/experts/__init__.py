"""The experts' arithmetic: one signature, an obvious reference and faster paths that equal it.

mix_experts(x_ND, experts_NK, gates_NK, weights) -> y_ND

N tokens of width D, K chosen experts each; y = Σ_k gate_k · expert_k(x), and with no down-projection
(`weights.down is None`) the mixed hidden activations (N, F) instead. Triton's path is in `some_moe.fast`.
"""

import sys
from typing import Protocol

import torch
from torch import Tensor

from some_moe.experts import cpu, gathered, grouped, reference
from some_moe.experts.weights import ExpertWeights, LoraWeights

__all__ = ["KERNELS", "ExpertWeights", "LoraWeights", "MixExperts", "choose_kernel", "mix_cpu", "mix_reference"]


class MixExperts(Protocol):
    """The signature that all paths share."""

    def __call__(self, x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor: ...


def may_be_compiled() -> bool:
    """Whether the caller may be part of a compiled graph: never before torch's compiler is loaded."""
    # While a graph is made the first is a constant, and no guard on the modules is needed.
    return torch.compiler.is_compiling() or "torch._dynamo" in sys.modules


def mix_cpu(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """The path for a CPU, which takes any weights; a compiled graph ends before it."""
    if may_be_compiled():
        from some_moe.experts import uncompiled

        return uncompiled.mix_cpu(x, experts, gates, weights)
    return cpu.mix_experts(x, experts, gates, weights)


def mix_reference(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """The obvious version; a compiled graph ends before it."""
    if may_be_compiled():
        from some_moe.experts import uncompiled

        return uncompiled.mix_reference(x, experts, gates, weights)
    return reference.mix_experts(x, experts, gates, weights)


def mix_auto(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """The fastest of these paths that takes these weights on this device."""
    if gathered.can_mix(experts):
        return gathered.mix_experts(x, experts, gates, weights)
    if x.is_cuda and grouped.can_mix(x, weights):
        return grouped.mix_experts(x, experts, gates, weights)
    return mix_cpu(x, experts, gates, weights)


KERNELS: dict[str, MixExperts] = {
    "auto": mix_auto,
    "reference": mix_reference,
    "cpu": mix_cpu,
    "grouped": grouped.mix_experts,
    "triton": mix_auto,  # the fast model has its own way, see fast/experts.py; until it takes over, this is as good
}


def choose_kernel(name: str) -> MixExperts:
    """Return the implementation called `name`."""
    if name not in KERNELS:
        raise ValueError(f"kernel {name!r} is unknown; choose one of {', '.join(KERNELS)}")
    return KERNELS[name]

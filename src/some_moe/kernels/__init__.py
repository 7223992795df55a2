"""The experts' arithmetic: one signature, an obvious reference and faster paths that equal it.

mix_experts(x_ND, experts_NK, gates_NK, weights) -> y_ND

N tokens of width D, K chosen experts each; y = Σ_k gate_k · expert_k(x), and with no down-projection
(`weights.down is None`) the mixed hidden activations (N, F) instead.
"""

from collections.abc import Callable

from torch import Tensor

from some_moe.kernels import cpu, reference
from some_moe.kernels.weights import ExpertWeights, LoraWeights

__all__ = ["ExpertWeights", "LoraWeights", "MixExperts", "choose_kernel"]

MixExperts = Callable[[Tensor, Tensor, Tensor, ExpertWeights], Tensor]

_KERNELS: dict[str, MixExperts] = {
    "auto": cpu.mix_experts,
    "reference": reference.mix_experts,
    "cpu": cpu.mix_experts,
}


def choose_kernel(name: str) -> MixExperts:
    """Return the implementation called `name`."""
    if name not in _KERNELS:
        raise ValueError(f"kernel {name!r} is unknown; choose one of {', '.join(_KERNELS)}")
    return _KERNELS[name]

"""The experts' arithmetic: one signature, an obvious reference and faster paths that equal it.

mix_experts(x_ND, experts_NK, gates_NK, weights, onto_ND=None) -> y_ND

N tokens of width D, K chosen experts each; y = Σ_k gate_k · expert_k(x), and with no down-projection
(`weights.down is None`) the mixed hidden activations (N, F) instead; y is added onto what is given.
"""

import sys
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.config import ConfigError
from some_moe.experts import cpu, gathered, grouped, reference
from some_moe.experts.weights import ExpertWeights, LoraWeights
from some_moe.fast.ops.linear import Linear, linear_detached

__all__ = [
    "KERNELS",
    "ExpertWeights",
    "Linear",
    "LoraWeights",
    "MixExperts",
    "activate",
    "choose_kernel",
    "fits_graph",
    "gelu_network",
    "has_triton",
    "linear_detached",
    "linear_gelu",
    "makes_bf16",
]


class MixExperts(Protocol):
    """The signature that all paths share."""

    def __call__(
        self, x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights, onto: Tensor | None = None
    ) -> Tensor: ...


_TRITON = find_spec("triton") is not None and torch.cuda.is_available()


def has_triton() -> bool:
    """Whether Triton kernels can run here."""
    return _TRITON


def activate(x: Tensor) -> Tensor:
    """GELU of x, element by element: the trained networks' activation."""
    if x.is_cuda and has_triton() and x.dtype == torch.bfloat16:
        from some_moe.fast.ops.gelu import gelu

        y: Tensor = gelu(x)
        return y
    return F.gelu(x)


def makes_bf16(x: Tensor) -> bool:
    """Whether a product of x is in bf16, where Triton kernels can take it."""
    if not x.is_cuda or not has_triton():
        return False
    cast = torch.is_autocast_enabled("cuda") and x.dtype != torch.float64
    return (torch.get_autocast_dtype("cuda") if cast else x.dtype) == torch.bfloat16


def linear_gelu(x: Tensor, layer: nn.Linear) -> Tensor:
    """GELU of layer(x). In bf16 on a GPU the kernel that makes the gradient of layer(x) also makes the bias's."""
    if layer.bias is None or not makes_bf16(x):
        return activate(layer(x))
    from some_moe.fast.ops.gelu import gelu

    y: Tensor = gelu(linear_detached(x, layer), layer.bias)
    return y


def gelu_network(x: Tensor, expand: nn.Linear, project: nn.Linear) -> Tensor:
    """project(gelu(expand(x))). In bf16 on a GPU and for many rows, GELU is part of the products beside it."""
    if makes_bf16(x):
        from some_moe.fast.ops import mlp

        if mlp.can_run(x, expand.weight):
            return mlp.run(x, expand, project)
    y: Tensor = project(linear_gelu(x, expand))
    return y


def may_be_compiled() -> bool:
    """Whether the caller may be part of a compiled graph: never before torch's compiler is loaded."""
    # While a graph is made the first is a constant, and no guard on the modules is needed.
    return torch.compiler.is_compiling() or "torch._dynamo" in sys.modules


def mix_cpu(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights, onto: Tensor | None = None) -> Tensor:
    """The path for a CPU, which takes any weights; a compiled graph ends before it."""
    if may_be_compiled():
        from some_moe.experts import uncompiled

        return uncompiled.mix_cpu(x, experts, gates, weights, onto)
    return cpu.mix_experts(x, experts, gates, weights, onto)


def mix_reference(
    x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights, onto: Tensor | None = None
) -> Tensor:
    """The obvious version; a compiled graph ends before it."""
    if may_be_compiled():
        from some_moe.experts import uncompiled

        return uncompiled.mix_reference(x, experts, gates, weights, onto)
    return reference.mix_experts(x, experts, gates, weights, onto)


def mix_triton(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights, onto: Tensor | None = None) -> Tensor:
    """Frozen experts by the fused kernels; trained ones have weight gradients and take the grouped path."""
    from some_moe.fast.ops import frozen_experts

    if frozen_experts.can_mix(x, weights):
        return frozen_experts.mix_experts(x, experts, gates, weights, onto)
    return grouped.mix_experts(x, experts, gates, weights, onto)


def mix_auto(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights, onto: Tensor | None = None) -> Tensor:
    """The fastest path that takes these weights on this device."""
    if gathered.can_mix(experts):
        return gathered.mix_experts(x, experts, gates, weights, onto)
    if x.is_cuda and has_triton():
        from some_moe.fast.ops import frozen_experts

        if frozen_experts.can_mix(x, weights):
            return frozen_experts.mix_experts(x, experts, gates, weights, onto)
    if x.is_cuda and grouped.can_mix(x, weights):
        return grouped.mix_experts(x, experts, gates, weights, onto)
    return mix_cpu(x, experts, gates, weights, onto)


KERNELS: dict[str, MixExperts] = {
    "auto": mix_auto,
    "reference": mix_reference,
    "cpu": mix_cpu,
    "grouped": grouped.mix_experts,
    "triton": mix_triton,
}


def fits_graph(mix: MixExperts, x: Tensor, weights: ExpertWeights) -> bool:
    """Whether a graph compiled for a GPU can hold this path. The loops over experts end it: their bounds are data."""
    if mix is not mix_auto:
        return mix not in (mix_cpu, mix_reference)
    if has_triton():
        from some_moe.fast.ops import frozen_experts

        if frozen_experts.can_mix(x, weights):
            return True
    return grouped.can_mix(x, weights)


def choose_kernel(name: str) -> MixExperts:
    """Return the implementation called `name`."""
    if name not in KERNELS:
        raise ValueError(f"kernel {name!r} is unknown; choose one of {', '.join(KERNELS)}")
    if name == "triton" and not has_triton():
        raise ConfigError("train.kernel triton needs a CUDA GPU and the triton package; use auto or grouped")
    return KERNELS[name]

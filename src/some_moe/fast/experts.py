"""The experts on a GPU: by Triton kernels, onto the residual stream; those without a down-projection by plain paths."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from some_moe import experts as plain
from some_moe.experts import ExpertWeights, gathered, grouped
from some_moe.fast.ops import frozen_experts, trained_experts
from some_moe.model.library import ExpertLibrary


def mix_onto(
    kernel: str, x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights, onto: Tensor | None = None
) -> Tensor:
    """onto (N, D), where it is given, + the gated sum of the experts' outputs; see `some_moe.experts`."""
    few = kernel == "auto" and gathered.can_mix(experts)
    if kernel in ("auto", "triton") and not few:
        if frozen_experts.can_mix(x, weights):
            return frozen_experts.mix_experts(x, experts, gates, weights, onto)
        if trained_experts.can_mix(x, weights):
            return trained_experts.mix_experts(x, experts, gates, weights, onto)
    y = plain.choose_kernel(kernel)(x, experts, gates, weights)
    return y if onto is None else onto + y


def choose_kernel(name: str) -> Callable[..., Tensor]:
    """`some_moe.experts.choose_kernel` with Triton's path: (x, experts, gates, weights, onto=None) → y."""
    return partial(mix_onto, name)


def fits_graph(library: ExpertLibrary, dtype: torch.dtype) -> bool:
    """Whether compiled code can hold this library, computing in dtype. Loops over experts end it: bounds are data."""
    if library.kernel in ("cpu", "reference"):
        return False
    if library.kernel == "grouped":
        return True
    x = library.up.new_empty(1, library.up.shape[2], dtype=dtype)
    return any(path.can_mix(x, library.weights()) for path in (frozen_experts, trained_experts, grouped))

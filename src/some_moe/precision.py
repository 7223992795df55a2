"""Number types: what a pass computes its products in, and what stays in float32 or better whatever that is."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Routing is decided, and keys are kept, in float32 or better."""
    return x if x.dtype == torch.float64 else x.float()


def full_precision(x: Tensor) -> torch.autocast:
    """Within, autocast leaves everything in the type that it has."""
    return torch.autocast(x.device.type, enabled=False)


def product_dtype(x: Tensor) -> torch.dtype:
    """The type that a product of x is computed in: autocast's where that is on, else its own."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)

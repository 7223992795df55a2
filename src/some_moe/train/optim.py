"""The optimizer: AdamW, with decay on matrices alone or on everything."""

import torch
from torch import nn

from some_moe.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters, in the order of their names, in groups with and without decay."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decays = [config.decay_on == "all" or is_matrix(name, p) for name, p in trained]
    groups = [
        {
            "params": [p for (_, p), d in zip(trained, decays, strict=True) if d is decayed],
            "weight_decay": config.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    on_gpu = any(p.is_cuda for _, p in trained)
    # On a GPU the rate is a number on the device, so that a recorded step reads the present one.
    rate = torch.tensor(config.learning_rate, device=trained[0][1].device) if on_gpu else config.learning_rate
    # Fused: one kernel for everything, on the CPU too, and the same bits in every process.
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=rate,
        betas=(0.9, config.beta2),
        fused=True,
        capturable=on_gpu,
    )


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter holds matrices: biases and gains do not, though those of a library are stacked."""
    return parameter.dim() >= 2 and not name.endswith(("bias", "gain"))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

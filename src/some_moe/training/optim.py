"""The optimizer: AdamW, with decay on matrices alone or on everything, and clipping."""

from functools import partial
from inspect import unwrap

import torch
from torch import Tensor, nn

from some_moe.config import TrainConfig


class Optimizer(torch.optim.AdamW):
    """torch's AdamW, which clips by itself: one call, for a GPU can do both in one pass (fast/adamw.py)."""

    # torch wraps these to keep its compiler out: the first call of one would load it, which takes seconds.
    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
    clip = staticmethod(partial(nn.utils.clip_grad_norm_, foreach=True))  # of parts that lie elsewhere: `Sharding.clip`

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def clip_and_step(self, max_norm: float | None) -> Tensor:
        """Clip all gradients to a norm of max_norm (None: as they are) and take a step. Returns the norm () before."""
        limit = float("inf") if max_norm is None else max_norm
        norm: Tensor = self.clip(self.parameters(), limit)
        self.step()
        return norm


def make_optimizer(model: nn.Module, config: TrainConfig, kind: type[Optimizer] = Optimizer) -> Optimizer:
    """AdamW over the trained parameters, in the order of their names, in groups with and without decay."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: dict[tuple[type, float], list[nn.Parameter]] = {}  # one kernel takes whole tensors, or parts of some (FSDP)
    for decays in (True, False):
        for name, p in trained:
            if decays is (config.decay_on == "all" or is_matrix(name, p)):
                groups.setdefault((type(p), config.weight_decay if decays else 0.0), []).append(p)
    # Fused: one kernel for everything, on the CPU too, and the same bits in every process.
    return kind(
        [{"params": params, "weight_decay": decay} for (_, decay), params in groups.items()],
        lr=config.learning_rate,
        betas=(0.9, config.beta2),
        fused=True,
        capturable=any(p.is_cuda for _, p in trained),
    )


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter holds matrices: biases and gains do not, though those of a library are stacked."""
    return parameter.dim() >= 2 and not name.endswith(("bias", "gain"))


def set_rate(optimizer: torch.optim.Optimizer, rate: Tensor) -> None:
    """Set the learning rate. On a GPU it stays a tensor, so that a captured step reads the present one."""
    for group in optimizer.param_groups:
        group["lr"] = rate.float() if rate.is_cuda else float(rate)

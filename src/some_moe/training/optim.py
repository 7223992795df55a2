"""The optimizer: AdamW, with decay on matrices alone or on everything, and clipping."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from some_moe.config import TrainConfig
from some_moe.experts import has_triton

if TYPE_CHECKING:
    from some_moe.fast.ops.adamw import ParamState, PointerTables


class Optimizer(torch.optim.AdamW):
    """torch's AdamW, which clips by itself. On a GPU all parameters are moved in one pass, by the same rule, unless a
    tensor is not aligned (d_model no multiple of 4)."""

    tables: "PointerTables | None" = None  # from the first step on a GPU on

    def clip_and_step(self, most: float | None) -> Tensor:
        """Clip all gradients to a norm of `most` (None: as they are) and take a step. Returns the norm () before."""
        limit = float("inf") if most is None else most
        if has_triton() and (norm := self.move_at_once(limit)) is not None:
            return norm
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
        self.step()
        return norm

    def finish_recording(self) -> None:
        """To be called when a step was recorded, before it is replayed."""
        if self.tables is not None:
            self.tables.fill_captured()

    @torch.no_grad()
    def move_at_once(self, limit: float) -> Tensor | None:
        """`clip_and_step` by one pass over all parameters; None where it cannot be done."""
        from some_moe.fast.ops import adamw

        moved = list(self.list_moved())
        first = self.param_groups[0]
        if not adamw.can_run(moved) or not isinstance(first["lr"], Tensor):
            return None
        if torch.cuda.is_current_stream_capturing() and (self.tables is None or not self.tables.free):
            return None
        if self.tables is None:
            self.tables = adamw.PointerTables(sum(len(group["params"]) for group in self.param_groups))
        torch._foreach_add_([each.step for each in moved], 1)
        decay = max(group["weight_decay"] for group in self.param_groups)
        return adamw.clip_and_step(
            moved, self.tables, first["lr"], max_norm=limit, betas=first["betas"], eps=first["eps"], weight_decay=decay
        )

    def list_moved(self) -> Iterator["ParamState"]:
        """Every parameter that has a gradient, with its state, which begins as torch has it."""
        from some_moe.fast.ops.adamw import ParamState

        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                yield ParamState(
                    parameter,
                    parameter.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state["step"],
                    decays=group["weight_decay"] > 0,
                )


def make_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
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
    return Optimizer(
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

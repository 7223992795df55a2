"""AdamW on a GPU: clipping and the step of all parameters in one pass, by torch's own rule."""

from collections.abc import Iterator

import torch
from torch import Tensor

from some_moe.fast.ops import adamw
from some_moe.training.optim import Optimizer


class FusedAdamW(Optimizer):
    """One pass over all parameters, unless a tensor is not aligned (d_model no multiple of 4)."""

    tables: adamw.PointerTables | None = None  # from the first step on

    def clip_and_step(self, max_norm: float | None) -> Tensor:
        """As `Optimizer.clip_and_step`."""
        limit = float("inf") if max_norm is None else max_norm
        norm = self.step_at_once(limit)
        return super().clip_and_step(max_norm) if norm is None else norm

    def finish_capture(self) -> None:
        """To be called when a step was captured, before it is replayed."""
        if self.tables is not None:
            self.tables.fill_captured()

    @torch.no_grad()
    def compile_kernels(self) -> None:
        """Launch the kernels where launches only compile: nothing is changed."""
        states = list(self.list_states())
        if adamw.can_run(states):
            rate, tables = states[0].parameter.new_zeros(()), adamw.PointerTables(len(states))
            adamw.clip_and_step(states, tables, rate, max_norm=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    @torch.no_grad()
    def step_at_once(self, limit: float) -> Tensor | None:
        """`clip_and_step` by one pass over all parameters; None where it cannot be done."""
        states = list(self.list_states())
        first = self.param_groups[0]
        if not adamw.can_run(states) or not isinstance(first["lr"], Tensor):
            return None
        if torch.cuda.is_current_stream_capturing() and (self.tables is None or not self.tables.free):
            return None
        if self.tables is None:
            self.tables = adamw.PointerTables(len(self.parameters()))
        torch._foreach_add_([each.step for each in states], 1)
        decay = max(group["weight_decay"] for group in self.param_groups)
        return adamw.clip_and_step(
            states, self.tables, first["lr"], max_norm=limit, betas=first["betas"], eps=first["eps"], weight_decay=decay
        )

    def list_states(self) -> Iterator[adamw.ParamState]:
        """Every parameter that has a gradient, with its state, which begins as torch has it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                yield adamw.ParamState(
                    parameter,
                    parameter.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state["step"],
                    decays=group["weight_decay"] > 0,
                )

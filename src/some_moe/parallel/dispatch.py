"""Expert parallelism: a library whose experts live in several processes. Tokens travel, weights never.

Each process makes only its own experts, from their seed. A token goes to the processes that have its experts, and
their outputs come back, to be mixed by its gates where it lives. So the gradient of a trained expert is complete in
the process that has it, whichever process's tokens it has seen.

Shapes: N tokens here, K experts each, S = N·K slots, P processes that share a library, E/P experts in each.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from some_moe.experts import ExpertWeights, MixExperts

Exchange = Callable[[Tensor, Tensor, list[int] | None, list[int] | None], None]  # (out, rows, taken, sent)


class Travel(torch.autograd.Function):
    """Send `sent` rows to each process and take `taken` from each; their gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, taken: list[int], sent: list[int], exchange: Exchange) -> Tensor:
        ctx.way_back = sent, taken, exchange
        out = rows.new_empty(sum(taken), rows.shape[1])
        exchange(out, rows.contiguous(), taken, sent)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grad_outputs
        sent, taken, exchange = ctx.way_back
        out = grad.new_empty(sum(sent), grad.shape[1])
        exchange(out, grad.contiguous(), sent, taken)
        return out, None, None, None


class Dispatch:
    """A library's way to mix experts, where `num_processes` have an equal share of them: see `MixExperts`."""

    def __init__(self, mix: MixExperts, num_experts: int, num_processes: int, exchange: Exchange) -> None:
        self.mix, self.num_experts, self.num_processes, self.exchange = mix, num_experts, num_processes, exchange

    def __call__(self, x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
        slots = experts.reshape(-1)
        order = slots.argsort(stable=True)  # by expert, and so by process
        counts = torch.bincount(slots, minlength=self.num_experts)
        arriving = torch.empty_like(counts)
        self.exchange(arriving, counts, None, None)  # (P·E/P): what each process sends to each expert here
        sent, taken = (c.view(self.num_processes, -1).sum(1).tolist() for c in (counts, arriving))
        rows = travel(x.index_select(0, order // experts.shape[1]), taken, sent, self.exchange)
        here = torch.arange(weights.num_experts, device=x.device).repeat(self.num_processes)
        outputs = self.run_here(rows, here.repeat_interleave(arriving), weights)
        returned = travel(outputs, sent, taken, self.exchange)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        mixed = returned.index_select(0, place).view(*experts.shape, -1)  # (N, K, W)
        return torch.einsum("nk,nkw->nw", gates.to(x.dtype), mixed)

    def run_here(self, rows: Tensor, experts: Tensor, weights: ExpertWeights) -> Tensor:
        """Each of rows (R, D) through its expert (R,) of those that are here."""
        num_rows = len(rows)
        if num_rows == 0:
            # One row for nobody: the others wait for this process's part in the backward pass, and AdamW for zeros.
            rows, experts = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), experts.new_zeros(1)
        return self.mix(rows, experts[:, None], torch.ones_like(experts[:, None], dtype=rows.dtype), weights)[:num_rows]


def travel(rows: Tensor, taken: list[int], sent: list[int], exchange: Exchange) -> Tensor:
    out: Tensor = Travel.apply(rows, taken, sent, exchange)  # type: ignore[no-untyped-call]
    return out


def exchange_rows(group: Any, listening: Callable[[], Any]) -> Exchange:
    """`all_to_all_single` among the processes of a group; without counts, equal shares."""

    def exchange(out: Tensor, rows: Tensor, taken: list[int] | None, sent: list[int] | None) -> None:
        with listening():
            dist.all_to_all_single(out, rows, taken, sent, group=group)

    return exchange

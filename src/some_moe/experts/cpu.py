"""The CPU path: slots permuted by expert, one (batched) GEMM per batch of experts, no gradient of frozen weights.

A batch is all experts where the load is nearly even, else two of nearly the same load, else one. Padding rows of a
batch gather token 0, and are never read.

Shapes: N tokens, K experts each, S = N·K slots, P ≥ S rows permuted by batch and expert, D model width, F hidden width.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from some_moe.experts.weights import ExpertWeights, activate

MOST_SURPLUS = 1.2  # padding that one GEMM for all experts may add, as a factor of the rows
MOST_PAIR_SURPLUS = 1.15  # and that a GEMM for two may


@dataclass(frozen=True)
class Batch:
    """Experts that one batched GEMM computes, with the same number of rows each."""

    experts: Sequence[int]  # one, two, or all; rising
    num_rows: int  # of each

    @property
    def within(self) -> slice:
        """Their slice of a stack: any two are a (strided) slice too, so that no weight is copied."""
        first, last = self.experts[0], self.experts[-1]
        return slice(first, last + 1, max(1, last - first) if len(self.experts) == 2 else 1)


@dataclass(frozen=True)
class Schedule:
    """The permutation of the N·K slots by batch and expert."""

    token: Tensor  # (P,) the token of each row
    place: Tensor  # (N, K) each slot's row
    batches: list[Batch]

    @property
    def sizes(self) -> list[int]:
        """Rows of each batch."""
        return [len(batch.experts) * batch.num_rows for batch in self.batches]


def plan_batches(loads: Sequence[int]) -> list[Batch]:
    """Batch experts of loads (E,) where that adds little padding; those without tokens are left out."""
    most = max(loads)
    if min(loads) and most * len(loads) <= MOST_SURPLUS * sum(loads):
        return [Batch(range(len(loads)), most)]
    batches = []
    waiting = sorted((expert for expert, load in enumerate(loads) if load), key=lambda expert: loads[expert])
    while waiting:
        busiest = waiting.pop()
        # A pair gives each of two threads a GEMM of its own; more threads share one.
        is_paired = (
            torch.get_num_threads() <= 2 and waiting and loads[busiest] <= MOST_PAIR_SURPLUS * loads[waiting[-1]]
        )
        experts = sorted((busiest, waiting.pop())) if is_paired else [busiest]
        batches.append(Batch(experts, loads[busiest]))
    return batches


def schedule_slots(experts: Tensor, num_experts: int, *, batched: bool) -> Schedule:
    """Permute the slots of `experts` (N, K) by expert, or by batch of experts."""
    flat = experts.reshape(-1)
    sorted_experts, order = flat.sort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    loads = counts.tolist()
    row = torch.arange(len(flat), device=flat.device)  # of each sorted slot
    token = order // experts.shape[1]
    if batched:
        batches = plan_batches(loads)
        used = [(expert, batch.num_rows) for batch in batches for expert in batch.experts]
        ends = list(accumulate(num_rows for _, num_rows in used))
        starts = [0] * num_experts
        for (expert, num_rows), end in zip(used, ends, strict=True):
            starts[expert] = end - num_rows
        row += (torch.tensor(starts) - (counts.cumsum(0) - counts))[sorted_experts]
        token = token.new_zeros(max(ends, default=0)).scatter_(0, row, token)
    else:
        batches = [Batch([expert], load) for expert, load in enumerate(loads) if load]
    place = torch.empty_like(order).scatter_(0, order, row)
    return Schedule(token, place.view_as(experts), batches)


def add_up(rows: Tensor, place: Tensor, gates: Tensor) -> Tensor:
    """Combine: Σ_k gate · row over each token's permuted rows (P, W): (N, W), in one pass (embedding_bag)."""
    return F.embedding_bag(place, rows, mode="sum", per_sample_weights=gates)


def multiply(rows: Tensor, stack: Tensor, slots: Schedule, out: Tensor, bias: Tensor | None = None) -> None:
    """out[i] = rows[i] @ stack[expert of i] (+ bias[expert of i]), one GEMM for each batch."""
    sizes, dtype = slots.sizes, rows.dtype
    # One unbind for all single experts: indexing a stack again and again takes Python longer than a small GEMM.
    has_singles = any(len(batch.experts) == 1 for batch in slots.batches)
    matrices, biases = (each.unbind() if each is not None and has_singles else None for each in (stack, bias))
    for batch, part, result in zip(slots.batches, torch.split(rows, sizes), torch.split(out, sizes), strict=True):
        if len(batch.experts) == 1:
            assert matrices is not None
            (expert,) = batch.experts
            matrix = matrices[expert].to(dtype)
            if biases is None:
                torch.mm(part, matrix, out=result)
            else:
                torch.addmm(biases[expert].to(dtype), part, matrix, out=result)
            continue
        shape, several = (len(batch.experts), batch.num_rows, -1), stack[batch.within].to(dtype)
        if bias is None:
            torch.bmm(part.view(shape), several, out=result.view(shape))
        else:
            torch.baddbmm(bias[batch.within].to(dtype)[:, None], part.view(shape), several, out=result.view(shape))


class Scratch(threading.local):
    """Workspace buffers, reused from call to call: fresh memory (page faults) costs more than a GELU.

    Each name is one buffer, as large as it ever had to be; nothing in it outlives the call that took it.
    """

    def __init__(self) -> None:
        self.pieces: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised tensor of this shape, in the type and on the device of `like`."""
        if like.is_cuda:
            return like.new_empty(shape)
        size = math.prod(shape)
        piece = self.pieces.get((name, like.dtype))
        if piece is None or len(piece) < size:
            with torch.inference_mode(False):  # what is made in that mode may be written to in no other
                piece = self.pieces[name, like.dtype] = torch.empty(size, dtype=like.dtype)
        return piece[:size].view(shape)


SCRATCH = Scratch()


class FrozenExperts(torch.autograd.Function):
    """Experts whose weights need no gradient: backward makes dX and the gate gradient, nothing else.

    A gate is a factor of its slot's whole path, so it is applied in the combine, both ways.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
        # Stacks in another dtype are cast one expert at a time, so that there is never a cast of a whole stack.
        slots = schedule_slots(experts, weights.num_experts, batched=x.dtype == weights.up.dtype and not x.is_cuda)
        rows = x.index_select(0, slots.token)
        pre = x.new_empty(len(rows), weights.up.shape[1])
        multiply(rows, weights.up.transpose(1, 2), slots, pre, weights.up_bias)
        if weights.down is None:
            out = F.gelu(pre)
        else:
            hidden, out = SCRATCH.take("hidden", pre, *pre.shape), rows  # the dispatched rows are no longer needed
            torch.ops.aten.gelu.out(pre, out=hidden)
            multiply(hidden, weights.down.transpose(1, 2), slots, out, weights.down_bias)
        ctx.save_for_backward(pre, out, gates, slots.token, slots.place)
        ctx.slots, ctx.weights = slots, weights
        return add_up(out, slots.place, gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (grad_y,) = grad_outputs
        pre, out, gates, token, place = ctx.saved_tensors
        weights: ExpertWeights = ctx.weights
        grad_rows = SCRATCH.take("rows", grad_y, len(token), grad_y.shape[1])
        torch.index_select(grad_y, 0, token, out=grad_rows)
        grad_gates = None
        if ctx.needs_input_grad[2]:
            products = torch.mul(grad_rows, out, out=SCRATCH.take("hidden", out, *out.shape))
            grad_gates = products.sum(-1)[place]
        if not ctx.needs_input_grad[0]:
            return None, None, grad_gates, None
        if weights.down is None:
            grad_pre, grad_x = grad_rows, SCRATCH.take("hidden", grad_y, len(token), weights.up.shape[2])
        else:
            grad_pre, grad_x = SCRATCH.take("hidden", pre, *pre.shape), grad_rows  # no longer needed after the GEMM
            multiply(grad_rows, weights.down, ctx.slots, grad_pre)
        torch.ops.aten.gelu_backward.grad_input(grad_pre, pre, grad_input=grad_pre)
        multiply(grad_pre, weights.up, ctx.slots, grad_x)
        return add_up(grad_x, place, gates), None, grad_gates, None


def _mix_trained(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """The same under autograd, gated ones too. `unbind` lets each stack's gradient be built once, not E times."""
    plan = schedule_slots(experts, weights.num_experts, batched=False)
    x_rows = x.index_select(0, plan.token)  # the gradient of x[…] adds in whatever order threads arrive
    ups, up_biases = weights.up.to(x.dtype).unbind(0), weights.up_bias.to(x.dtype).unbind(0)
    downs = None if weights.down is None else weights.down.to(x.dtype).unbind(0)
    down_biases = None if weights.down_bias is None else weights.down_bias.to(x.dtype).unbind(0)
    gains = None if weights.gain is None else weights.gain.to(x.dtype).unbind(0)
    loras = None if weights.lora is None else weights.lora.to(x.dtype).unbind()
    outputs = []
    for batch, rows in zip(plan.batches, torch.split(x_rows, plan.sizes), strict=True):
        (expert,) = batch.experts
        pre = torch.addmm(up_biases[expert], rows, ups[expert].T)
        if loras is not None:
            pre = pre + (rows @ loras[expert][0].T) @ loras[expert][1].T
        hidden = activate(pre, gated=weights.gated)
        if gains is not None:
            hidden = hidden * gains[expert]
        if downs is None or down_biases is None:
            outputs.append(hidden)
            continue
        out = torch.addmm(down_biases[expert], hidden, downs[expert].T)
        if loras is not None:
            out = out + (hidden @ loras[expert][2].T) @ loras[expert][3].T
        outputs.append(out)
    slots = torch.cat(outputs)[plan.place]
    return torch.einsum("nk,nkw->nw", gates, slots)


def mix_experts(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """See `some_moe.experts`."""
    gates = gates.to(x.dtype)
    if weights.is_frozen and not weights.gated:
        y: Tensor = FrozenExperts.apply(x, experts, gates, weights)  # type: ignore[no-untyped-call]
    else:
        y = _mix_trained(x, experts, gates, weights)
    return y

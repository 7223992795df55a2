"""The CPU path: tokens sorted by expert, one product per expert and matrix, no gradient of frozen weights.

Where the load is nearly even, every expert gets as many rows as the busiest, and one batched product does them all.

Shapes: N tokens, K experts each, S = N·K slots sorted by expert, D model width, F hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from some_moe.kernels.weights import ExpertWeights


@dataclass(frozen=True)
class Schedule:
    """The N·K slots, sorted by expert."""

    token: Tensor  # (S,) the token of each sorted slot
    place: Tensor  # (N, K) where each token's slots lie in the sorted order
    experts: list[int]  # the experts in use
    sizes: list[int]  # how many slots each of them has
    is_even: bool = False  # every expert is in use and has as many slots; the surplus ones belong to no token


MOST_SURPLUS = 1.25  # rows that batching may add, as a factor


def even_out(slots: Schedule, num_experts: int) -> Schedule:
    """Give every expert as many slots as the busiest has, where that adds few; else return the slots as they are."""
    most = max(slots.sizes, default=0)
    if len(slots.experts) < num_experts or most * num_experts > MOST_SURPLUS * len(slots.token):
        return slots
    starts = torch.tensor(slots.sizes).cumsum(0) - torch.tensor(slots.sizes)
    shift = torch.arange(num_experts) * most - starts  # how far each expert's slots move
    moved = torch.arange(len(slots.token)) + shift.repeat_interleave(torch.tensor(slots.sizes))
    token = slots.token.new_zeros(num_experts * most).scatter_(0, moved, slots.token)
    return Schedule(token, moved[slots.place], slots.experts, [most] * num_experts, is_even=True)


def schedule_slots(experts: Tensor, num_experts: int) -> Schedule:
    """Sort the slots of `experts` (N, K) by expert."""
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    used = [expert for expert, count in enumerate(counts) if count]
    return Schedule(order // experts.shape[1], place.view_as(experts), used, [counts[expert] for expert in used])


def add_up(rows: Tensor, place: Tensor, gates: Tensor) -> Tensor:
    """Σ_k gate · row over each token's sorted rows (S, W): (N, W). One pass that gathers, weighs and adds."""
    return F.embedding_bag(place, rows, mode="sum", per_sample_weights=gates)


def multiply(rows: Tensor, stack: Tensor, slots: Schedule, out: Tensor, bias: Tensor | None = None) -> None:
    """out[i] = rows[i] @ stack[expert of i] (+ bias[expert of i]), one product for each expert in use."""
    if slots.is_even:
        batch, result = rows.view(len(stack), -1, rows.shape[1]), out.view(len(stack), -1, out.shape[1])
        if bias is None:
            torch.bmm(batch, stack, out=result)
        else:
            torch.baddbmm(bias[:, None], batch, stack, out=result)
        return
    matrices: Sequence[Tensor] = stack.unbind(0)
    biases = None if bias is None else bias.unbind(0)
    for expert, part, result in zip(
        slots.experts, torch.split(rows, slots.sizes), torch.split(out, slots.sizes), strict=True
    ):
        matrix = matrices[expert].to(rows.dtype)
        if biases is None:
            torch.mm(part, matrix, out=result)
        else:
            torch.addmm(biases[expert].to(rows.dtype), part, matrix, out=result)


class FrozenExperts(torch.autograd.Function):
    """Experts whose weights want no gradient: backward makes dX and the gate gradient, nothing else.

    A gate is a factor of its slot's whole path, so it is applied where a token's rows are added up, both ways.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
        slots = schedule_slots(experts, weights.num_experts)
        if x.dtype == weights.up.dtype and not x.is_cuda:
            slots = even_out(slots, weights.num_experts)
        rows = x.index_select(0, slots.token)
        pre = x.new_empty(len(rows), weights.up.shape[1])
        multiply(rows, weights.up.transpose(1, 2), slots, pre, weights.up_bias)
        out = F.gelu(pre)
        if weights.down is not None:
            hidden, out = out, rows  # the gathered rows are done with, and have the size of the result
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
        grad_rows = grad_y.index_select(0, token)
        grad_gates = (grad_rows * out).sum(-1)[place] if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, None, grad_gates, None
        back = grad_rows
        if weights.down is not None:
            back = torch.empty_like(pre)
            multiply(grad_rows, weights.down, ctx.slots, back)
        grad_pre = torch.ops.aten.gelu_backward(back, pre)
        grad_x = grad_y.new_empty(len(token), weights.up.shape[2])
        multiply(grad_pre, weights.up, ctx.slots, grad_x)
        return add_up(grad_x, place, gates), None, grad_gates, None


def _mix_trained(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """The same order of work under autograd. `unbind` lets each stack's gradient be built once, not E times."""
    plan = schedule_slots(experts, weights.num_experts)
    x_rows = x[plan.token]
    ups, up_biases = weights.up.to(x.dtype).unbind(0), weights.up_bias.to(x.dtype).unbind(0)
    downs = None if weights.down is None else weights.down.to(x.dtype).unbind(0)
    down_biases = None if weights.down_bias is None else weights.down_bias.to(x.dtype).unbind(0)
    gains = None if weights.gain is None else weights.gain.to(x.dtype).unbind(0)
    loras = None if weights.lora is None else weights.lora.to(x.dtype).unbind()
    outputs = []
    for expert, rows in zip(plan.experts, torch.split(x_rows, plan.sizes), strict=True):
        pre = torch.addmm(up_biases[expert], rows, ups[expert].T)
        if loras is not None:
            pre = pre + (rows @ loras[expert][0].T) @ loras[expert][1].T
        hidden = F.gelu(pre)
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


# Not compiled: the loop's bounds are data, and tracing it would compile every batch anew.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def mix_experts(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """See `some_moe.kernels`."""
    gates = gates.to(x.dtype)
    if weights.is_frozen:
        y: Tensor = FrozenExperts.apply(x, experts, gates, weights)  # type: ignore[no-untyped-call]
        return y
    return _mix_trained(x, experts, gates, weights)

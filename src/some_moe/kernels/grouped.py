"""The grouped path: every expert's product in one `grouped_mm`, under autograd, for experts that are trained.

Shapes: N tokens, K experts each, S = N·K slots sorted by expert, D model width, F hidden width, R rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from some_moe.kernels.tables import Slots, sort_slots
from some_moe.kernels.weights import ExpertWeights

ALIGNMENT = 8  # grouped_mm wants rows of a multiple of 16 bytes


class AddPerExpert(torch.autograd.Function):
    """rows (S, W) + bias[expert]: the bias gradient is a grouped product with ones, not a sorted scatter."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return bias[expert].add_(rows)  # the gathered rows are new: no third tensor of S rows for the sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (ends,), (grad,) = ctx.saved_tensors, grads
        return grad, sum_per_expert(grad, ends) if ctx.needs_input_grad[1] else None, None, None


def sum_per_expert(rows: Tensor, ends: Tensor) -> Tensor:
    """Add up sorted rows (S, W) by expert: (E, W)."""
    spare = -len(rows) % ALIGNMENT
    ones = rows.new_ones(ALIGNMENT, len(rows) + spare)[:, : len(rows)]
    return F.grouped_mm(ones, rows.contiguous(), offs=ends)[:, 0]


class MixRows(torch.autograd.Function):
    """y (N, W) = Σ_k gate · rows[place]: sorted rows (S, W) gathered by token, so that nothing is scattered.

    One k after the other: a compiler makes one kernel of it, and without one there is no float32 copy of S rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(rows, gates, order, place)
        columns = gates.float()[..., None].unbind(1)  # K of (N, 1)
        places = place.view(gates.shape).unbind(1)
        y: Tensor = columns[0] * rows[places[0]]
        for gate, at in zip(columns[1:], places[1:], strict=True):
            y.addcmul_(rows[at], gate)
        return y.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, gates, order, place = ctx.saved_tensors
        (grad,) = grads
        wide = grad.float()
        grad_gates = torch.stack([(rows[at] * wide).sum(-1) for at in place.view(gates.shape).unbind(1)], dim=1)
        grad_rows = grad[order // gates.shape[1]].mul_(gates.reshape(-1)[order][:, None])
        return grad_rows, grad_gates.to(gates.dtype), None, None


class GatherRows(torch.autograd.Function):
    """x[token] for sorted slots; backward adds each token's K rows in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place,), (grad,) = ctx.saved_tensors, grads
        return grad[place].view(-1, ctx.top_k, grad.shape[1]).sum(1), None, None, None


def multiply(rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """rows (S, W) @ stack[expert]ᵀ (V, W) → (S, V), in the type of the rows."""
    return F.grouped_mm(rows, stack.to(rows.dtype).transpose(1, 2), offs=ends)


def apply_lora(rows: Tensor, first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    """The low-rank update (rows @ firstᵀ) @ secondᵀ, its rank padded to what grouped_mm takes."""
    spare = -first.shape[1] % ALIGNMENT
    first, second = F.pad(first, (0, 0, 0, spare)), F.pad(second, (0, spare))
    return multiply(multiply(rows, first, ends), second, ends)


def run_experts(rows: Tensor, weights: ExpertWeights, slots: Slots) -> Tensor:
    """Every sorted row through its expert."""
    expert, ends = slots.expert.to(torch.int64), slots.ends

    def add(rows: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = AddPerExpert.apply(rows, bias.to(rows.dtype), expert, ends)  # type: ignore[no-untyped-call]
        return out

    pre = add(multiply(rows, weights.up, ends), weights.up_bias)
    if weights.lora is not None:
        pre = pre + apply_lora(rows, weights.lora.up_in, weights.lora.up_out, ends)
    hidden = F.gelu(pre)
    if weights.gain is not None:
        hidden = hidden * weights.gain.to(hidden.dtype)[expert]
    if weights.down is None or weights.down_bias is None:
        return hidden
    out = add(multiply(hidden, weights.down, ends), weights.down_bias)
    if weights.lora is not None:
        out = out + apply_lora(hidden, weights.lora.down_in, weights.lora.down_out, ends)
    return out


def can_mix(x: Tensor, weights: ExpertWeights) -> bool:
    """Whether grouped_mm takes these shapes and this type."""
    wide = weights.up.shape[1] % ALIGNMENT == 0 and weights.up.shape[2] % ALIGNMENT == 0
    return wide and (x.dtype == torch.bfloat16 or not x.is_cuda)


def mix_experts(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """See `some_moe.kernels`."""
    slots = sort_slots(experts, weights.num_experts)
    place = torch.empty_like(slots.order).scatter_(
        0, slots.order, torch.arange(len(slots.order), device=slots.order.device)
    )
    rows: Tensor = GatherRows.apply(x, slots.order, place, experts.shape[1])  # type: ignore[no-untyped-call]
    out = run_experts(rows, weights, slots)
    y: Tensor = MixRows.apply(out, gates, slots.order, place)  # type: ignore[no-untyped-call]
    return y

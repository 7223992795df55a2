"""The grouped GEMM path: permute, dispatch, torch's `grouped_mm`, combine, under autograd, for trained experts.

Shapes: N tokens, K experts each, S = N·K slots, P rows permuted by expert, D model width, F hidden width, R rank.
P = S, and P > S where weights are trained: on a GPU a weight gradient needs each expert's rows padded to 8.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from some_moe.experts.weights import ExpertWeights, activate

ALIGNMENT = 8  # grouped_mm wants multiples of 16 bytes
Size = TypeVar("Size", int, Tensor)


def sort_slots(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the S slots of `experts` (N, K) int64 by expert, stably: order, expert and ends.

    order (S,) int64: each permuted slot's slot. expert (S,): its expert, in the smallest dtype that holds it. ends (E,)
    int32: one past each expert's last permuted slot, the offsets of a grouped GEMM.
    """
    # A radix sort: the fewer bytes a key has, the fewer passes.
    small = torch.uint8 if num_experts <= 256 else torch.int16 if num_experts < 1 << 15 else torch.int32
    expert, order = experts.reshape(-1).to(small).sort(stable=True)
    every = torch.arange(num_experts, device=experts.device).to(small)
    ends = torch.searchsorted(expert, every, right=True, out_int32=True)
    return order, expert, ends


@dataclass(frozen=True)
class Layout:
    """The permutation of the slots, padded, as tensors on the device."""

    slot: Tensor  # (P,) int64: each row's slot, and −1 for padding: it gathers the last token, and is never read
    place: Tensor  # (S,) int64: each slot's row
    expert: Tensor  # (P,) int64: each row's expert
    ends: Tensor  # (E,) int32: one past each expert's last row; the last one is P, so that every row has an expert


def round_up(size: Size) -> Size:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def lay_out(experts: Tensor, num_experts: int, *, pad: bool) -> Layout:
    """Permute the slots of `experts` (N, K) by expert; pad: every expert to a multiple of ALIGNMENT rows, at least one.

    P does not depend on the loads, so there is no host sync.
    """
    order, expert, ends = sort_slots(experts, num_experts)
    slot, expert = order, expert.to(torch.int64)
    row = torch.arange(len(slot), device=slot.device)  # of each sorted slot
    if pad:
        num_rows = round_up(len(slot) + ALIGNMENT * num_experts)
        sizes = ends.diff(prepend=ends.new_zeros(1))
        # An expert without tokens gets rows too: not every GPU writes the zeros of an empty group's gradient.
        padded = round_up(sizes.clamp(min=1))
        padded_ends = padded.cumsum(0, dtype=torch.int32)
        row = row + ((padded_ends - padded) - (ends - sizes))[expert]
        # Not by F.pad, which torch 2.11 compiles to code that forgets the padded value.
        ends = torch.cat((padded_ends[:-1], padded_ends.new_full((1,), num_rows)))
        expert = torch.searchsorted(ends, torch.arange(num_rows, device=ends.device, dtype=ends.dtype), right=True)
        slot = torch.full((num_rows,), -1, device=slot.device).scatter_(0, row, slot)
    place = torch.empty_like(order).scatter_(0, order, row)
    return Layout(slot, place, expert, ends)


class AddPerExpert(torch.autograd.Function):
    """rows (P, W) + bias[expert]: dbias is a grouped GEMM with ones, not a sorted scatter."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return bias[expert] + rows  # not in place: compiled by torch 2.11, its backward pass would be lost

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (ends,), (grad,) = ctx.saved_tensors, grads
        return grad, sum_per_expert(grad, ends) if ctx.needs_input_grad[1] else None, None, None


class ScalePerExpert(torch.autograd.Function):
    """rows (P, W) · gain[expert], with the gain's gradient made as dbias is."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gain: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, gain, expert, ends)
        return gain[expert] * rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (rows, gain, expert, ends), (grad,) = ctx.saved_tensors, grads
        return (gain[expert] * grad, sum_per_expert(grad * rows, ends) if ctx.needs_input_grad[1] else None, None, None)


def sum_per_expert(rows: Tensor, ends: Tensor) -> Tensor:
    """Add up padded rows (P, W) by expert: (E, W)."""
    return F.grouped_mm(rows.new_ones(ALIGNMENT, len(rows)), rows.contiguous(), offs=ends)[:, 0]


class MixRows(torch.autograd.Function):
    """Combine: y (N, W) = Σ_k gate · rows[place], permuted rows (P, W) gathered by token, so that nothing is scattered.

    One k after the other: torch.compile makes one kernel of it, and in eager mode there is no float32 copy of S rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, slot: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(rows, gates, slot, place)
        columns = gates.float()[..., None].unbind(1)  # K of (N, 1)
        places = place.view(gates.shape).unbind(1)
        y: Tensor = columns[0] * rows[places[0]]
        for gate, at in zip(columns[1:], places[1:], strict=True):
            y.addcmul_(rows[at], gate)
        return y.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, gates, slot, place = ctx.saved_tensors
        (grad,) = grads
        wide = grad.float()
        grad_gates = torch.stack([(rows[at] * wide).sum(-1) for at in place.view(gates.shape).unbind(1)], dim=1)
        gate = gates.reshape(-1)[slot] * (slot >= 0)  # padding gets a gradient of exactly 0, and so adds to no weight's
        grad_rows = grad[slot // gates.shape[1]].mul_(gate[:, None])
        return grad_rows, grad_gates.to(gates.dtype), None, None


class GatherRows(torch.autograd.Function):
    """Dispatch: x[token] for permuted rows; backward adds each token's K rows in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x[slot // top_k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place,), (grad,) = ctx.saved_tensors, grads
        return grad[place].view(-1, ctx.top_k, grad.shape[1]).sum(1), None, None, None


def multiply(rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """rows (P, W) @ stack[expert]ᵀ (V, W) → (P, V), in the dtype of the rows."""
    return F.grouped_mm(rows, stack.to(rows.dtype).transpose(1, 2), offs=ends)


def apply_lora(rows: Tensor, first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    """The low-rank update (rows @ firstᵀ) @ secondᵀ, its rank padded to what grouped_mm takes."""
    spare = -first.shape[1] % ALIGNMENT
    first, second = F.pad(first, (0, 0, 0, spare)), F.pad(second, (0, spare))
    return multiply(multiply(rows, first, ends), second, ends)


def run_experts(rows: Tensor, weights: ExpertWeights, layout: Layout) -> Tensor:
    """Every permuted row (P, D) through its expert: (P, D), or (P, F) where there is no down-projection."""
    expert, ends = layout.expert, layout.ends

    def add(rows: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = AddPerExpert.apply(rows, bias.to(rows.dtype), expert, ends)  # type: ignore[no-untyped-call]
        return out

    pre = add(multiply(rows, weights.up, ends), weights.up_bias)
    if weights.lora is not None:
        pre = pre + apply_lora(rows, weights.lora.up_in, weights.lora.up_out, ends)
    hidden = activate(pre, gated=weights.gated)
    if weights.gain is not None:
        hidden = ScalePerExpert.apply(hidden, weights.gain.to(hidden.dtype), expert, ends)  # type: ignore[no-untyped-call]
    if weights.down is None or weights.down_bias is None:
        return hidden
    out = add(multiply(hidden, weights.down, ends), weights.down_bias)
    if weights.lora is not None:
        out = out + apply_lora(hidden, weights.lora.down_in, weights.lora.down_out, ends)
    return out


def can_mix(x: Tensor, weights: ExpertWeights) -> bool:
    """Whether grouped_mm takes these shapes and this dtype."""
    wide = weights.up.shape[1] % ALIGNMENT == 0 and weights.up.shape[2] % ALIGNMENT == 0
    return wide and (x.dtype == torch.bfloat16 or not x.is_cuda)


def mix_experts(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
    """See `some_moe.experts`."""
    needs_weight_gradient = torch.is_grad_enabled() and not weights.is_frozen
    layout = lay_out(experts, weights.num_experts, pad=needs_weight_gradient)
    rows: Tensor = GatherRows.apply(x, layout.slot, layout.place, experts.shape[1])  # type: ignore[no-untyped-call]
    out = run_experts(rows, weights, layout)
    y: Tensor = MixRows.apply(out, gates, layout.slot, layout.place)  # type: ignore[no-untyped-call]
    return y

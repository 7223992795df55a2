"""The CPU path: tokens sorted by expert, one `addmm` per expert and matrix, no gradient of frozen weights.

Shapes: N tokens, K experts each, S = N·K slots sorted by expert, D model width, F hidden width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from some_moe.kernels.weights import ExpertWeights


@dataclass(frozen=True)
class Schedule:
    """Which slots belong to which expert."""

    order: Tensor  # (S,) slot numbers, sorted by expert
    token: Tensor  # (S,) the token of each sorted slot
    segments: list[tuple[int, int, int]]  # (expert, first sorted slot, one past the last), non-empty ones


def schedule_slots(experts: Tensor, num_experts: int) -> Schedule:
    """Sort the N·K slots of `experts` (N, K) by expert."""
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=num_experts).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    segments = [(e, a, b) for e, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]
    return Schedule(order, order // experts.shape[1], segments)


def _unsort(rows: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Bring sorted rows (S, W) back to (N, K, W)."""
    slots = torch.empty_like(rows)
    slots[order] = rows
    return slots.view(-1, top_k, rows.shape[1])


class FrozenExperts(torch.autograd.Function):
    """Experts whose weights want no gradient: backward makes dX and the gate gradient, nothing else.

    Only the pre-activations are kept. The gate gradient needs no stored expert output:
    d gate = hidden · (downᵀ dY) + down_bias · dY.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> Tensor:
        plan = schedule_slots(experts, weights.num_experts)
        top_k = experts.shape[1]
        x_rows = x[plan.token]
        pre = x.new_empty(len(x_rows), weights.up.shape[1])
        out = torch.empty_like(pre if weights.down is None else x_rows)
        for expert, a, b in plan.segments:
            up, up_bias = weights.up[expert].to(x.dtype), weights.up_bias[expert].to(x.dtype)
            torch.addmm(up_bias, x_rows[a:b], up.T, out=pre[a:b])
            hidden = F.gelu(pre[a:b])
            if weights.down is None or weights.down_bias is None:
                out[a:b] = hidden
            else:
                down, down_bias = weights.down[expert].to(x.dtype), weights.down_bias[expert].to(x.dtype)
                torch.addmm(down_bias, hidden, down.T, out=out[a:b])
        ctx.save_for_backward(pre, gates)
        ctx.plan, ctx.weights = plan, weights
        return torch.einsum("nk,nkw->nw", gates, _unsort(out, plan.order, top_k))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (grad_y,) = grad_outputs
        pre, gates = ctx.saved_tensors
        plan: Schedule = ctx.plan
        weights: ExpertWeights = ctx.weights
        top_k = gates.shape[1]
        gate_rows = gates.reshape(-1)[plan.order][:, None]
        grad_rows = grad_y[plan.token]
        grad_gate = gate_rows.new_empty(len(gate_rows), 1)
        grad_x = grad_y.new_empty(len(gate_rows), weights.up.shape[2])
        for expert, a, b in plan.segments:
            back = grad_rows[a:b]
            if weights.down is not None:
                back = back @ weights.down[expert].to(back.dtype)
            grad_gate[a:b, 0] = (F.gelu(pre[a:b]) * back).sum(-1)
            if weights.down_bias is not None:
                grad_gate[a:b, 0] += grad_rows[a:b] @ weights.down_bias[expert].to(back.dtype)
            grad_pre = torch.ops.aten.gelu_backward(back * gate_rows[a:b], pre[a:b])
            torch.mm(grad_pre, weights.up[expert].to(back.dtype), out=grad_x[a:b])
        return (
            _unsort(grad_x, plan.order, top_k).sum(1) if ctx.needs_input_grad[0] else None,
            None,
            _unsort(grad_gate, plan.order, top_k).squeeze(-1) if ctx.needs_input_grad[2] else None,
            None,
        )


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
    for expert, a, b in plan.segments:
        rows = x_rows[a:b]
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
    slots = torch.cat(outputs)[plan.order.argsort()].view(*experts.shape, -1)
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

"""Fused cross-entropy for training: one pass over the logits makes the per-token losses, the loss and its gradient.

In training the weight of each token's loss is known before the loss is. So the gradient of the logits is made in the
forward pass, while they are in registers, and the backward pass only scales it; by 1, as a rule, which it skips.
Losses are in nats.

Shapes: N tokens, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from some_moe.fast.ops.column_sum import sum_rows
from some_moe.fast.ops.opaque import opaque

LOG2E = tl.constexpr(1.4426950408889634)
MAX_VOCABULARY = 8192  # a program holds a row in registers, and a partial dbias for each of its columns
VECTOR = tl.constexpr(8)  # adjacent logits of one vector load of a thread
PER_WARP = 1024  # logits: 32 a thread
# Persistent: two for each SM of a large GPU: one keeps the memory busy while the other reduces its row. Where rows are
# shorter, and programs have fewer warps, there are up to four times as many.
PROGRAMS = 264
STAGES = 3  # of the software pipeline: with three, a program's next rows are in flight while it works on one
SCALING_PROGRAMS, SCALING_BLOCK = 528, 4096


@triton.jit
def cross_entropy_kernel(
    logits, targets, weights, denominator, losses, grad_logits, partial, num_rows, V: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """losses = log Σ exp(logits) − logit of the target; grad_logits = weight / denominator · (softmax − onehot).

    partial (programs, STRIDE): the column sums of each program's rows of the gradient, before rounding, and in column V
    of weight / denominator · losses.
    """
    program = tl.program_id(0)
    outer, inner = tl.arange(0, BLOCK // VECTOR), tl.arange(0, VECTOR)
    column = outer[:, None] * VECTOR + inner[None, :]
    inv_denominator = tl.div_rn(1.0, tl.load(denominator).to(tl.float32))
    dbias = tl.zeros((BLOCK // VECTOR, VECTOR), dtype=tl.float32)
    loss = 0.0
    for row in tl.range(program, num_rows, tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(row, tl.int64) * V
        if BLOCK == V:
            x = tl.load(logits + start + column).to(tl.float32)
        else:
            x = tl.load(logits + start + column, mask=column < V, other=-float("inf")).to(tl.float32)
        # A target beyond the vocabulary gives NaN, never a logit of another row.
        target = tl.load(targets + row).to(tl.int32)
        target_logit = tl.load(logits + start + target, mask=(target >= 0) & (target < V), other=float("nan"))
        weight = inv_denominator
        if weights is not None:
            weight *= tl.load(weights + row).to(tl.float32)
        weight = tl.where(target == -100, 0.0, weight)
        row_max = tl.maximum(tl.max(tl.max(x, 1), 0), -1e38)  # finite, so that −inf is less
        exp = tl.exp2((x - row_max) * LOG2E)
        total = tl.sum(tl.sum(exp, 1), 0)
        # The one-hot as an outer product: a thread compares a few indices, and not one for each of its logits.
        one_hot_outer = tl.where(outer == target // VECTOR, weight, 0.0)
        one_hot_inner = tl.where(inner == target % VECTOR, 1.0, 0.0)
        grad = exp * (weight / total) - one_hot_outer[:, None] * one_hot_inner[None, :]
        if BLOCK == V:
            tl.store(grad_logits + start + column, grad.to(grad_logits.dtype.element_ty))
        else:
            tl.store(grad_logits + start + column, grad.to(grad_logits.dtype.element_ty), mask=column < V)
        dbias += grad  # a thread's own columns: no communication
        token_loss = tl.where(target == -100, 0.0, row_max - target_logit.to(tl.float32) + tl.log(total))
        tl.store(losses + row, token_loss)
        loss += weight * token_loss
    here = partial + program.to(tl.int64) * STRIDE
    tl.store(here + column, dbias, mask=column < V)
    tl.store(here + V, loss)


@triton.jit
def cross_entropy_scale_kernel(grad_logits, dbias, grad_loss, size, vocabulary, BLOCK: tl.constexpr):
    """Multiply, in place, grad_logits (size,) and dbias (vocabulary,) by grad_loss; skipped if it is 1."""
    scale = tl.load(grad_loss).to(tl.float32)
    if scale != 1.0:
        program = tl.program_id(0).to(tl.int64)
        for start in range(program * BLOCK, size, tl.num_programs(0) * BLOCK):
            offset = start + tl.arange(0, BLOCK)
            scaled = tl.load(grad_logits + offset, mask=offset < size, other=0.0).to(tl.float32) * scale
            tl.store(grad_logits + offset, scaled.to(grad_logits.dtype.element_ty), mask=offset < size)
        for start in range(program * BLOCK, vocabulary, tl.num_programs(0) * BLOCK):
            offset = start + tl.arange(0, BLOCK)
            mask = offset < vocabulary
            tl.store(dbias + offset, tl.load(dbias + offset, mask=mask) * scale, mask=mask)


@opaque("some_moe::cross_entropy_and_grad")
def cross_entropy_and_grad(
    logits: Tensor, targets: Tensor, weights: Tensor | None, denominator: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """logits (N, V) bf16 or float32, targets (N,) int64, weights (N,) bool or float, denominator () → three tensors:

    the per-token losses (N,) float32; the gradient of the logits (N, V), in their dtype; and in float32 its column sums
    before rounding, dbias (V,), followed by the loss itself, Σ weights · losses / denominator. Without weights all are
    1. A target of −100 counts nothing, as for torch's cross_entropy.
    """
    num_tokens, vocabulary = logits.shape
    block = max(VECTOR.value, triton.next_power_of_2(vocabulary))
    programs = min(num_tokens, PROGRAMS * min(4, MAX_VOCABULARY // block))
    stride = (vocabulary // 16 + 1) * 16  # one column more for the loss, and rows aligned for vector loads
    losses = torch.empty(num_tokens, dtype=torch.float32, device=logits.device)
    grad = logits.new_empty(num_tokens, vocabulary)
    partial = torch.empty(programs, stride, dtype=torch.float32, device=logits.device)
    if num_tokens > 0:
        cross_entropy_kernel[(programs,)](
            logits.contiguous(), targets.contiguous(), None if weights is None else weights.contiguous(), denominator,
            losses, grad, partial, num_tokens, V=vocabulary, BLOCK=block, STRIDE=stride, STAGES=STAGES,
            num_warps=max(1, block // PER_WARP),
        )  # fmt: skip
    return losses, grad, sum_rows(partial)[: vocabulary + 1]


@cross_entropy_and_grad.register_fake
def _(
    logits: Tensor,
    targets: Tensor,  # noqa: ARG001
    weights: Tensor | None,  # noqa: ARG001
    denominator: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, vocabulary = logits.shape
    dbias = logits.new_empty(vocabulary + 1, dtype=torch.float32)
    return dbias.new_empty(num_tokens), logits.new_empty(num_tokens, vocabulary), dbias


def scale_in_place(grad_logits: Tensor, dbias: Tensor, grad_loss: Tensor) -> None:
    """Multiply grad_logits (N, V) and the first V of dbias by grad_loss (), without a host sync."""
    size, vocabulary = grad_logits.numel(), grad_logits.shape[1]
    programs = min(SCALING_PROGRAMS, triton.cdiv(max(size, vocabulary), SCALING_BLOCK))
    cross_entropy_scale_kernel[(programs,)](
        grad_logits, dbias, grad_loss, size, vocabulary, BLOCK=SCALING_BLOCK, num_warps=4
    )


class CrossEntropy(torch.autograd.Function):
    """The loss (), and the per-token losses, without a gradient.

    bias (V,): the detached bias of the head that made the logits; its dbias is fused into the kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor | None, denominator: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # the losses have none, and zeros would have to be written
        losses, grad, dbias = cross_entropy_and_grad(logits, targets, weights, denominator)
        ctx.gradients = grad, dbias  # all that backward needs: the logits may be freed
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(losses)
        return dbias[-1].detach(), losses  # no view to autograd of what dbias may become

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("this loss has given its gradient away; to have it again, make the loss again")
        (grad, dbias), ctx.gradients = ctx.gradients, None
        scale_in_place(grad, dbias, grad_loss)
        return grad, None if ctx.bias_dtype is None else dbias[:-1].to(ctx.bias_dtype), None, None, None


def find_loss(
    logits: Tensor, targets: Tensor, weights: Tensor | None, denominator: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss (), Σ weights · losses / denominator, and the per-token losses (N,) in nats, without a gradient.

    For logits (N, V), as of `cross_entropy_and_grad`, with no other use: backward gives their gradient away, once.
    """
    found: tuple[Tensor, Tensor] = CrossEntropy.apply(logits, bias, targets, weights, denominator)
    return found


def can_run(vocabulary: int) -> bool:
    """Whether this pays. Unaligned rows, without vector loads, would come too slowly for so few programs."""
    return vocabulary <= MAX_VOCABULARY and vocabulary % VECTOR.value == 0

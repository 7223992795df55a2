"""The training loss on a GPU: one pass over the logits makes their nats, the loss and its gradient.

While a model learns, what each token's nats weigh is known before they are. So the gradient of the logits is made while
they are at hand, and the backward pass has only to scale it; by 1, as a rule, which it leaves undone.

Shapes: N tokens, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from some_moe.fast.ops.column_sum import sum_rows

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST_VOCABULARY = 8192  # a program holds a row in registers, and a sum for each of its columns
NEIGHBOURS = tl.constexpr(8)  # logits side by side that a thread loads at once
PER_WARP = 1024  # logits: 32 a thread
# Two for each multiprocessor of a large GPU: one keeps the memory busy while the other adds up its row. Where rows are
# shorter, and programs have fewer warps, there are up to four times as many.
PROGRAMS = 264
STAGES = 3  # of a program's loop: with three, its next rows are on their way while it works on one
SCALING_PROGRAMS, SCALING_BLOCK = 528, 4096


@triton.jit
def nats_loss_kernel(
    logits, targets, weights, denominator, nats, grad_logits, table, num_rows, V: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """nats = log Σ exp(logits) − logit of the target; grad_logits = weight / denominator · (softmax − onehot).

    table (programs, WIDTH): the sums of each program's rows of the gradient, before they are rounded, and in column V
    of weight / denominator · nats.
    """
    program = tl.program_id(0)
    outer, inner = tl.arange(0, BLOCK // NEIGHBOURS), tl.arange(0, NEIGHBOURS)
    column = outer[:, None] * NEIGHBOURS + inner[None, :]
    share = tl.div_rn(1.0, tl.load(denominator).to(tl.float32))
    sums = tl.zeros((BLOCK // NEIGHBOURS, NEIGHBOURS), dtype=tl.float32)
    loss = 0.0
    for row in tl.range(program, num_rows, tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(row, tl.int64) * V
        if BLOCK == V:
            x = tl.load(logits + start + column).to(tl.float32)
        else:
            x = tl.load(logits + start + column, mask=column < V, other=-float("inf")).to(tl.float32)
        # A target beyond the vocabulary gives NaN, never a number from another row.
        target = tl.load(targets + row).to(tl.int32)
        wanted = tl.load(logits + start + target, mask=(target >= 0) & (target < V), other=float("nan"))
        weight = share
        if weights is not None:
            weight *= tl.load(weights + row).to(tl.float32)
        weight = tl.where(target == -100, 0.0, weight)
        highest = tl.maximum(tl.max(tl.max(x, 1), 0), -1e38)  # finite, so that −inf is less
        power = tl.exp2((x - highest) * LOG2E)
        total = tl.sum(tl.sum(power, 1), 0)
        # As a product: a thread then knows where it is by a few numbers, and not by one for each of its logits.
        along = tl.where(outer == target // NEIGHBOURS, weight, 0.0)
        across = tl.where(inner == target % NEIGHBOURS, 1.0, 0.0)
        grad = power * (weight / total) - along[:, None] * across[None, :]
        if BLOCK == V:
            tl.store(grad_logits + start + column, grad.to(grad_logits.dtype.element_ty))
        else:
            tl.store(grad_logits + start + column, grad.to(grad_logits.dtype.element_ty), mask=column < V)
        sums += grad  # a thread's own columns: all in registers
        found = tl.where(target == -100, 0.0, highest - wanted.to(tl.float32) + tl.log(total))
        tl.store(nats + row, found)
        loss += weight * found
    here = table + program.to(tl.int64) * WIDTH
    tl.store(here + column, sums, mask=column < V)
    tl.store(here + V, loss)


@triton.jit
def scale_nats_kernel(grad_logits, sums, factor, size, vocabulary, BLOCK: tl.constexpr):
    """Multiply, in their places, grad_logits (size,) and the first sums (vocabulary,) by factor; not by 1."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        program = tl.program_id(0).to(tl.int64)
        for start in range(program * BLOCK, size, tl.num_programs(0) * BLOCK):
            place = start + tl.arange(0, BLOCK)
            scaled = tl.load(grad_logits + place, mask=place < size, other=0.0).to(tl.float32) * by
            tl.store(grad_logits + place, scaled.to(grad_logits.dtype.element_ty), mask=place < size)
        for start in range(program * BLOCK, vocabulary, tl.num_programs(0) * BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(sums + place, tl.load(sums + place, mask=place < vocabulary) * by, mask=place < vocabulary)


@torch.library.custom_op("some_moe::weigh_nats", mutates_args=())
def weigh_nats(
    logits: Tensor, targets: Tensor, weights: Tensor | None, denominator: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """logits (N, V) bf16 or float32, targets (N,) int64, weights (N,) bool or float, denominator () → three tensors:

    the nats of each target (N,) float32; the gradient of the logits, (N, V) in their type; and in float32 its sums (V,)
    before it is rounded, followed by the loss itself, Σ weights · nats / denominator. Without weights all are 1. A
    target of −100 counts nothing, as for torch's cross_entropy.
    """
    num_tokens, vocabulary = logits.shape
    block = max(NEIGHBOURS.value, triton.next_power_of_2(vocabulary))
    programs = min(num_tokens, PROGRAMS * min(4, LARGEST_VOCABULARY // block))
    width = (vocabulary // 16 + 1) * 16  # room for the loss, and rows that begin where wide loads may
    nats = torch.empty(num_tokens, dtype=torch.float32, device=logits.device)
    grad = logits.new_empty(num_tokens, vocabulary)
    table = torch.empty(programs, width, dtype=torch.float32, device=logits.device)
    if num_tokens > 0:
        nats_loss_kernel[(programs,)](
            logits.contiguous(), targets.contiguous(), None if weights is None else weights.contiguous(), denominator,
            nats, grad, table, num_tokens, V=vocabulary, BLOCK=block, WIDTH=width, STAGES=STAGES,
            num_warps=max(1, block // PER_WARP),
        )  # fmt: skip
    return nats, grad, sum_rows(table)[: vocabulary + 1]


@weigh_nats.register_fake
def _(
    logits: Tensor,
    targets: Tensor,  # noqa: ARG001
    weights: Tensor | None,  # noqa: ARG001
    denominator: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, vocabulary = logits.shape
    sums = logits.new_empty(vocabulary + 1, dtype=torch.float32)
    return sums.new_empty(num_tokens), logits.new_empty(num_tokens, vocabulary), sums


def scale_in_place(grad_logits: Tensor, sums: Tensor, factor: Tensor) -> None:
    """Multiply grad_logits (N, V) and the first V of sums by factor (), which the host need not know."""
    size, vocabulary = grad_logits.numel(), grad_logits.shape[1]
    programs = min(SCALING_PROGRAMS, triton.cdiv(max(size, vocabulary), SCALING_BLOCK))
    scale_nats_kernel[(programs,)](grad_logits, sums, factor, size, vocabulary, BLOCK=SCALING_BLOCK, num_warps=4)


class NatsLoss(torch.autograd.Function):
    """The loss (), and beside it, not for autograd, the nats of each target.

    bias (V,): one that is part of the logits already, and cut off from them for autograd; its gradient is the sums'.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor | None, denominator: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # the nats have none, and zeros in its place would have to be written
        nats, grad, sums = weigh_nats(logits, targets, weights, denominator)
        ctx.gradients = grad, sums  # all that backward needs: the logits may go
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(nats)
        return sums[-1].detach(), nats  # no view of the sums to autograd, which a bias's gradient may become

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("this loss has given its gradient away; to have it again, make the loss again")
        (grad, sums), ctx.gradients = ctx.gradients, None
        scale_in_place(grad, sums, grad_loss)
        return grad, None if ctx.bias_dtype is None else sums[:-1].to(ctx.bias_dtype), None, None, None


def find_loss(
    logits: Tensor, targets: Tensor, weights: Tensor | None, denominator: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss (), Σ weights · nats / denominator, and the nats (N,), which are a record: no gradient goes by them.

    For logits (N, V), as of `weigh_nats`, that nobody else needs the gradient of, since one backward pass uses it up.
    """
    found: tuple[Tensor, Tensor] = NatsLoss.apply(logits, bias, targets, weights, denominator)
    return found


def can_run(vocabulary: int) -> bool:
    """Whether this pays. Rows that begin where no wide load may would come too slowly for so few programs."""
    return vocabulary <= LARGEST_VOCABULARY and vocabulary % NEIGHBOURS.value == 0

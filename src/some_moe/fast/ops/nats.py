"""Cross-entropy on a GPU: the logits are read once each way, and nothing wide is stored but their gradient.

The kernel that makes this gradient also makes that of the bias within the logits, the sum of its rows.

Shapes: N tokens, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from some_moe.fast.ops.column_sum import sum_rows

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST_BLOCK = 8192  # logits a program holds in registers; a longer row is read block by block
# Backward, logits at a time: a thread of four warps has eight neighbours in each row, and so adds rows up by itself.
# And programs at most: as many as a large GPU runs at a time, so that their sums are little to write.
ROWS, COLUMNS, PROGRAMS = 4, 1024, 1024


@triton.jit
def nats_kernel(logits, targets, nats, lse, V: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program: nats = lse − logit of the target, lse = log Σ exp(logits)."""
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * V
    place = tl.arange(0, BLOCK)
    # Asked for early: one of these reads waits for the other, and the row arrives meanwhile. A target beyond the
    # vocabulary gives NaN, never a number from another row.
    target = tl.load(targets + row)
    wanted = tl.load(here + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    highest, total = -1e38, 0.0  # finite, so that a row may begin with −inf
    for start in range(0, V, BLOCK):
        x = tl.load(here + start + place, mask=start + place < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp2((highest - higher) * LOG2E) + tl.sum(tl.exp2((x - higher) * LOG2E), 0)
        highest = higher
    rest = tl.log(total)
    tl.store(nats + row, tl.where(target == -100, 0.0, highest - wanted + rest))
    tl.store(lse + row, highest + rest)


@triton.jit
def nats_backward_kernel(
    grad_nats, logits, targets, lse, grad_logits, table, num_rows, per_program, V: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """grad_logits = grad_nats · (softmax − onehot): some columns of per_program rows, ROWS at a time.

    table (programs, V): the sums of each program's rows, before they are rounded.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1).to(tl.int64)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, per_program, ROWS):
        row = group * per_program + start + tl.arange(0, ROWS)
        exists = row < num_rows
        keep = exists[:, None] & (column < V)[None, :]
        place = row[:, None] * V + column[None, :]
        x = tl.load(logits + place, mask=keep, other=-float("inf")).to(tl.float32)
        target = tl.load(targets + row, mask=exists, other=-100).to(tl.int32)
        grad = tl.where(target == -100, 0.0, tl.load(grad_nats + row, mask=exists, other=0.0))
        softmax = tl.exp2((x - tl.load(lse + row, mask=exists, other=0.0)[:, None]) * LOG2E)
        grad_x = grad[:, None] * (softmax - (column[None, :] == target[:, None]).to(tl.float32))
        tl.store(grad_logits + place, grad_x.to(grad_logits.dtype.element_ty), mask=keep)
        total += tl.sum(grad_x, 0)  # a thread's own columns: all in registers
    tl.store(table + group * V + column, total, mask=column < V)


def _block(vocabulary: int) -> tuple[int, int]:
    """Logits a program reads at once, and its warps: 64 logits a thread are few enough for registers."""
    block = min(LARGEST_BLOCK, triton.next_power_of_2(vocabulary))
    return block, max(1, block // 2048)


@torch.library.custom_op("some_moe::token_nats", mutates_args=())
def token_nats(logits: Tensor, targets: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """logits (N, V) bf16 or float32, targets (N,) int64 → nats of each target and lse, both (N,) float32.

    A target of −100 counts nothing, as for torch's cross_entropy. bias (V,): one that is part of the logits already,
    and cut off from them for autograd. It changes nothing here; backward it gets its gradient from the kernel that
    makes that of the logits, which nobody then has to read and sum.
    """
    num_tokens, vocabulary = logits.shape
    nats = torch.empty(num_tokens, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(nats)
    block, num_warps = _block(vocabulary)
    if num_tokens > 0:
        nats_kernel[(num_tokens,)](
            logits.contiguous(), targets.contiguous(), nats, lse, V=vocabulary, BLOCK=block, num_warps=num_warps
        )
    return nats, lse


@token_nats.register_fake
def _(logits: Tensor, targets: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    nats = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return nats, torch.empty_like(nats)


@torch.library.custom_op("some_moe::token_nats_backward", mutates_args=())
def token_nats_backward(grad_nats: Tensor, logits: Tensor, targets: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the logits (N, V), in their type, and its sums (V,) before it is rounded, in float32."""
    num_tokens, vocabulary = logits.shape
    grad = logits.new_empty(num_tokens, vocabulary)
    columns = min(COLUMNS, triton.next_power_of_2(vocabulary))
    parts = triton.cdiv(vocabulary, columns)
    per_program = triton.cdiv(triton.cdiv(num_tokens, max(1, PROGRAMS // parts)), ROWS) * ROWS
    groups = triton.cdiv(num_tokens, max(1, per_program))
    table = torch.empty(groups, vocabulary, dtype=torch.float32, device=logits.device)
    if num_tokens > 0:
        nats_backward_kernel[(parts, groups)](
            grad_nats, logits.contiguous(), targets.contiguous(), lse, grad, table, num_tokens, per_program,
            V=vocabulary, ROWS=ROWS, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return grad, sum_rows(table)


@token_nats_backward.register_fake
def _(grad_nats: Tensor, logits: Tensor, targets: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return logits.new_empty(logits.shape), logits.new_empty(logits.shape[1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, bias = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(logits, targets, lse)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad_nats: Tensor, _: Tensor) -> tuple[Tensor, None, Tensor | None]:
    grad, sums = token_nats_backward(grad_nats.contiguous(), *ctx.saved_tensors)
    return grad, None, None if ctx.bias_dtype is None else sums.to(ctx.bias_dtype)


token_nats.register_autograd(_backward, setup_context=_save)

"""Multi-tensor AdamW with gradient clipping: all parameters in one launch, however many tensors they are.

The global gradient norm comes first; the clip coefficient is applied inside the AdamW kernel, so that no gradient is
rewritten. The kernels find the tensors by a table of pointers. In eager mode gradients are allocated anew in each step,
and the table is uploaded with it; a captured CUDA graph keeps its own, at a fixed address. Deterministic: no atomics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import inf, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements a program takes
FIELDS = 8  # of a table's row: pointers to parameter, grad, exp_avg, exp_avg_sq and step; numel; decays; padding
ALIGNED = 16  # bytes: one vectorized access of a thread
MAX_CAPTURES = 64


@triton.jit
def load_pointer(table, tensor, FIELD: tl.constexpr, FIELDS: tl.constexpr):
    """The pointer to a float32 tensor, from its row of the table."""
    return tl.multiple_of(tl.load(table + tensor * FIELDS + FIELD).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def sum_squares(grads, at, size, UNMASKED: tl.constexpr):
    """The sum of squares of the gradients at these offsets. UNMASKED: all are in bounds, so loads are wide."""
    grad = tl.load(grads + at) if UNMASKED else tl.load(grads + at, mask=at < size, other=0.0)
    return tl.sum(grad * grad, 0)


@triton.jit
def grad_norm_kernel(table, blocks, partial, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    """partial (programs,): the sum of squares of one block of a gradient."""
    tensor = tl.load(blocks + tl.program_id(0) * 2)
    first = tl.load(blocks + tl.program_id(0) * 2 + 1).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    size = tl.load(table + tensor * FIELDS + 5)
    grads = load_pointer(table, tensor, 1, FIELDS)
    if first + BLOCK <= size:
        tl.store(partial + tl.program_id(0), sum_squares(grads, at, size, True))
    else:
        tl.store(partial + tl.program_id(0), sum_squares(grads, at, size, False))


@triton.jit
def clip_coef_kernel(partial, norm, clip_coef, num_partial, max_norm, BLOCK: tl.constexpr):
    """norm (): of all gradients. clip_coef (): min(1, max_norm / norm), as in torch's clip_grad_norm_."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, num_partial, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(partial + at, mask=at < num_partial, other=0.0)
    total_norm = tl.sqrt(tl.sum(total, 0))
    tl.store(norm, total_norm)
    # Written so that a NaN norm gives a NaN coefficient, as torch's does.
    coef = max_norm / (total_norm + 1e-6)
    tl.store(clip_coef, tl.where(coef > 1.0, 1.0, coef))


@triton.jit
def update_block(
    params, grads, exp_avgs, exp_avg_sqs, at, size, clip_coef, step_size, correction2, decay, beta1, beta2, eps,
    UNMASKED: tl.constexpr,
):  # fmt: skip
    """The AdamW update of one block. UNMASKED: as in `sum_squares`."""
    keep = None if UNMASKED else at < size
    other = None if UNMASKED else 0.0
    x = tl.load(params + at, mask=keep, other=other)
    grad = tl.load(grads + at, mask=keep, other=other) * clip_coef
    exp_avg = tl.load(exp_avgs + at, mask=keep, other=other)
    exp_avg_sq = tl.load(exp_avg_sqs + at, mask=keep, other=other)
    exp_avg = beta1 * exp_avg + (1.0 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * grad * grad
    x = x * decay - step_size * exp_avg / (tl.sqrt(exp_avg_sq) / correction2 + eps)
    tl.store(params + at, x, mask=keep)
    tl.store(exp_avgs + at, exp_avg, mask=keep)
    tl.store(exp_avg_sqs + at, exp_avg_sq, mask=keep)


@triton.jit
def adamw_kernel(
    table, blocks, lr, clip_coef, log_beta1, log_beta2, beta1, beta2, eps, weight_decay, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """AdamW on one block of one parameter. lr and clip_coef () are on the device; logs are to base 2."""
    tensor = tl.load(blocks + tl.program_id(0) * 2)
    first = tl.load(blocks + tl.program_id(0) * 2 + 1).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    size = tl.load(table + tensor * FIELDS + 5)
    params, grads = load_pointer(table, tensor, 0, FIELDS), load_pointer(table, tensor, 1, FIELDS)
    exp_avgs, exp_avg_sqs = load_pointer(table, tensor, 2, FIELDS), load_pointer(table, tensor, 3, FIELDS)
    step = tl.load(tl.load(table + tensor * FIELDS + 4).to(tl.pointer_type(tl.float32)))
    coef, lr_now = tl.load(clip_coef), tl.load(lr)
    decay = 1.0 - lr_now * weight_decay * tl.load(table + tensor * FIELDS + 6).to(tl.float32)
    step_size = lr_now / (1.0 - tl.exp2(step * log_beta1))
    correction2 = tl.sqrt(1.0 - tl.exp2(step * log_beta2))
    if first + BLOCK <= size:
        update_block(
            params, grads, exp_avgs, exp_avg_sqs, at, size, coef, step_size, correction2, decay, beta1, beta2, eps,
            True,
        )  # fmt: skip
    else:
        update_block(
            params, grads, exp_avgs, exp_avg_sqs, at, size, coef, step_size, correction2, decay, beta1, beta2, eps,
            False,
        )  # fmt: skip


@cache
def list_blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(programs, 2) int32: the tensor that each program works on, and which of its blocks."""
    rows = [(tensor, block) for tensor, size in enumerate(sizes) for block in range(triton.cdiv(size, BLOCK))]
    return torch.tensor(rows, dtype=torch.int32).pin_memory().to(device, non_blocking=True)


class PointerTables:
    """Uploads pointer tables. A captured graph reads one at a fixed address: its gradients are static."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.memory: Tensor | None = None  # on the device; kept alive here, for captured graphs go on reading it
        self.free: list[Tensor] = []  # parts of it, for captures yet to come
        self.pending: list[tuple[Tensor, Tensor]] = []  # parts that graphs read, and what they shall hold

    def upload(self, rows: list[list[int]], device: torch.device) -> Tensor:
        """rows on the device, asynchronously. What a capture reads is valid once `fill_captured` was called."""
        table = torch.tensor(rows, dtype=torch.int64)
        if torch.cuda.is_current_stream_capturing():
            part = self.free.pop()[: len(rows)]
            self.pending.append((part, table))
            return part
        if self.memory is None:  # allocated before any capture
            self.memory = table.new_empty(MAX_CAPTURES, self.max_rows, FIELDS, device=device)
            self.free = list(self.memory)
        return table.pin_memory().to(device, non_blocking=True)

    def fill_captured(self) -> None:
        """Fill the tables of captured graphs, before they are replayed."""
        for part, table in self.pending:
            part.copy_(table)
        self.pending.clear()


@dataclass(frozen=True)
class ParamState:
    """A parameter, its gradient and its optimizer state."""

    parameter: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor  # () float32, incremented already
    decays: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.parameter, self.grad, self.exp_avg, self.exp_avg_sq

    def list_fields(self) -> list[int]:
        addresses = [tensor.data_ptr() for tensor in (*self.tensors, self.step)]
        return [*addresses, self.parameter.numel(), int(self.decays), 0]


def can_run(states: Sequence[ParamState]) -> bool:
    """Whether the kernels take these: on a GPU, float32, contiguous, 16-byte aligned."""
    return bool(states) and all(
        tensor.is_cuda and tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0
        for tensor in chain.from_iterable(state.tensors for state in states)
    )


def clip_and_step(
    states: Sequence[ParamState], tables: PointerTables, lr: Tensor, *, max_norm: float, betas: tuple[float, float],
    eps: float, weight_decay: float,
) -> Tensor:  # fmt: skip
    """Clip the global gradient norm to `max_norm` and take an AdamW step. Returns the norm () before clipping."""
    device = states[0].parameter.device
    table = tables.upload([state.list_fields() for state in states], device)
    blocks = list_blocks(tuple(state.parameter.numel() for state in states), device)
    partial = torch.empty(len(blocks), dtype=torch.float32, device=device)
    norm, clip_coef = partial.new_empty(()), partial.new_empty(())
    grad_norm_kernel[(len(blocks),)](table, blocks, partial, BLOCK=BLOCK, FIELDS=FIELDS, num_warps=8)
    clip_coef_kernel[(1,)](partial, norm, clip_coef, len(blocks), max_norm, BLOCK=4096, num_warps=16)
    logs = [log2(beta) if beta else -inf for beta in betas]
    adamw_kernel[(len(blocks),)](
        table, blocks, lr, clip_coef, *logs, *betas, eps, weight_decay, BLOCK=BLOCK, FIELDS=FIELDS, num_warps=8
    )
    return norm

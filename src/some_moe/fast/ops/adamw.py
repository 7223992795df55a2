"""AdamW with clipping on a GPU: all parameters in one pass, however many tensors they are.

The gradients' norm comes first; the factor that it asks for is applied on the way, so that no gradient is rewritten. A
table tells the kernels where the tensors lie. Gradients lie elsewhere in every ordinary step, so the table travels with
each; a recorded step keeps its own. The same bits every time: no atomics.
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

BLOCK = 2048  # numbers a program takes
WORDS = 8  # of a table's row: parameter, gradient, mean, square, step (addresses), size, whether it decays, nothing
ALIGNED = 16  # bytes: what one thread moves at a time
MOST_RECORDINGS = 64


@triton.jit
def place(table, tensor, WORD: tl.constexpr, WORDS: tl.constexpr):
    """Where a tensor of float32 begins."""
    return tl.multiple_of(tl.load(table + tensor * WORDS + WORD).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def sum_squares(grads, at, size, WHOLE: tl.constexpr):
    """The sum of squares of the gradients at these places. WHOLE: all of them exist, which makes for wide loads."""
    grad = tl.load(grads + at) if WHOLE else tl.load(grads + at, mask=at < size, other=0.0)
    return tl.sum(grad * grad, 0)


@triton.jit
def squares_kernel(table, blocks, partial, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """partial (programs,): the sum of squares of one block of a gradient."""
    tensor = tl.load(blocks + tl.program_id(0) * 2)
    first = tl.load(blocks + tl.program_id(0) * 2 + 1).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    size = tl.load(table + tensor * WORDS + 5)
    grads = place(table, tensor, 1, WORDS)
    if first + BLOCK <= size:
        tl.store(partial + tl.program_id(0), sum_squares(grads, at, size, True))
    else:
        tl.store(partial + tl.program_id(0), sum_squares(grads, at, size, False))


@triton.jit
def clip_kernel(partial, norm, factor, number, most, BLOCK: tl.constexpr):
    """norm (): of all gradients. factor (): what brings it down to `most`, or 1, as torch's clip_grad_norm_ has it."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, number, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(partial + at, mask=at < number, other=0.0)
    length = tl.sqrt(tl.sum(total, 0))
    tl.store(norm, length)
    # Written so that a norm that is no number leaves none behind, as torch's does.
    share = most / (length + 1e-6)
    tl.store(factor, tl.where(share > 1.0, 1.0, share))


@triton.jit
def move(
    parameters, grads, means, squares, at, size, factor, step_size, second, kept, beta1, beta2, eps,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """One block: averages of the gradient and of its square, and the parameter's step. WHOLE: as in `sum_squares`."""
    keep = None if WHOLE else at < size
    other = None if WHOLE else 0.0
    x = tl.load(parameters + at, mask=keep, other=other)
    grad = tl.load(grads + at, mask=keep, other=other) * factor
    mean = tl.load(means + at, mask=keep, other=other)
    square = tl.load(squares + at, mask=keep, other=other)
    mean = beta1 * mean + (1.0 - beta1) * grad
    square = beta2 * square + (1.0 - beta2) * grad * grad
    x = x * kept - step_size * mean / (tl.sqrt(square) / second + eps)
    tl.store(parameters + at, x, mask=keep)
    tl.store(means + at, mean, mask=keep)
    tl.store(squares + at, square, mask=keep)


@triton.jit
def adam_kernel(
    table, blocks, rate, factor, log_beta1, log_beta2, beta1, beta2, eps, decay, BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Move one block of a parameter, and its two averages. rate and factor () are on the device; logs are to base 2."""
    tensor = tl.load(blocks + tl.program_id(0) * 2)
    first = tl.load(blocks + tl.program_id(0) * 2 + 1).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    size = tl.load(table + tensor * WORDS + 5)
    parameters, grads = place(table, tensor, 0, WORDS), place(table, tensor, 1, WORDS)
    means, squares = place(table, tensor, 2, WORDS), place(table, tensor, 3, WORDS)
    step = tl.load(tl.load(table + tensor * WORDS + 4).to(tl.pointer_type(tl.float32)))
    scale, speed = tl.load(factor), tl.load(rate)
    kept = 1.0 - speed * decay * tl.load(table + tensor * WORDS + 6).to(tl.float32)
    step_size = speed / (1.0 - tl.exp2(step * log_beta1))
    second = tl.sqrt(1.0 - tl.exp2(step * log_beta2))
    if first + BLOCK <= size:
        move(parameters, grads, means, squares, at, size, scale, step_size, second, kept, beta1, beta2, eps, True)
    else:
        move(parameters, grads, means, squares, at, size, scale, step_size, second, kept, beta1, beta2, eps, False)


@cache
def list_blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(programs, 2) int32: the tensor that each program works on, and which of its blocks."""
    rows = [(tensor, block) for tensor, size in enumerate(sizes) for block in range(triton.cdiv(size, BLOCK))]
    return torch.tensor(rows, dtype=torch.int32).pin_memory().to(device, non_blocking=True)


class Tables:
    """Brings tables to the device. A recorded step reads one that lies there for good: its gradients do not move."""

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.memory: Tensor | None = None  # on the device; kept here, for recordings go on reading it
        self.rooms: list[Tensor] = []  # parts of it, for recordings yet to come
        self.promised: list[tuple[Tensor, Tensor]] = []  # rooms of recordings, and what they shall hold

    def bring(self, rows: list[list[int]], device: torch.device) -> Tensor:
        """rows on the device, without waiting. What a recording reads is there once `deliver` was called."""
        table = torch.tensor(rows, dtype=torch.int64)
        if torch.cuda.is_current_stream_capturing():
            room = self.rooms.pop()[: len(rows)]
            self.promised.append((room, table))
            return room
        if self.memory is None:  # while it may be asked for
            self.memory = table.new_empty(MOST_RECORDINGS, self.most_rows, WORDS, device=device)
            self.rooms = list(self.memory)
        return table.pin_memory().to(device, non_blocking=True)

    def deliver(self) -> None:
        """Fill the tables of what was recorded, before it is replayed."""
        for room, table in self.promised:
            room.copy_(table)
        self.promised.clear()


@dataclass(frozen=True)
class Moved:
    """A parameter, and what belongs to it."""

    parameter: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor  # () float32, counted already
    decays: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.parameter, self.grad, self.mean, self.square

    def list_words(self) -> list[int]:
        addresses = [tensor.data_ptr() for tensor in (*self.tensors, self.step)]
        return [*addresses, self.parameter.numel(), int(self.decays), 0]


def can_move(moved: Sequence[Moved]) -> bool:
    """Whether the kernels take these: on a GPU, in float32, in one piece each, and aligned."""
    return bool(moved) and all(
        tensor.is_cuda and tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0
        for tensor in chain.from_iterable(each.tensors for each in moved)
    )


def clip_and_move(
    moved: Sequence[Moved], tables: Tables, rate: Tensor, *, most: float, betas: tuple[float, float], eps: float,
    decay: float,
) -> Tensor:  # fmt: skip
    """Clip all gradients to a norm of `most` and take a step of AdamW. Returns the norm () before."""
    device = moved[0].parameter.device
    table = tables.bring([each.list_words() for each in moved], device)
    blocks = list_blocks(tuple(each.parameter.numel() for each in moved), device)
    partial = torch.empty(len(blocks), dtype=torch.float32, device=device)
    norm, factor = partial.new_empty(()), partial.new_empty(())
    squares_kernel[(len(blocks),)](table, blocks, partial, BLOCK=BLOCK, WORDS=WORDS, num_warps=8)
    clip_kernel[(1,)](partial, norm, factor, len(blocks), most, BLOCK=4096, num_warps=16)
    logs = [log2(beta) if beta else -inf for beta in betas]
    adam_kernel[(len(blocks),)](
        table, blocks, rate, factor, *logs, *betas, eps, decay, BLOCK=BLOCK, WORDS=WORDS, num_warps=8
    )
    return norm

"""Cross-entropy on a GPU: the logits are read once each way, and nothing wide is stored but their gradient.

Shapes: N tokens, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST_BLOCK = 8192  # logits a program holds in registers; a longer row is read block by block


@triton.jit
def nats_kernel(logits, targets, nats, lse, V: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program: nats = lse − logit of the target, lse = log Σ exp(logits)."""
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * V
    place = tl.arange(0, BLOCK)
    highest, total = -1e38, 0.0  # finite, so that a row may begin with −inf
    for start in range(0, V, BLOCK):
        x = tl.load(here + start + place, mask=start + place < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp2((highest - higher) * LOG2E) + tl.sum(tl.exp2((x - higher) * LOG2E), 0)
        highest = higher
    target = tl.load(targets + row)
    # A target beyond the vocabulary gives NaN, never a number from another row.
    wanted = tl.load(here + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    rest = tl.log(total)
    tl.store(nats + row, tl.where(target == -100, 0.0, highest - wanted + rest))
    tl.store(lse + row, highest + rest)


@triton.jit
def nats_backward_kernel(
    grad_nats, logits, targets, lse, grad_logits, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of one row a program: grad_logits = grad_nats · (softmax − onehot)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + place, mask=place < V, other=-float("inf")).to(tl.float32)
    target = tl.load(targets + row)
    grad = tl.where(target == -100, 0.0, tl.load(grad_nats + row))
    softmax = tl.exp2((x - tl.load(lse + row)) * LOG2E)
    grad_x = grad * (softmax - (place == target).to(tl.float32))
    tl.store(grad_logits + row * V + place, grad_x.to(grad_logits.dtype.element_ty), mask=place < V)


def _block(vocabulary: int) -> tuple[int, int]:
    """Logits a program reads at once, and its warps: 32 logits a thread are few enough for registers."""
    block = min(LARGEST_BLOCK, triton.next_power_of_2(vocabulary))
    return block, max(1, block // 1024)


@torch.library.custom_op("some_moe::token_nats", mutates_args=())
def token_nats(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits (N, V) bf16 or float32, targets (N,) int64 → nats of each target and lse, both (N,) float32.

    A target of −100 counts nothing, as for torch's cross_entropy.
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
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    nats = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return nats, torch.empty_like(nats)


@torch.library.custom_op("some_moe::token_nats_backward", mutates_args=())
def token_nats_backward(grad_nats: Tensor, logits: Tensor, targets: Tensor, lse: Tensor) -> Tensor:
    """The gradient of the logits (N, V), in their type."""
    num_tokens, vocabulary = logits.shape
    grad = logits.new_empty(num_tokens, vocabulary)
    block, num_warps = _block(vocabulary)
    if num_tokens > 0:
        nats_backward_kernel[(num_tokens, triton.cdiv(vocabulary, block))](
            grad_nats, logits.contiguous(), targets.contiguous(), lse, grad, V=vocabulary, BLOCK=block,
            num_warps=num_warps,
        )  # fmt: skip
    return grad


@token_nats_backward.register_fake
def _(grad_nats: Tensor, logits: Tensor, targets: Tensor, lse: Tensor) -> Tensor:  # noqa: ARG001
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(logits, targets, lse)


def _backward(ctx: Any, grad_nats: Tensor, _: Tensor) -> tuple[Tensor, None]:
    return token_nats_backward(grad_nats.contiguous(), *ctx.saved_tensors), None


token_nats.register_autograd(_backward, setup_context=_save)

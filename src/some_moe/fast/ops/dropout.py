"""Dropout by hash in one kernel: what falls away is hashed where it is needed, and never stored.

In plain torch the hash is some thirty kernels, over as many integers as there are elements: longer than the rest of a
small model's step. The gradient goes the same way, by the same kernel.

Shapes: B rows, T positions, D channels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from some_moe.fast.ops.opaque import opaque
from some_moe.fast.ops.sampling import hash_words

ELEMENTS = 2048  # of one program


@triton.jit
def dropout_kernel(
    x, y, rows, salt, place, num_tokens, time, scale, limit, D: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr
):
    """y = x · scale where `model.dropout` keeps an element of x (B, T, D), else 0. place (2,): its key words."""
    token, channel = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PADDED)
    first = tl.load(salt).to(tl.uint32, bitcast=True)
    second = tl.load(salt + 1).to(tl.uint32, bitcast=True)
    first_key = first ^ tl.load(place).to(tl.uint32, bitcast=True)
    second_key = second ^ tl.load(place + 1).to(tl.uint32, bitcast=True)
    row = tl.load(rows + token // time, mask=token < num_tokens, other=0).to(tl.uint32)
    token_words = hash_words((token % time).to(tl.uint32), hash_words(row, first_key, second_key), second)
    words = hash_words(channel.to(tl.uint32)[None, :], token_words[:, None], first)
    kept = (words >> 8).to(tl.int32) >= limit
    element = token.to(tl.int64)[:, None] * D + channel[None, :]
    mask = (token < num_tokens)[:, None] & (channel < D)[None, :]
    value = tl.load(x + element, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(y + element, tl.where(kept, value, 0.0).to(y.dtype.element_ty), mask=mask)


@opaque("some_moe::dropout")
def run_dropout(x: Tensor, rows: Tensor, salt: Tensor, place: Tensor, share: float) -> Tensor:
    """x (B, T, D) with some elements zero; rows (B,), salt (2,): see `TokenInfo`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    num_tokens, padded = x.shape[0] * x.shape[1], triton.next_power_of_2(x.shape[2])
    tokens = max(1, ELEMENTS // padded)
    dropout_kernel[(triton.cdiv(num_tokens, tokens),)](
        x, y, rows, salt, place, num_tokens, x.shape[1], 1 / (1 - share), round(share * 2**24), D=x.shape[2],
        PADDED=padded, TOKENS=tokens,
    )  # fmt: skip
    return y


@run_dropout.register_fake
def _(x: Tensor, rows: Tensor, salt: Tensor, place: Tensor, share: float) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class HashDropout(torch.autograd.Function):
    """`run_dropout` both ways: a gradient passes where its element did."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, salt: Tensor, place: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(rows, salt, place)
        ctx.share = share
        return run_dropout(x, rows, salt, place, share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return run_dropout(grad, *ctx.saved_tensors, ctx.share), None, None, None, None


def dropout(x: Tensor, rows: Tensor, salt: Tensor, place: Tensor, share: float) -> Tensor:
    found: Tensor = HashDropout.apply(x, rows, salt, place, share)
    return found

"""Rotary positions on a GPU: queries and keys cut out of one product and turned, in one kernel each way.

Values are not turned, and so not copied: forward they stay where they are in the product. Their gradient is put
beside those of queries and keys by the kernel that turns these back.

Shapes: B rows, T positions, H heads of width W, D = H·W.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotate_kernel(
    qkv, cos, sin, q, k, v, num_tokens, T, angle_row,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Forward: qkv (B·T, 3·D) → q, k turned. Backward: the gradients of q, k, v → that of qkv.

    q_b, q_t, q_h are q's strides by row, position and head; within a head elements are neighbours.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, time = (token // T)[:, None], (token % T)[:, None]
    pair = tl.arange(0, PADDED)[None, :]
    head, place = pair // (W // 2), pair % (W // 2)
    keep = (token < num_tokens)[:, None] & (pair < H * (W // 2))
    angle = row * angle_row + time * (W // 2) + place
    c = tl.load(cos + angle, mask=keep, other=0.0)
    s = tl.load(sin + angle, mask=keep, other=0.0)
    whole = qkv + token[:, None] * (3 * H * W) + head * W + place
    part = q + row * q_b + time * q_t + head * q_h + place
    turn(whole, part, c, s, keep, W, BACKWARD)
    part = k + row * k_b + time * k_t + head * k_h + place
    turn(whole + H * W, part, c, s, keep, W, BACKWARD)
    if BACKWARD:
        whole += 2 * H * W
        part = v + row * v_b + time * v_t + head * v_h + place
        tl.store(whole, tl.load(part, mask=keep), mask=keep)
        tl.store(whole + W // 2, tl.load(part + W // 2, mask=keep), mask=keep)


@triton.jit
def turn(whole, part, c, s, keep, W: tl.constexpr, BACKWARD: tl.constexpr):
    """Turn each pair (i, i + W/2) by its angle from `whole` to `part`, or back."""
    if BACKWARD:
        left = tl.load(part, mask=keep, other=0.0).to(tl.float32)
        right = tl.load(part + W // 2, mask=keep, other=0.0).to(tl.float32)
        tl.store(whole, (left * c + right * s).to(whole.dtype.element_ty), mask=keep)
        tl.store(whole + W // 2, (right * c - left * s).to(whole.dtype.element_ty), mask=keep)
    else:
        left = tl.load(whole, mask=keep, other=0.0).to(tl.float32)
        right = tl.load(whole + W // 2, mask=keep, other=0.0).to(tl.float32)
        tl.store(part, (left * c - right * s).to(part.dtype.element_ty), mask=keep)
        tl.store(part + W // 2, (left * s + right * c).to(part.dtype.element_ty), mask=keep)


def _launch(qkv: Tensor, cos: Tensor, sin: Tensor, parts: tuple[Tensor, ...], *, backward: bool) -> None:
    batch, heads, time, width = parts[0].shape
    strides = [part.stride(axis) for part in parts for axis in (0, 2, 1)]
    padded = triton.next_power_of_2(heads * width // 2)
    block = max(1, 1024 // padded)
    cos, sin = cos.contiguous(), sin.contiguous()
    rotate_kernel[(triton.cdiv(batch * time, block),)](
        qkv, cos, sin, *parts, batch * time, time, 0 if len(cos) == 1 else cos.stride(0), *strides,
        H=heads, W=width, BLOCK=block, PADDED=padded, BACKWARD=backward,
    )  # fmt: skip


@torch.library.custom_op("some_moe::rotate_qk", mutates_args=())
def rotate_qk(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """qkv (B, T, 3·D), cos and sin (B or 1, 1, T, W/2) → q, k (B, H, T, W), stored as (B, T, H, W)."""
    batch, time, wide = qkv.shape
    qkv = qkv.contiguous()
    q, k = (qkv.new_empty(batch, time, num_heads, wide // 3 // num_heads).transpose(1, 2) for _ in range(2))
    _launch(qkv, cos, sin, (q, k, view_values(qkv, num_heads)), backward=False)
    return q, k


@rotate_qk.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    batch, time, wide = qkv.shape
    shape = (batch, time, num_heads, wide // 3 // num_heads)
    return qkv.new_empty(shape).transpose(1, 2), qkv.new_empty(shape).transpose(1, 2)


@torch.library.custom_op("some_moe::rotate_qkv_backward", mutates_args=())
def rotate_qkv_backward(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of qkv (B, T, 3·D) from those of q, k, v (B, H, T, W)."""
    qkv = _empty_product(q)
    _launch(qkv, cos, sin, tuple(with_neighbours(part) for part in (q, k, v)), backward=True)
    return qkv


@rotate_qkv_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: ARG001
    return _empty_product(q)


def _empty_product(q: Tensor) -> Tensor:
    batch, heads, time, width = q.shape
    return q.new_empty(batch, time, 3 * heads * width)


def with_neighbours(part: Tensor) -> Tensor:
    """The same numbers with a head's elements side by side."""
    return part if part.stride(-1) == 1 else part.contiguous()


class RotateQkv(torch.autograd.Function):
    """Both ways as one node of autograd. A custom op may not return a view of its input, as the values are; and cut
    out beside such an op, they would bring a gradient padded with zeros, and a sum of two as wide as qkv.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = rotate_qk(qkv, cos, sin, num_heads)
        return q, k, view_values(qkv, num_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return rotate_qkv_backward(*grads, *ctx.saved_tensors), None, None, None


def view_values(qkv: Tensor, num_heads: int) -> Tensor:
    """The values (B, H, T, W) within qkv (B, T, 3·D)."""
    return qkv.unflatten(-1, (3, num_heads, -1))[:, :, 2].transpose(1, 2)


def rotate_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv (B, T, 3·D), cos and sin (B or 1, 1, T, W/2) → q, k turned and v (B, H, T, W), each stored by (B, T, H, W).

    v is a view of qkv.
    """
    q, k, v = RotateQkv.apply(qkv, cos, sin, num_heads)
    return q, k, v

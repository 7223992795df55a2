"""Rotary embeddings (RoPE) of a packed QKV projection: queries and keys are sliced and rotated in one kernel each way.

Values are not rotated, and so not copied: they stay a view of qkv. The backward kernel rotates the gradients of queries
and keys back and packs all three into that of qkv; the projections' dbias is fused into it.

Shapes: B rows, T positions, H heads of width W, D = H·W.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from some_moe.fast.ops.column_sum import sum_rows
from some_moe.fast.ops.opaque import opaque

PROGRAMS = 1056  # of the backward kernel at most: each has partial sums of its own tokens


@triton.jit
def find_tokens(token, T, PADDED: tl.constexpr, W: tl.constexpr):
    """Of tokens (BLOCK,): row and position (BLOCK, 1) each; of pairs (1, PADDED): head, and index i of the left one."""
    pair = tl.arange(0, PADDED)[None, :]
    return (token // T)[:, None], (token % T)[:, None], pair // (W // 2), pair % (W // 2)


@triton.jit
def rotary_kernel(
    qkv, cos, sin, q, k, num_tokens, T, angle_row, q_b, q_t, q_h, k_b, k_t, k_h,
    H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """qkv (B·T, 3·D) → q, k rotated. q_b, q_t, q_h are q's strides by row, position and head; heads are contiguous."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, time, head, i = find_tokens(token, T, PADDED, W)
    mask = (token < num_tokens)[:, None] & (head < H)
    angle = row * angle_row + time * (W // 2) + i
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    qkv_ptr = qkv + token[:, None] * (3 * H * W) + head * W + i
    rotate(qkv_ptr, q + row * q_b + time * q_t + head * q_h + i, c, s, mask, W)
    rotate(qkv_ptr + H * W, k + row * k_b + time * k_t + head * k_h + i, c, s, mask, W)


@triton.jit
def rotate(qkv_ptr, part, c, s, mask, W: tl.constexpr):
    """Rotate each pair (i, i + W/2) by its angle, from qkv to q or k."""
    left, right = load_pair(qkv_ptr, mask, W)
    store_pair(part, left * c - right * s, left * s + right * c, mask, W)


@triton.jit
def load_pair(at, mask, W: tl.constexpr):
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return left, tl.load(at + W // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_pair(at, left, right, mask, W: tl.constexpr):
    tl.store(at, left.to(at.dtype.element_ty), mask=mask)
    tl.store(at + W // 2, right.to(at.dtype.element_ty), mask=mask)


@triton.jit
def rotary_backward_kernel(
    qkv, cos, sin, q, k, v, partial, num_tokens, per_program, T, angle_row,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k, v → that of qkv (B·T, 3·D). partial (programs, 3·D): the column sums of each program's
    rows before rounding.
    """
    first = tl.program_id(0).to(tl.int64) * per_program
    q_left = tl.zeros((BLOCK, PADDED), dtype=tl.float32)
    q_right, k_left, k_right, v_left, v_right = q_left, q_left, q_left, q_left, q_left
    for start in range(0, per_program, BLOCK):
        token = first + start + tl.arange(0, BLOCK)
        row, time, head, i = find_tokens(token, T, PADDED, W)
        mask = (token < num_tokens)[:, None] & (head < H)
        angle = row * angle_row + time * (W // 2) + i
        c = tl.load(cos + angle, mask=mask, other=0.0)
        s = tl.load(sin + angle, mask=mask, other=0.0)
        # All loads come before the stores, so that their latencies overlap.
        q_1, q_2 = load_pair(q + row * q_b + time * q_t + head * q_h + i, mask, W)
        k_1, k_2 = load_pair(k + row * k_b + time * k_t + head * k_h + i, mask, W)
        v_1, v_2 = load_pair(v + row * v_b + time * v_t + head * v_h + i, mask, W)
        q_1, q_2 = q_1 * c + q_2 * s, q_2 * c - q_1 * s
        k_1, k_2 = k_1 * c + k_2 * s, k_2 * c - k_1 * s
        qkv_ptr = qkv + token[:, None] * (3 * H * W) + head * W + i
        store_pair(qkv_ptr, q_1, q_2, mask, W)
        store_pair(qkv_ptr + H * W, k_1, k_2, mask, W)
        store_pair(qkv_ptr + 2 * H * W, v_1, v_2, mask, W)
        q_left, q_right = q_left + q_1, q_right + q_2
        k_left, k_right = k_left + k_1, k_right + k_2
        v_left, v_right = v_left + v_1, v_right + v_2
    pair = tl.arange(0, PADDED)
    mask = pair < H * (W // 2)
    here = partial + tl.program_id(0) * (3 * H * W) + pair // (W // 2) * W + pair % (W // 2)
    store_pair(here, tl.sum(q_left, 0), tl.sum(q_right, 0), mask, W)
    store_pair(here + H * W, tl.sum(k_left, 0), tl.sum(k_right, 0), mask, W)
    store_pair(here + 2 * H * W, tl.sum(v_left, 0), tl.sum(v_right, 0), mask, W)


def list_strides(*parts: Tensor) -> list[int]:
    """Of each part (B, H, T, W): by row, position and head."""
    return [part.stride(axis) for part in parts for axis in (0, 2, 1)]


def list_angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int]:
    """cos and sin (B or 1, 1, T, W/2), contiguous, and their stride by row."""
    cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, 0 if len(cos) == 1 else cos.stride(0)


@opaque("some_moe::rotate_qk")
def rotate_qk(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """qkv (B, T, 3·D), cos and sin (B or 1, 1, T, W/2) → q, k (B, H, T, W), stored as (B, T, H, W)."""
    batch, time, wide = qkv.shape
    width = wide // 3 // num_heads
    q, k = (qkv.new_empty(batch, time, num_heads, width).transpose(1, 2) for _ in range(2))
    padded = triton.next_power_of_2(num_heads * width // 2)
    block = max(1, 1024 // padded)
    cos, sin, angle_row = list_angles(cos, sin)
    rotary_kernel[(triton.cdiv(batch * time, block),)](
        qkv.contiguous(), cos, sin, q, k, batch * time, time, angle_row, *list_strides(q, k), H=num_heads, W=width,
        BLOCK=block, PADDED=padded,
    )  # fmt: skip
    return q, k


@rotate_qk.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    batch, time, wide = qkv.shape
    shape = (batch, time, num_heads, wide // 3 // num_heads)
    return qkv.new_empty(shape).transpose(1, 2), qkv.new_empty(shape).transpose(1, 2)


@opaque("some_moe::rotate_qkv_backward")
def rotate_qkv_backward(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of qkv (B, T, 3·D) from those of q, k, v (B, H, T, W); and dbias (3·D), its column sums, float32."""
    batch, heads, time, width = q.shape
    num_tokens, wide = batch * time, 3 * heads * width
    qkv = q.new_empty(batch, time, wide)
    padded = triton.next_power_of_2(heads * width // 2)
    # One warp has whole rows, up to 512 pairs: no cross-warp synchronization.
    block = max(1, 512 // padded)
    per_program = max(1, triton.cdiv(triton.cdiv(num_tokens, PROGRAMS), block)) * block
    programs = triton.cdiv(num_tokens, per_program)
    partial = torch.empty(programs, wide, dtype=torch.float32, device=q.device)
    cos, sin, angle_row = list_angles(cos, sin)
    parts = tuple(with_contiguous_heads(part) for part in (q, k, v))
    rotary_backward_kernel[(programs,)](
        qkv, cos, sin, *parts, partial, num_tokens, per_program, time, angle_row, *list_strides(*parts), H=heads,
        W=width, BLOCK=block, PADDED=padded, num_warps=max(1, padded // 512),
    )  # fmt: skip
    return qkv, sum_rows(partial)


@rotate_qkv_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    batch, heads, time, width = q.shape
    wide = 3 * heads * width
    return q.new_empty(batch, time, wide), q.new_empty(wide, dtype=torch.float32)


def with_contiguous_heads(part: Tensor) -> Tensor:
    """The same values with contiguous heads."""
    return part if part.stride(-1) == 1 else part.contiguous()


class RotateQkv(torch.autograd.Function):
    """Both ways as one autograd node. A custom op may not return a view of its input, as the values are; and sliced
    beside such an op, they would get a zero-padded gradient, and a sum of two as wide as qkv.

    biases: the detached biases of the projections, of 3·D elements in all; dbias is fused into the backward kernel.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, *biases: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.sizes = [len(bias) for bias in biases]
        q, k = rotate_qk(qkv, cos, sin, num_heads)
        return q, k, view_values(qkv, num_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, dbias = rotate_qkv_backward(*grads, *ctx.saved_tensors)
        return grad, None, None, None, *(dbias.split_with_sizes(ctx.sizes) if ctx.sizes else ())


def view_values(qkv: Tensor, num_heads: int) -> Tensor:
    """The values (B, H, T, W) within qkv (B, T, 3·D)."""
    return qkv.unflatten(-1, (3, num_heads, -1))[:, :, 2].transpose(1, 2)


def rotate_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, biases: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv (B, T, 3·D), cos and sin (B or 1, 1, T, W/2) → q, k rotated and v (B, H, T, W), each stored by (B, T, H, W).

    v is a view of qkv. biases: see `RotateQkv`.
    """
    q, k, v = RotateQkv.apply(qkv, cos, sin, num_heads, *biases)
    return q, k, v

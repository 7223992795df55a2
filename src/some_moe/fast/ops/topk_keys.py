"""Routing on a GPU: the K best keys of every query in one kernel that never stores all N × E scores.

Routing is decided in float32 as everywhere else: bf16 queries meet keys cut into three bf16 parts, exactly; other
queries are multiplied in three TF32 products (error about 2⁻²¹).
Shapes: N queries, E keys, K chosen, D model width.
"""
# mypy: disable-error-code=assignment
# (The tuples grow, score by score.)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 2112  # of the backward kernel at most, of one warp each where rows are short


@triton.jit
def store_gates(gates, scores, temperature, exists):
    """gates (…, K) from the K-tuple of scores: their softmax at a temperature."""
    highest = scores[0]
    for k in tl.static_range(1, len(scores)):
        highest = tl.maximum(highest, scores[k])
    parts, total = (), highest * 0
    for k in tl.static_range(len(scores)):
        part = tl.exp((scores[k] - highest) / temperature)
        parts += (part,)
        total += part
    for k in tl.static_range(len(scores)):
        tl.store(gates + k, parts[k] / total, mask=exists)


@triton.jit
def nearest_kernel(
    query, keys, bias, experts, scores, biased, num_queries, temperature, E: tl.constexpr, BE: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of each block of BE experts the K highest of query · key + bias, highest first.

    experts, scores (without the bias) and biased: (N, blocks, K). keys (PARTS, E, D): parts that add up to the keys.
    temperature, if not None: the scores become gates.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    exists = row < num_queries
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    known = expert < E
    inner = tl.arange(0, BK)
    acc = tl.zeros((BM, BE), dtype=tl.float32)
    for k in range(0, D, BK):
        inside = k + inner < D
        a = tl.load(query + row[:, None] * D + (k + inner)[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
        at = expert[None, :] * D + (k + inner)[:, None]
        for part in tl.static_range(PARTS):
            b = tl.load(keys + part * E * D + at, mask=known[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    left = tl.where(known[None, :], acc + tl.load(bias + expert, mask=known, other=0.0)[None, :], -float("inf"))
    out = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * K
    found = ()
    for k in tl.static_range(K):
        value, place = tl.max(left, 1, return_indices=True)
        # Among scores that are no numbers any place may be found, beyond the last expert too.
        best = tl.minimum(place + tl.program_id(1) * BE, E - 1)
        hit = expert[None, :] == best[:, None]
        tl.store(experts + out + k, best.to(tl.int64), mask=exists)
        tl.store(biased + out + k, value, mask=exists)
        # Taking the bias off again rounds once; keeping all scores without it would take as many registers again.
        score = value - tl.load(bias + best, mask=exists & (best < E), other=0.0)
        left = tl.where(hit, -float("inf"), left)
        if temperature is None:
            tl.store(scores + out + k, score, mask=exists)
        else:
            found += (score,)
    if temperature is not None:
        store_gates(scores + out, found, temperature, exists)


@triton.jit
def merge_kernel(
    experts, scores, biased, best_experts, best_scores, num_queries, temperature, MANY: tl.constexpr,
    PADDED: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The K best of each query's MANY candidates. temperature, if not None: their scores become gates."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    exists = row < num_queries
    candidate = tl.arange(0, PADDED)
    keep = exists[:, None] & (candidate < MANY)[None, :]
    at = row[:, None] * MANY + candidate[None, :]
    left = tl.load(biased + at, mask=keep, other=-float("inf"))
    expert = tl.load(experts + at, mask=keep, other=0)
    score = tl.load(scores + at, mask=keep, other=0.0)
    found = ()
    for k in tl.static_range(K):
        hit = candidate[None, :] == tl.argmax(left, 1)[:, None]
        tl.store(best_experts + row * K + k, tl.sum(tl.where(hit, expert, 0), 1), mask=exists)
        best = tl.sum(tl.where(hit, score, 0.0), 1)
        left = tl.where(hit, -float("inf"), left)
        if temperature is None:
            tl.store(best_scores + row * K + k, best, mask=exists)
        else:
            found += (best,)
    if temperature is not None:
        store_gates(best_scores + row * K, found, temperature, exists)


@triton.jit
def split_kernel(keys, parts, size, BLOCK: tl.constexpr):
    """parts (3, size) in bf16: the keys (size,), what that rounding left, and what was left then."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(keys + place, mask=place < size, other=0.0)
    for part in tl.static_range(3):
        rounded = rest.to(tl.bfloat16)
        tl.store(parts + part * size + place, rounded, mask=place < size)
        rest -= rounded.to(tl.float32)


@triton.jit
def nearest_backward_kernel(
    grads, gates, experts, keys, grad_query, num_queries, per_program, temperature, K: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """grad_query (N, D) = Σ_k grad_score · keys[expert]: only the chosen keys have a gradient to give.

    grads (N, K): of the scores; or, if temperature is not None, of the gates (N, K).
    """
    first = tl.program_id(0).to(tl.int64) * per_program
    column = tl.arange(0, BD)
    for start in range(0, per_program, BM):
        row = first + start + tl.arange(0, BM)
        exists = row < num_queries
        keep = exists[:, None] & (column < D)[None, :]
        along = tl.zeros((BM,), dtype=tl.float32)
        if temperature is not None:
            for k in tl.static_range(K):
                gate = tl.load(gates + row * K + k, mask=exists, other=0.0)
                along += gate * tl.load(grads + row * K + k, mask=exists, other=0.0)
        acc = tl.zeros((BM, BD), dtype=tl.float32)
        for k in tl.range(K, loop_unroll_factor=4):
            grad = tl.load(grads + row * K + k, mask=exists, other=0.0)
            if temperature is not None:
                grad = tl.load(gates + row * K + k, mask=exists, other=0.0) * (grad - along) / temperature
            expert = tl.load(experts + row * K + k, mask=exists, other=0)
            acc += grad[:, None] * tl.load(keys + expert[:, None] * D + column[None, :], mask=keep, other=0.0)
        tl.store(grad_query + row[:, None] * D + column[None, :], acc.to(grad_query.dtype.element_ty), mask=keep)


@torch.library.custom_op("some_moe::nearest", mutates_args=())
def nearest(
    query: Tensor, keys: Tensor, bias: Tensor, top_k: int, temperature: float | None = None
) -> tuple[Tensor, Tensor]:
    """The top_k experts of each query (N, D) and their scores: (N, K) int64 and (N, K) float32.

    query: bf16 or float32; keys (E, D) float32; bias (E,): added for the choice alone. temperature: asks for gates
    instead of the scores, their softmax at this temperature.
    """
    num_queries, d = query.shape
    block = min(128, max(16, triton.next_power_of_2(len(keys))))
    shape = (num_queries, triton.cdiv(len(keys), block), top_k)
    experts = torch.empty(shape, dtype=torch.int64, device=query.device)
    biased = torch.empty(shape, dtype=torch.float32, device=query.device)
    scores = torch.empty_like(biased)
    halves = query.dtype == torch.bfloat16
    parts = split_bf16(keys) if halves else keys
    rows = (128 if block > 64 else 64) if halves else 64
    at_once = shape[1] == 1
    nearest_kernel[(triton.cdiv(num_queries, rows), shape[1])](
        query, parts, bias, experts, scores, biased, num_queries, temperature if at_once else None, E=len(keys),
        BE=block, K=top_k, D=d, PARTS=3 if halves else 1, BM=rows, BK=64 if halves else 32,
        PRECISION="tf32" if halves else "tf32x3", num_warps=8 if block > 64 else 4, num_stages=2,
    )  # fmt: skip
    if at_once:
        return experts.view(num_queries, top_k), scores.view(num_queries, top_k)
    best = torch.empty(num_queries, top_k, dtype=torch.int64, device=query.device)
    best_scores = torch.empty(num_queries, top_k, dtype=torch.float32, device=query.device)
    many = shape[1] * top_k
    merge_kernel[(triton.cdiv(num_queries, 64),)](
        experts, scores, biased, best, best_scores, num_queries, temperature, MANY=many,
        PADDED=triton.next_power_of_2(many), K=top_k, BM=64,
    )  # fmt: skip
    return best, best_scores


def split_bf16(keys: Tensor) -> Tensor:
    """Three bf16 parts (3, E, D) that add up to float32 keys (E, D) to the last bit or two."""
    parts = torch.empty(3, *keys.shape, dtype=torch.bfloat16, device=keys.device)
    split_kernel[(triton.cdiv(keys.numel(), 1024),)](keys, parts, keys.numel(), BLOCK=1024)
    return parts


@nearest.register_fake
def _(
    query: Tensor,
    keys: Tensor,  # noqa: ARG001
    bias: Tensor,  # noqa: ARG001
    top_k: int,
    temperature: float | None = None,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    shape = (query.shape[0], top_k)
    return query.new_empty(shape, dtype=torch.int64), query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("some_moe::nearest_backward", mutates_args=())
def nearest_backward(
    grads: Tensor, experts: Tensor, gates: Tensor, keys: Tensor, like: Tensor, temperature: float | None
) -> Tensor:
    """The gradient of the queries (N, D), in the type of `like`, from those of what `nearest` gave at a temperature."""
    num_queries, top_k = experts.shape
    d = keys.shape[1]
    grad = torch.empty(num_queries, d, dtype=like.dtype, device=keys.device)
    padded = triton.next_power_of_2(d)
    rows = max(1, 1024 // padded)
    per_program = max(1, triton.cdiv(triton.cdiv(num_queries, PROGRAMS), rows)) * rows
    nearest_backward_kernel[(triton.cdiv(num_queries, per_program),)](
        grads, gates, experts, keys, grad, num_queries, per_program, temperature, K=top_k, D=d, BM=rows, BD=padded,
        num_warps=max(1, padded // 1024),
    )  # fmt: skip
    return grad


@nearest_backward.register_fake
def _(grads: Tensor, experts: Tensor, gates: Tensor, keys: Tensor, like: Tensor, temperature: float | None) -> Tensor:  # noqa: ARG001
    return like.new_empty(experts.shape[0], keys.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, _, _, temperature = inputs
    experts, gates = output
    ctx.mark_non_differentiable(experts)
    ctx.save_for_backward(experts, gates, keys, query.new_empty(0))
    ctx.temperature = temperature


def _backward(ctx: Any, _: Tensor, grads: Tensor) -> tuple[Tensor | None, ...]:
    return nearest_backward(grads.contiguous(), *ctx.saved_tensors, ctx.temperature), None, None, None, None


nearest.register_autograd(_backward, setup_context=_save)

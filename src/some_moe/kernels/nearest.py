"""Routing on a GPU: the K best keys of every query in one kernel that never stores all N × E scores.

Routing is decided in float32 as everywhere else: bf16 queries meet keys cut into three bf16 parts, exactly; other
queries are multiplied in three TF32 products (error about 2⁻²¹).
Shapes: N queries, E keys, K chosen, D model width.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def nearest_kernel(
    query, keys, bias, experts, scores, biased, num_queries, E: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of each block of BE experts the K highest of query · key + bias, highest first.

    experts, scores (without the bias) and biased: (N, blocks, K). keys (PARTS, E, D): parts that add up to the keys.
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
    for k in tl.static_range(K):
        value, place = tl.max(left, 1, return_indices=True)
        best = place + tl.program_id(1) * BE
        hit = expert[None, :] == best[:, None]
        tl.store(experts + out + k, best.to(tl.int64), mask=exists)
        tl.store(biased + out + k, value, mask=exists)
        # Taking the bias off again rounds once; keeping all scores without it would take as many registers again.
        tl.store(scores + out + k, value - tl.load(bias + best, mask=exists & (best < E), other=0.0), mask=exists)
        left = tl.where(hit, -float("inf"), left)


@triton.jit
def merge_kernel(
    experts, scores, biased, best_experts, best_scores, num_queries, MANY: tl.constexpr, PADDED: tl.constexpr,
    K: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The K best of each query's MANY candidates."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    exists = row < num_queries
    candidate = tl.arange(0, PADDED)
    keep = exists[:, None] & (candidate < MANY)[None, :]
    at = row[:, None] * MANY + candidate[None, :]
    left = tl.load(biased + at, mask=keep, other=-float("inf"))
    expert = tl.load(experts + at, mask=keep, other=0)
    score = tl.load(scores + at, mask=keep, other=0.0)
    for k in tl.static_range(K):
        hit = candidate[None, :] == tl.argmax(left, 1)[:, None]
        tl.store(best_experts + row * K + k, tl.sum(tl.where(hit, expert, 0), 1), mask=exists)
        tl.store(best_scores + row * K + k, tl.sum(tl.where(hit, score, 0.0), 1), mask=exists)
        left = tl.where(hit, -float("inf"), left)


@triton.jit
def nearest_backward_kernel(
    grad_scores, experts, keys, grad_query, num_queries, K: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """grad_query (N, D) = Σ_k grad_score · keys[expert]: only the chosen keys have a gradient to give."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    exists = row < num_queries
    column = tl.arange(0, BD)
    keep = exists[:, None] & (column < D)[None, :]
    acc = tl.zeros((BM, BD), dtype=tl.float32)
    for k in range(K):
        grad = tl.load(grad_scores + row * K + k, mask=exists, other=0.0)
        expert = tl.load(experts + row * K + k, mask=exists, other=0)
        acc += grad[:, None] * tl.load(keys + expert[:, None] * D + column[None, :], mask=keep, other=0.0)
    tl.store(grad_query + row[:, None] * D + column[None, :], acc.to(grad_query.dtype.element_ty), mask=keep)


@torch.library.custom_op("some_moe::nearest", mutates_args=())
def nearest(query: Tensor, keys: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The top_k experts of each query (N, D) and their scores: (N, K) int64 and (N, K) float32.

    query: bf16 or float32; keys (E, D) float32; bias (E,): added for the choice alone.
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
    nearest_kernel[(triton.cdiv(num_queries, rows), shape[1])](
        query, parts, bias, experts, scores, biased, num_queries, E=len(keys), BE=block, K=top_k, D=d,
        PARTS=3 if halves else 1, BM=rows, BK=64 if halves else 32,
        PRECISION="tf32" if halves else "tf32x3", num_warps=8 if block > 64 else 4, num_stages=2,
    )  # fmt: skip
    if shape[1] == 1:
        return experts.view(num_queries, top_k), scores.view(num_queries, top_k)
    best = torch.empty(num_queries, top_k, dtype=torch.int64, device=query.device)
    best_scores = torch.empty(num_queries, top_k, dtype=torch.float32, device=query.device)
    many = shape[1] * top_k
    merge_kernel[(triton.cdiv(num_queries, 64),)](
        experts, scores, biased, best, best_scores, num_queries, MANY=many, PADDED=triton.next_power_of_2(many),
        K=top_k, BM=64,
    )  # fmt: skip
    return best, best_scores


def split_bf16(keys: Tensor) -> Tensor:
    """Three bf16 parts (3, E, D) that add up to float32 keys (E, D) to the last bit or two."""
    first = keys.to(torch.bfloat16)
    rest = keys - first.float()
    second = rest.to(torch.bfloat16)
    return torch.stack((first, second, (rest - second.float()).to(torch.bfloat16)))


@nearest.register_fake
def _(query: Tensor, keys: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    shape = (query.shape[0], top_k)
    return query.new_empty(shape, dtype=torch.int64), query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("some_moe::nearest_backward", mutates_args=())
def nearest_backward(grad_scores: Tensor, experts: Tensor, keys: Tensor, like: Tensor) -> Tensor:
    """The gradient of the queries (N, D), in the type of `like`."""
    num_queries, top_k = experts.shape
    d = keys.shape[1]
    grad = torch.empty(num_queries, d, dtype=like.dtype, device=keys.device)
    padded = triton.next_power_of_2(d)
    rows = max(1, 2048 // padded)
    nearest_backward_kernel[(triton.cdiv(num_queries, rows),)](
        grad_scores, experts, keys, grad, num_queries, K=top_k, D=d, BM=rows, BD=padded
    )
    return grad


@nearest_backward.register_fake
def _(grad_scores: Tensor, experts: Tensor, keys: Tensor, like: Tensor) -> Tensor:  # noqa: ARG001
    return like.new_empty(experts.shape[0], keys.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, _, _ = inputs
    experts, _ = output
    ctx.mark_non_differentiable(experts)
    ctx.save_for_backward(experts, keys, query.new_empty(0))


def _backward(ctx: Any, _: Tensor, grad_scores: Tensor) -> tuple[Tensor, None, None, None]:
    return nearest_backward(grad_scores.contiguous(), *ctx.saved_tensors), None, None, None


nearest.register_autograd(_backward, setup_context=_save)


@triton.jit
def mark_kernel(
    query, experts, counted, marks, norms, num_tokens, E: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Mark each counted token's experts in marks (N, WIDTH), zero before: 1 at e, and 1/|query| in two bf16 parts
    at E + e and 2E + e; and 1 at 3E. norms (N,): |query| of every token."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    column = tl.arange(0, BD)
    x = tl.load(
        query + token[:, None] * D + column[None, :], mask=exists[:, None] & (column < D)[None, :], other=0.0
    ).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    x = x / tl.where(largest > 0, largest, 1.0)[:, None]  # squares must not overflow
    norm = largest * tl.sqrt(tl.sum(x * x, 1))
    tl.store(norms + token, norm, mask=exists)
    scale = tl.where(norm > 0, 1.0 / norm, 0.0)
    high = scale.to(tl.bfloat16)
    low = (scale - high.to(tl.float32)).to(tl.bfloat16)
    counts = exists & (tl.load(counted + token, mask=exists, other=0) != 0)
    row = marks + token * WIDTH
    tl.store(row + 3 * E, tl.full((BLOCK,), 1.0, tl.bfloat16), mask=counts)
    for k in range(K):
        expert = tl.load(experts + token * K + k, mask=exists, other=0)
        tl.store(row + expert, tl.full((BLOCK,), 1.0, tl.bfloat16), mask=counts)
        tl.store(row + E + expert, high, mask=counts)
        tl.store(row + 2 * E + expert, low, mask=counts)


@torch.library.custom_op("some_moe::sum_by_expert", mutates_args=())
def sum_by_expert(
    experts: Tensor, counted: Tensor, query: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over the counted ones of N tokens with bf16 queries (N, D).

    Co-selections (E, E) int64, exact; sums of unit queries (E, D); the sum of the queries (D,); and every query's
    length (N,). Two bf16 products with float32 sums: ones are exact, and a length leaves an error of 2⁻¹⁷.
    """
    num_tokens, top_k = experts.shape
    d = query.shape[1]
    width = 3 * num_experts + 8
    marks = torch.zeros(num_tokens, width, dtype=torch.bfloat16, device=query.device)
    norms = torch.empty(num_tokens, dtype=torch.float32, device=query.device)
    padded = triton.next_power_of_2(d)
    block = max(1, 2048 // padded)
    mark_kernel[(triton.cdiv(num_tokens, block),)](
        query, experts, counted, marks, norms, num_tokens, E=num_experts, WIDTH=width, K=top_k, D=d, BLOCK=block,
        BD=padded,
    )  # fmt: skip
    ones = marks[:, :num_experts]
    pairs = torch.mm(ones.T, ones, out_dtype=torch.float32).to(torch.int64)
    sums = torch.mm(marks[:, num_experts:].T, query, out_dtype=torch.float32)
    return pairs, sums[:num_experts] + sums[num_experts : 2 * num_experts], sums[2 * num_experts].clone(), norms


@sum_by_expert.register_fake
def _(
    experts: Tensor,
    counted: Tensor,  # noqa: ARG001
    query: Tensor,
    num_experts: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    real = query.new_empty(num_experts, query.shape[1], dtype=torch.float32)
    pairs = experts.new_empty(num_experts, num_experts)
    return pairs, real, real.new_empty(query.shape[1]), real.new_empty(query.shape[0])

"""Top-k routing: the K best keys of every query by a GEMM with a fused top-k, which never stores all N × E scores.

Routing is decided in float32 as everywhere else: bf16 queries meet keys split into three bf16 terms (bf16x3), exactly;
float32 queries are multiplied in 3xTF32 (error about 2⁻²¹).
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
    row_max = scores[0]
    for k in tl.static_range(1, len(scores)):
        row_max = tl.maximum(row_max, scores[k])
    parts, total = (), row_max * 0
    for k in tl.static_range(len(scores)):
        part = tl.exp((scores[k] - row_max) / temperature)
        parts += (part,)
        total += part
    for k in tl.static_range(len(scores)):
        tl.store(gates + k, parts[k] / total, mask=exists)


@triton.jit
def topk_keys_kernel(
    query, keys, bias, experts, scores, biased, num_queries, temperature, E: tl.constexpr, BE: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of each block of BE experts the K highest of query · key + bias, highest first.

    experts, scores (without the bias) and biased: (N, blocks, K). keys (PARTS, E, D): terms that add up to the keys.
    temperature, if not None: the scores become gates.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    exists = row < num_queries
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    in_range = expert < E
    inner = tl.arange(0, BK)
    acc = tl.zeros((BM, BE), dtype=tl.float32)
    for k in range(0, D, BK):
        inside = k + inner < D
        a = tl.load(query + row[:, None] * D + (k + inner)[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
        at = expert[None, :] * D + (k + inner)[:, None]
        for part in tl.static_range(PARTS):
            b = tl.load(keys + part * E * D + at, mask=in_range[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    acc += tl.load(bias + expert, mask=in_range, other=0.0)[None, :]
    remaining = tl.where(in_range[None, :], acc, -float("inf"))
    out = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * K
    found = ()
    for k in tl.static_range(K):
        value, offset = tl.max(remaining, 1, return_indices=True)
        # Among NaN scores any index may be found, beyond the last expert too.
        best = tl.minimum(offset + tl.program_id(1) * BE, E - 1)
        hit = expert[None, :] == best[:, None]
        tl.store(experts + out + k, best.to(tl.int64), mask=exists)
        tl.store(biased + out + k, value, mask=exists)
        # Taking the bias off again rounds once; keeping all scores without it would take as many registers again.
        score = value - tl.load(bias + best, mask=exists & (best < E), other=0.0)
        remaining = tl.where(hit, -float("inf"), remaining)
        if temperature is None:
            tl.store(scores + out + k, score, mask=exists)
        else:
            found += (score,)
    if temperature is not None:
        store_gates(scores + out, found, temperature, exists)


@triton.jit
def topk_keys_merge_kernel(
    experts, scores, biased, best_experts, best_scores, num_queries, temperature, NUM_CANDIDATES: tl.constexpr,
    PADDED: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The K best of each query's NUM_CANDIDATES. temperature, if not None: their scores become gates."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    exists = row < num_queries
    candidate = tl.arange(0, PADDED)
    mask = exists[:, None] & (candidate < NUM_CANDIDATES)[None, :]
    at = row[:, None] * NUM_CANDIDATES + candidate[None, :]
    remaining = tl.load(biased + at, mask=mask, other=-float("inf"))
    expert = tl.load(experts + at, mask=mask, other=0)
    score = tl.load(scores + at, mask=mask, other=0.0)
    found = ()
    for k in tl.static_range(K):
        hit = candidate[None, :] == tl.argmax(remaining, 1)[:, None]
        tl.store(best_experts + row * K + k, tl.sum(tl.where(hit, expert, 0), 1), mask=exists)
        best = tl.sum(tl.where(hit, score, 0.0), 1)
        remaining = tl.where(hit, -float("inf"), remaining)
        if temperature is None:
            tl.store(best_scores + row * K + k, best, mask=exists)
        else:
            found += (best,)
    if temperature is not None:
        store_gates(best_scores + row * K, found, temperature, exists)


@triton.jit
def split_bf16_kernel(keys, parts, size, BLOCK: tl.constexpr):
    """parts (3, size) in bf16: the keys (size,), their rounding error, and the error of that."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(keys + offset, mask=offset < size, other=0.0)
    for part in tl.static_range(3):
        rounded = rest.to(tl.bfloat16)
        tl.store(parts + part * size + offset, rounded, mask=offset < size)
        rest -= rounded.to(tl.float32)


@triton.jit
def topk_keys_backward_kernel(
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
        mask = exists[:, None] & (column < D)[None, :]
        dot = tl.zeros((BM,), dtype=tl.float32)
        if temperature is not None:
            for k in tl.static_range(K):
                gate = tl.load(gates + row * K + k, mask=exists, other=0.0)
                dot += gate * tl.load(grads + row * K + k, mask=exists, other=0.0)
        acc = tl.zeros((BM, BD), dtype=tl.float32)
        for k in tl.range(K, loop_unroll_factor=4):
            grad = tl.load(grads + row * K + k, mask=exists, other=0.0)
            if temperature is not None:
                grad = tl.load(gates + row * K + k, mask=exists, other=0.0) * (grad - dot) / temperature
            expert = tl.load(experts + row * K + k, mask=exists, other=0)
            acc += grad[:, None] * tl.load(keys + expert[:, None] * D + column[None, :], mask=mask, other=0.0)
        tl.store(grad_query + row[:, None] * D + column[None, :], acc.to(grad_query.dtype.element_ty), mask=mask)


def run_forward(
    query: Tensor, keys: Tensor, bias: Tensor, top_k: int, temperature: float | None
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
    is_bf16 = query.dtype == torch.bfloat16
    parts = split_bf16(keys) if is_bf16 else keys
    rows = (128 if block > 64 else 64) if is_bf16 else 64
    one_block = shape[1] == 1
    topk_keys_kernel[(triton.cdiv(num_queries, rows), shape[1])](
        query, parts, bias, experts, scores, biased, num_queries, temperature if one_block else None, E=len(keys),
        BE=block, K=top_k, D=d, PARTS=3 if is_bf16 else 1, BM=rows, BK=64 if is_bf16 else 32,
        PRECISION="tf32" if is_bf16 else "tf32x3", num_warps=8 if block > 64 else 4, num_stages=2,
    )  # fmt: skip
    if one_block:
        return experts.view(num_queries, top_k), scores.view(num_queries, top_k)
    best = torch.empty(num_queries, top_k, dtype=torch.int64, device=query.device)
    best_scores = torch.empty(num_queries, top_k, dtype=torch.float32, device=query.device)
    num_candidates = shape[1] * top_k
    topk_keys_merge_kernel[(triton.cdiv(num_queries, 64),)](
        experts, scores, biased, best, best_scores, num_queries, temperature, NUM_CANDIDATES=num_candidates,
        PADDED=triton.next_power_of_2(num_candidates), K=top_k, BM=64,
    )  # fmt: skip
    return best, best_scores


def split_bf16(keys: Tensor) -> Tensor:
    """Three bf16 terms (3, E, D) that add up to float32 keys (E, D) to the last bit or two."""
    parts = torch.empty(3, *keys.shape, dtype=torch.bfloat16, device=keys.device)
    split_bf16_kernel[(triton.cdiv(keys.numel(), 1024),)](keys, parts, keys.numel(), BLOCK=1024)
    return parts


def run_backward(
    grads: Tensor, experts: Tensor, gates: Tensor, keys: Tensor, like: Tensor, temperature: float | None
) -> Tensor:
    """The gradient of the queries (N, D), in the dtype of `like`, from those of the scores or gates of `topk_keys`."""
    num_queries, top_k = experts.shape
    d = keys.shape[1]
    grad = torch.empty(num_queries, d, dtype=like.dtype, device=keys.device)
    padded = triton.next_power_of_2(d)
    rows = max(1, 1024 // padded)
    per_program = max(1, triton.cdiv(triton.cdiv(num_queries, PROGRAMS), rows)) * rows
    topk_keys_backward_kernel[(triton.cdiv(num_queries, per_program),)](
        grads, gates, experts, keys, grad, num_queries, per_program, temperature, K=top_k, D=d, BM=rows, BD=padded,
        num_warps=max(1, padded // 1024),
    )  # fmt: skip
    return grad


@torch.library.custom_op("some_moe::topk_keys_backward", mutates_args=())
def topk_keys_backward(
    grads: Tensor, experts: Tensor, gates: Tensor, keys: Tensor, like: Tensor, temperature: float | None
) -> Tensor:
    return run_backward(grads, experts, gates, keys, like, temperature)


@topk_keys_backward.register_fake
def _(grads: Tensor, experts: Tensor, gates: Tensor, keys: Tensor, like: Tensor, temperature: float | None) -> Tensor:  # noqa: ARG001
    return like.new_empty(experts.shape[0], keys.shape[1])


class TopkKeys(torch.autograd.Function):
    """`run_forward` with the gradient of the queries."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # the experts have none, and zeros would have to be written
        found = run_forward(query, keys, *rest)
        _save(ctx, (query, keys, *rest), found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if grads[1] is None:
            return (None,) * 5
        experts, gates, keys, like = ctx.saved_tensors
        grad_query = run_backward(grads[1].contiguous(), experts, gates, keys, like, ctx.temperature)
        return grad_query, None, None, None, None


@torch.library.custom_op("some_moe::topk_keys", mutates_args=())
def topk_keys_op(
    query: Tensor, keys: Tensor, bias: Tensor, top_k: int, temperature: float | None
) -> tuple[Tensor, Tensor]:
    return run_forward(query, keys, bias, top_k, temperature)


@topk_keys_op.register_fake
def _(query: Tensor, keys: Tensor, bias: Tensor, top_k: int, temperature: float | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    shape = (query.shape[0], top_k)
    return query.new_empty(shape, dtype=torch.int64), query.new_empty(shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, _, _, temperature = inputs
    experts, gates = output
    ctx.mark_non_differentiable(experts)
    ctx.save_for_backward(experts, gates, keys, query.new_empty(0))
    ctx.temperature = temperature


def _backward(ctx: Any, _: Tensor, grads: Tensor) -> tuple[Tensor | None, ...]:
    return topk_keys_backward(grads.contiguous(), *ctx.saved_tensors, ctx.temperature), None, None, None, None


topk_keys_op.register_autograd(_backward, setup_context=_save)


def topk_keys(
    query: Tensor, keys: Tensor, bias: Tensor, top_k: int, temperature: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `run_forward`, with a gradient: in compiled code as one op, else without a custom op's dispatch."""
    if torch.compiler.is_compiling():
        found: tuple[Tensor, Tensor] = topk_keys_op(query, keys, bias, top_k, temperature)
        return found
    return TopkKeys.apply(query, keys, bias, top_k, temperature)

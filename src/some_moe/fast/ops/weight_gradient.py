"""Weight gradients of grouped experts: dW[e] = Σ over the expert's rows of aᵀ b, and bias gradients, Σ of the rows.

The third kind of grouped GEMM: here the reduction runs over an expert's rows (a ragged K), so that its steps differ
from tile to tile. Any load is taken: an expert without rows gets zeros. No atomics: the same bits every time. Padding
rows must be zeros (`zero_padding`), up to the end of an expert's last M-tile.

Shapes: P permuted rows, of which expert e has spans[1, e] from spans[0, e] on; a (P, M), b (P, N), dW (E, M, N).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from some_moe.fast.ops import pingpong_gemm as pingpong
from some_moe.fast.ops.grouped_gemm import Tiles, cdiv, num_sms
from some_moe.fast.ops.pingpong_gemm import PRODUCER_REGISTERS, make_barriers, mma_steps, split_columns, store_tile


@gluon.jit
def count_steps(spans, expert, E: gl.constexpr, BK: gl.constexpr):
    """An expert's first row, and how many steps of BK its rows are."""
    return gl.load(spans + expert), (gl.load(spans + E + expert) + BK - 1) // BK


@gluon.jit
def producer(
    a, b, a_smem, b_smem, full, empty, spans, E: gl.constexpr, NUM_M: gl.constexpr, NUM_N: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """TMA loads of all steps of all tiles of this program, as `pingpong_gemm.producer`: a (BK, BM) and b (BK, BN)."""
    step = gl.to_tensor(0)
    for tile_id in range(gl.program_id(0), E * NUM_M * NUM_N, gl.num_programs(0)):
        row, steps = count_steps(spans, tile_id // (NUM_M * NUM_N), E, BK)
        off_m, off_n = tile_id // NUM_N % NUM_M * BM, tile_id % NUM_N * BN
        for _ in range(steps):
            stage, phase = step % STAGES, step // STAGES
            mbarrier.wait(empty.index(stage), (phase & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(a, [row, off_m], full.index(stage), a_smem.index(stage))
            tma.async_copy_global_to_shared(b, [row, off_n], full.index(stage), b_smem.index(stage))
            row += BK
            step += 1


@gluon.jit
def consumer(
    a_smem, b_smem, full, empty, order, out, out_smem, spans, WG: gl.constexpr, E: gl.constexpr, NUM_M: gl.constexpr,
    NUM_N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Every other tile of this program, from number WG on; the steps of the tiles between are counted too."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    out_smem = out_smem.index(WG)
    tile, first = gl.to_tensor(0), gl.to_tensor(0)
    for tile_id in range(gl.program_id(0), E * NUM_M * NUM_N, gl.num_programs(0)):
        expert = tile_id // (NUM_M * NUM_N)
        _, steps = count_steps(spans, expert, E, BK)
        if tile % 2 == WG:
            acc = mma_steps(
                tile, first, steps, a_smem, b_smem, full, empty, order, WG, BM, BN, STAGES, True, False, LAYOUT
            )
            off_m, off_n = (expert * NUM_M + tile_id // NUM_N % NUM_M) * BM, tile_id % NUM_N * BN
            left, right = split_columns(acc, BM, BN)
            part_1, part_2 = split_columns(left, BM, BN // 2)
            part_3, part_4 = split_columns(right, BM, BN // 2)
            store_tile(part_1, out, out_smem, off_m, off_n)
            store_tile(part_2, out, out_smem, off_m, off_n + BN // 4)
            store_tile(part_3, out, out_smem, off_m, off_n + BN // 2)
            store_tile(part_4, out, out_smem, off_m, off_n + BN // 2 + BN // 4)
        tile += 1
        first += steps
    tma.store_wait(0)


@gluon.jit
def pingpong_kernel(
    a, b, out, spans, E: gl.constexpr, NUM_M: gl.constexpr, NUM_N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out (E·M, N): dW, for widths of whole blocks, on Hopper. See `pingpong_gemm` for how it works."""
    a_smem = gl.allocate_shared_memory(a.dtype, [STAGES, BK, BM], a.layout)
    b_smem = gl.allocate_shared_memory(b.dtype, [STAGES, BK, BN], b.layout)
    out_smem = gl.allocate_shared_memory(out.dtype, [2, BM, BN // 4], out.layout)
    full, empty, order = make_barriers(STAGES), make_barriers(STAGES), make_barriers(2)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (a_smem, b_smem, full, empty, order, out, out_smem, spans, 0, E, NUM_M, NUM_N, BM, BN, BK, STAGES)),
        (consumer, (a_smem, b_smem, full, empty, order, out, out_smem, spans, 1, E, NUM_M, NUM_N, BM, BN, BK, STAGES)),
        (producer, (a, b, a_smem, b_smem, full, empty, spans, E, NUM_M, NUM_N, BM, BN, BK, STAGES)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@triton.jit
def plain_kernel(
    a, b, out, spans, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out (E, M, N): dW, for any widths and types: a program for each tile."""
    NUM_M: tl.constexpr = (M + BM - 1) // BM
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0)
    expert = tile // (NUM_M * NUM_N)
    first, rows = tl.load(spans + expert).to(tl.int64), tl.load(spans + E + expert)
    m, n = tile // NUM_N % NUM_M * BM + tl.arange(0, BM), tile % NUM_N * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, rows, BK):
        row = start + tl.arange(0, BK)
        at = (first + row)[:, None]
        left = tl.load(a + at * M + m[None, :], mask=(row < rows)[:, None] & (m < M)[None, :], other=0.0)
        right = tl.load(b + at * N + n[None, :], mask=(row < rows)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(left.T, right, acc, input_precision=PRECISION)
    at = out + (expert.to(tl.int64) * M + m)[:, None] * N + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def weight_gradient(a: Tensor, b: Tensor, spans: Tensor, dtype: torch.dtype) -> Tensor:
    """dW (E, M, N) of a (P, M) and b (P, N)."""
    num_experts, m, n = spans.shape[1], a.shape[1], b.shape[1]
    out = a.new_empty(num_experts, m, n, dtype=dtype)
    block_m, block_n, block_k = pingpong.BLOCK_M, pingpong.BLOCK_N, pingpong.BLOCK_K
    if m % block_m == 0 and pingpong.can_pingpong(a, block_m, n):
        descriptors = (
            pingpong.make_descriptor(a, block_k, block_m),
            pingpong.make_descriptor(b, block_k, block_n),
            pingpong.make_descriptor(out.view(-1, n), block_m, block_n // 4),
        )
        tiles = m // block_m, n // block_n
        programs = min(num_experts * tiles[0] * tiles[1], num_sms(a.device))
        sizes = {"E": num_experts, "NUM_M": tiles[0], "NUM_N": tiles[1]}
        pingpong.launch(pingpong_kernel, programs, block_m, *descriptors, spans, **sizes)
        return out
    wide = a.dtype == torch.float32
    block = 32 if wide else 64
    plain_kernel[(num_experts * cdiv(m, block) * cdiv(n, block),)](
        a, b, out, spans, E=num_experts, M=m, N=n, BM=block, BN=block, BK=32, PRECISION="ieee" if wide else "tf32"
    )
    return out


# --- padding and biases --------------------------------------------------------------------------------------


@triton.jit
def zero_padding_kernel(rows, spans, E: tl.constexpr, W: tl.constexpr, M: tl.constexpr, BM: tl.constexpr):
    """Zeros in the padding of rows (P, W): from an expert's last row to the end of its last M-tile of M rows."""
    expert = tl.program_id(0)
    first, count = tl.load(spans + expert).to(tl.int64), tl.load(spans + E + expert)
    end = (count + M - 1) // M * M
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    for start in range(count, end, BM):
        row = start + tl.arange(0, BM)
        mask = (row < end)[:, None] & (column < W)[None, :]
        tl.store(rows + (first + row)[:, None] * W + column[None, :], tl.zeros((BM, 128), rows.dtype.element_ty), mask)


def zero_padding(rows: Tensor, spans: Tensor, block_m: int) -> None:
    """Make the padding rows of rows (P, W) zeros, in place."""
    width = rows.shape[1]
    grid = spans.shape[1], cdiv(width, 128)
    zero_padding_kernel[grid](rows, spans, E=spans.shape[1], W=width, M=block_m, BM=32)


@triton.jit
def tile_sums_kernel(rows, partial, num_tiles, W: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr):
    """partial (tiles, W): the column sums of each M-tile of rows (P, W)."""
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    total = tl.zeros((BW,), dtype=tl.float32)
    for start in tl.static_range(0, M, BM):
        at = (tile.to(tl.int64) * M + start + tl.arange(0, BM))[:, None] * W + column[None, :]
        total += tl.sum(tl.load(rows + at, mask=(column < W)[None, :], other=0.0).to(tl.float32), 0)
    tl.store(partial + tile * W + column, total, mask=column < W)


@triton.jit
def expert_sums_kernel(
    partial, out, spans, E: tl.constexpr, W: tl.constexpr, M: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr
):
    """out (E, W): the sums of each expert's rows of partial (tiles, W)."""
    expert = tl.program_id(0)
    first, count = tl.load(spans + expert) // M, (tl.load(spans + E + expert) + M - 1) // M
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    total = tl.zeros((BW,), dtype=tl.float32)
    for start in range(0, count, BT):
        tile = start + tl.arange(0, BT)
        mask = (tile < count)[:, None] & (column < W)[None, :]
        total += tl.sum(tl.load(partial + (first + tile)[:, None] * W + column[None, :], mask=mask, other=0.0), 0)
    tl.store(out + expert * W + column, total.to(out.dtype.element_ty), mask=column < W)


def sum_tiles(rows: Tensor, tiles: Tiles) -> Tensor:
    """The column sums (tiles, W) of each M-tile of rows (P, W), whose padding is zeros."""
    width = rows.shape[1]
    partial = rows.new_empty(tiles.max_tiles, width, dtype=torch.float32)
    tile_sums_kernel[(tiles.max_tiles, cdiv(width, 128))](
        rows, partial, tiles.num_tiles, W=width, M=tiles.m, BM=min(64, tiles.m), BW=128, num_warps=8
    )
    return partial


def bias_gradient(partial: Tensor, spans: Tensor, block_m: int, dtype: torch.dtype) -> Tensor:
    """The sums (E, W) of each expert's M-tiles, from those of single ones (tiles, W)."""
    num_experts, width = spans.shape[1], partial.shape[1]
    out = partial.new_empty(num_experts, width, dtype=dtype)
    expert_sums_kernel[(num_experts, cdiv(width, 128))](
        partial, out, spans, E=num_experts, W=width, M=block_m, BT=8, BW=128
    )
    return out

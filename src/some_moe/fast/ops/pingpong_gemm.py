"""Grouped GEMM on Hopper as persistent kernels with ping-pong warp specialization, in Gluon.

One producer warp issues TMA loads into a ring of shared-memory stages, guarded by full and empty mbarriers. Two
consumer warpgroups take alternate output tiles: while one runs its mainloop (wgmma), the other runs its epilogue, so
that the tensor cores do not wait for GELU. gelu′ bypasses shared memory: each thread stores its own registers side by
side, and the same thread of the backward kernel loads them. GELU is that of `gelu_f16x2`.

Shapes as in `tma_gemm`: P rows in M-tiles of BM of one expert, D model width, F hidden width.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from some_moe.fast.ops import gelu_f16x2, tma_gemm

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64  # what leaves shared memory for six stages
REGISTERS = 232
# By BLOCK_M: BLOCK_N and stages. An output tile has as many elements either way; experts with few rows have less
# padding in low tiles.
SHAPES = {128: (128, 6), 64: (256, 4)}
PRODUCER_REGISTERS = gl.constexpr(40)  # what the producer warp needs; the consumers share the rest
split_columns = gluon.jit(tma_gemm.split_columns.fn)
dequantize_dgelu = gluon.jit(tma_gemm.dequantize_dgelu.fn)
count_tiles = gluon.jit(tma_gemm.count_tiles.fn)
find_expert = gluon.jit(tma_gemm.find_expert.fn)
PTX = gl.constexpr(gelu_f16x2.PTX)
CONSTRAINTS = gl.constexpr(gelu_f16x2.CONSTRAINTS)
PACK = gl.constexpr(gelu_f16x2.PACK)


@gluon.jit
def make_barriers(COUNT: gl.constexpr):
    """COUNT mbarriers (COUNT, 1) that one arrival completes."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def producer(
    a, b, a_smem, b_smem, full, empty, tile_expert, num_tiles, B_ROWS: gl.constexpr, K: gl.constexpr,
    NUM_N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """TMA loads of all K steps of all tiles of this program: a (BM, BK), and a block of the expert's b, of B_ROWS rows.

    full and empty have an mbarrier a stage: its loads have arrived; its consumer has read it.
    """
    step = gl.to_tensor(0)
    for tile_id in range(gl.program_id(0), count_tiles(num_tiles, tile_expert) * NUM_N, gl.num_programs(0)):
        expert = find_expert(tile_expert, tile_id // NUM_N)
        off_m, off_n = tile_id // NUM_N * BM, tile_id % NUM_N * BN
        for k in range(0, K, BK):
            stage, phase = step % STAGES, step // STAGES
            mbarrier.wait(empty.index(stage), (phase & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(a, [off_m, k], full.index(stage), a_smem.index(stage))
            if TRANSPOSED:
                at = [expert * B_ROWS + off_n, k]
            else:
                at = [expert * B_ROWS + k, off_n]
            tma.async_copy_global_to_shared(b, at, full.index(stage), b_smem.index(stage))
            step += 1


@gluon.jit
def mma_mainloop(
    tile, a_smem, b_smem, full, empty, order, WG: gl.constexpr, STEPS: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The accumulator (BM, BN) of this program's tile number `tile`, by STEPS stages, as every tile has."""
    return mma_steps(
        tile, tile * STEPS, STEPS, a_smem, b_smem, full, empty, order, WG, BM, BN, STAGES, False, TRANSPOSED, LAYOUT
    )


@gluon.jit
def mma_steps(
    tile, first, steps, a_smem, b_smem, full, empty, order, WG: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The accumulator (BM, BN) of this program's tile number `tile`: `steps` stages from this program's `first` on.

    A_TRANSPOSED: a is stored as (K, M); B_TRANSPOSED: b as (N, K). order: an mbarrier for each consumer warpgroup: the
    other one has issued its last wgmma. Without it a consumer could take a stage's phase before last for the one that
    it waits for: an mbarrier wait knows only the parity.
    """
    acc = gl.zeros((BM, BN), gl.float32, LAYOUT)
    mbarrier.wait(order.index(WG), ((tile // 2) & 1) ^ (1 - WG))
    for s in range(steps):
        step = first + s
        stage, phase = step % STAGES, step // STAGES
        mbarrier.wait(full.index(stage), phase & 1)
        left, right = a_smem.index(stage), b_smem.index(stage)
        if A_TRANSPOSED:
            left = left.permute((1, 0))
        if B_TRANSPOSED:
            right = right.permute((1, 0))
        acc = warpgroup_mma(left, right, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))  # the previous step has read its stage
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=s > 0)
    mbarrier.arrive(order.index(1 - WG), count=1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((first + steps + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return acc


@gluon.jit
def dgelu_pointer(dgelu, tile_id, TILE: gl.constexpr):
    """The pointer to the gelu′ of an output tile."""
    return dgelu + tile_id.to(gl.int64) * TILE


@gluon.jit
def to_register_order(tile, BM: gl.constexpr, BN: gl.constexpr):
    """A tile, flattened in the order of the wgmma accumulator layout: 16 elements of one lane, then of the next.

    A warp has rows 16·warp + 8·i + lane // 4 (and 64 more) and columns 8·j + lane % 4 · 2 (and the next).
    """
    bits = gl.reshape(tile, (BM // 64, 4, 2, 8, BN // 32, 2, 2, 4, 2))
    return gl.reshape(gl.permute(bits, (1, 0, 4, 3, 7, 5, 6, 2, 8)), (BM * BN,))


@gluon.jit
def from_register_order(flat, BM: gl.constexpr, BN: gl.constexpr):
    """The inverse of `to_register_order`: the tile (BM, BN)."""
    bits = gl.reshape(flat, (4, BM // 64, BN // 32, 8, 4, 2, 2, 2, 2))
    return gl.reshape(gl.permute(bits, (1, 0, 7, 3, 2, 5, 6, 4, 8)), (BM, BN))


@gluon.jit
def gelu_epilogue(acc, bias, hidden, hidden_smem, dgelu, off_m, off_n, BM: gl.constexpr, BN: gl.constexpr):
    """Store gelu(acc + bias) and its gelu′, for half a tile."""
    hidden_tile, dgelu_tile = gl.inline_asm_elementwise(
        PTX, CONSTRAINTS, [acc, bias], (gl.bfloat16, gl.uint8), is_pure=True, pack=PACK
    )
    tma.store_wait(0)  # the previous half has left shared memory
    hidden_smem.store(hidden_tile)
    flat = to_register_order(dgelu_tile, BM, BN)
    gl.store(dgelu + gl.arange(0, BM * BN, layout=flat.type.layout), flat)
    fence_async_shared()
    tma.async_copy_shared_to_global(hidden, [off_m, off_n], hidden_smem)


@gluon.jit
def up_gelu_consumer(
    a_smem, b_smem, full, empty, order, hidden, dgelu, hidden_smem, up_bias, tile_expert, num_tiles,
    WG: gl.constexpr, D: gl.constexpr, F: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Every other tile of this program, from number WG on."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    NUM_N: gl.constexpr = F // BN
    STEPS: gl.constexpr = (D + BK - 1) // BK
    hidden_smem = hidden_smem.index(WG)
    tile = gl.to_tensor(WG)
    programs = gl.num_programs(0)
    for tile_id in range(gl.program_id(0) + WG * programs, count_tiles(num_tiles, tile_expert) * NUM_N, 2 * programs):
        expert = find_expert(tile_expert, tile_id // NUM_N)
        off_m, off_n = tile_id // NUM_N * BM, tile_id % NUM_N * BN
        offs_n = off_n + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
        bias = gl.load(up_bias + expert * F + offs_n)
        acc = mma_mainloop(tile, a_smem, b_smem, full, empty, order, WG, STEPS, BM, BN, STAGES, True, LAYOUT)
        left, right = split_columns(acc, BM, BN)
        bias = gl.zeros((BM, BN), gl.float16, LAYOUT) + bias.to(gl.float16)[None, :]
        bias_left, bias_right = split_columns(bias, BM, BN)
        dgelu_ptr = dgelu_pointer(dgelu, tile_id, BM * BN)
        gelu_epilogue(left, bias_left, hidden, hidden_smem, dgelu_ptr, off_m, off_n, BM, BN // 2)
        dgelu_ptr += BM * BN // 2
        gelu_epilogue(right, bias_right, hidden, hidden_smem, dgelu_ptr, off_m, off_n + BN // 2, BM, BN // 2)
        tile += 2
    tma.store_wait(0)


@gluon.jit
def up_gelu_kernel(
    x_rows, up, up_bias, hidden, dgelu, tile_expert, num_tiles, D: gl.constexpr, F: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """hidden = gelu(pre) and dgelu = gelu′(pre), both (P, F), of pre = x_rows @ upᵀ + bias."""
    a_smem = gl.allocate_shared_memory(x_rows.dtype, [STAGES, BM, BK], x_rows.layout)
    b_smem = gl.allocate_shared_memory(up.dtype, [STAGES, BN, BK], up.layout)
    hidden_smem = gl.allocate_shared_memory(hidden.dtype, [2, BM, BN // 2], hidden.layout)
    full, empty, order = make_barriers(STAGES), make_barriers(STAGES), make_barriers(2)
    fence_async_shared()
    gl.warp_specialize([
        (up_gelu_consumer, (a_smem, b_smem, full, empty, order, hidden, dgelu, hidden_smem, up_bias, tile_expert,
                            num_tiles, 0, D, F, BM, BN, BK, STAGES)),
        (up_gelu_consumer, (a_smem, b_smem, full, empty, order, hidden, dgelu, hidden_smem, up_bias, tile_expert,
                            num_tiles, 1, D, F, BM, BN, BK, STAGES)),
        (producer, (x_rows, up, a_smem, b_smem, full, empty, tile_expert, num_tiles, F, D, F // BN, BM, BN, BK, STAGES,
                    True)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@gluon.jit
def store_tile(acc, out, out_smem, off_m, off_n):
    """Cast and store half a tile by TMA."""
    acc = acc.to(out.dtype)
    tma.store_wait(0)
    out_smem.store(acc)
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [off_m, off_n], out_smem)


@gluon.jit
def load_dgelu(dgelu, LAYOUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Half a tile of gelu′, in the registers that `gelu_epilogue` stored them from."""
    half, _ = split_columns(gl.zeros((BM, BN), gl.uint8, LAYOUT), BM, BN)
    flat = to_register_order(half, BM, BN // 2)
    loaded = gl.load(dgelu + gl.arange(0, BM * BN // 2, layout=flat.type.layout))
    return gl.convert_layout(from_register_order(loaded, BM, BN // 2), half.type.layout, assert_trivial=True)


@gluon.jit
def dgelu_epilogue(acc, dgelu_tile, grad_pre, grad_smem, dbias, off_m, off_n, F: gl.constexpr, BM: gl.constexpr):
    """Store acc · gelu′ of half a tile; and if dbias is not None, its column sums before rounding."""
    grad = acc * dequantize_dgelu(dgelu_tile)
    if dbias is not None:
        total = gl.sum(grad, 0)
        offs_n = off_n + gl.arange(0, total.shape[0], layout=total.type.layout)
        gl.store(dbias + off_m // BM * F + offs_n, total)
    store_tile(grad, grad_pre, grad_smem, off_m, off_n)


@gluon.jit
def down_dgelu_consumer(
    a_smem, b_smem, full, empty, order, dgelu, grad_pre, grad_smem, dbias, tile_expert, num_tiles, WG: gl.constexpr,
    D: gl.constexpr, F: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Every other tile of this program, from number WG on. gelu′ is prefetched during the mainloop."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    NUM_N: gl.constexpr = F // BN
    STEPS: gl.constexpr = (D + BK - 1) // BK
    grad_smem = grad_smem.index(WG)
    tile = gl.to_tensor(WG)
    programs = gl.num_programs(0)
    for tile_id in range(gl.program_id(0) + WG * programs, count_tiles(num_tiles, tile_expert) * NUM_N, 2 * programs):
        off_m, off_n = tile_id // NUM_N * BM, tile_id % NUM_N * BN
        dgelu_ptr = dgelu_pointer(dgelu, tile_id, BM * BN)
        dgelu_left = load_dgelu(dgelu_ptr, LAYOUT, BM, BN)
        dgelu_right = load_dgelu(dgelu_ptr + BM * BN // 2, LAYOUT, BM, BN)
        acc = mma_mainloop(tile, a_smem, b_smem, full, empty, order, WG, STEPS, BM, BN, STAGES, False, LAYOUT)
        left, right = split_columns(acc, BM, BN)
        dgelu_epilogue(left, dgelu_left, grad_pre, grad_smem, dbias, off_m, off_n, F, BM)
        dgelu_epilogue(right, dgelu_right, grad_pre, grad_smem, dbias, off_m, off_n + BN // 2, F, BM)
        tile += 2
    tma.store_wait(0)


@gluon.jit
def down_dgelu_kernel(
    grad_y_rows, down, dgelu, grad_pre, dbias, tile_expert, num_tiles, D: gl.constexpr, F: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """grad_pre (P, F) = (grad_y_rows @ down) · gelu′, gelu′ in uint8. dbias (tiles, F), if not None: the column sums of
    each M-tile of grad_pre."""
    a_smem = gl.allocate_shared_memory(grad_y_rows.dtype, [STAGES, BM, BK], grad_y_rows.layout)
    b_smem = gl.allocate_shared_memory(down.dtype, [STAGES, BK, BN], down.layout)
    grad_smem = gl.allocate_shared_memory(grad_pre.dtype, [2, BM, BN // 2], grad_pre.layout)
    full, empty, order = make_barriers(STAGES), make_barriers(STAGES), make_barriers(2)
    fence_async_shared()
    gl.warp_specialize([
        (down_dgelu_consumer, (a_smem, b_smem, full, empty, order, dgelu, grad_pre, grad_smem, dbias,
                               tile_expert, num_tiles, 0, D, F, BM, BN, BK, STAGES)),
        (down_dgelu_consumer, (a_smem, b_smem, full, empty, order, dgelu, grad_pre, grad_smem, dbias,
                               tile_expert, num_tiles, 1, D, F, BM, BN, BK, STAGES)),
        (producer, (grad_y_rows, down, a_smem, b_smem, full, empty, tile_expert, num_tiles, D, D, F // BN, BM, BN, BK,
                    STAGES, False)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@gluon.jit
def gemm_consumer(
    a_smem, b_smem, full, empty, order, out, out_smem, bias, tile_expert, num_tiles, WG: gl.constexpr,
    K: gl.constexpr, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Every other tile of this program, from number WG on."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    NUM_N: gl.constexpr = N // BN
    STEPS: gl.constexpr = (K + BK - 1) // BK
    out_smem = out_smem.index(WG)
    tile = gl.to_tensor(WG)
    programs = gl.num_programs(0)
    for tile_id in range(gl.program_id(0) + WG * programs, count_tiles(num_tiles, tile_expert) * NUM_N, 2 * programs):
        off_m, off_n = tile_id // NUM_N * BM, tile_id % NUM_N * BN
        if bias is not None:
            offs_n = off_n + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
            tile_bias = gl.load(bias + find_expert(tile_expert, tile_id // NUM_N) * N + offs_n)
        acc = mma_mainloop(tile, a_smem, b_smem, full, empty, order, WG, STEPS, BM, BN, STAGES, TRANSPOSED, LAYOUT)
        if bias is not None:
            acc += tile_bias.to(gl.float32)[None, :]
        left, right = split_columns(acc, BM, BN)
        store_tile(left, out, out_smem, off_m, off_n)
        store_tile(right, out, out_smem, off_m, off_n + BN // 2)
        tile += 2
    tma.store_wait(0)


@gluon.jit
def grouped_gemm_kernel(
    a, b, bias, out, tile_expert, num_tiles, K: gl.constexpr, N: gl.constexpr, B_ROWS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """out (P, N) = a (P, K) @ b + bias, b and bias of the tile's expert: B_ROWS rows of the stack. TRANSPOSED: b is
    stored as (N, K)."""
    a_smem = gl.allocate_shared_memory(a.dtype, [STAGES, BM, BK], a.layout)
    if TRANSPOSED:
        b_smem = gl.allocate_shared_memory(b.dtype, [STAGES, BN, BK], b.layout)
    else:
        b_smem = gl.allocate_shared_memory(b.dtype, [STAGES, BK, BN], b.layout)
    out_smem = gl.allocate_shared_memory(out.dtype, [2, BM, BN // 2], out.layout)
    full, empty, order = make_barriers(STAGES), make_barriers(STAGES), make_barriers(2)
    fence_async_shared()
    gl.warp_specialize([
        (gemm_consumer, (a_smem, b_smem, full, empty, order, out, out_smem, bias, tile_expert, num_tiles, 0, K, N,
                         BM, BN, BK, STAGES, TRANSPOSED)),
        (gemm_consumer, (a_smem, b_smem, full, empty, order, out, out_smem, bias, tile_expert, num_tiles, 1, K, N,
                         BM, BN, BK, STAGES, TRANSPOSED)),
        (producer, (a, b, a_smem, b_smem, full, empty, tile_expert, num_tiles, B_ROWS, K, N // BN, BM, BN, BK,
                    STAGES, TRANSPOSED)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def can_pingpong(x: Tensor, block_m: int, width: int, block_n: int | None = None) -> bool:
    """Whether these kernels fit: bf16 on Hopper, M-tiles of this size, and an output of whole N-blocks; block_n: what
    the plan asks for."""
    n = SHAPES.get(block_m, (0, 0))[0]
    fits = n > 0 and width % n == 0 and block_n in (n, None)
    return fits and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] == 9


def make_descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    """The TMA descriptor of a matrix, for blocks (rows, columns)."""
    dtype = gl.float32 if matrix.dtype == torch.float32 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


def launch(kernel: Any, programs: int, block_m: int, *arguments: Any, **sizes: Any) -> None:
    """Launch one of the kernels: one persistent program an SM."""
    n, stages = SHAPES[block_m]
    sizes |= {"BM": block_m, "BN": n, "BK": BLOCK_K, "STAGES": stages, "REGISTERS": REGISTERS}
    kernel[(programs,)](*arguments, **sizes, num_warps=4)

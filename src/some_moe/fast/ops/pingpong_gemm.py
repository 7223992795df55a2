"""The products of the experts on Hopper: two groups of warps take turns, one multiplying, one finishing.

A program has three parts. One warp brings blocks by the copy engine into a ring of stages. Two groups of four warps
take the tiles by turns: while one multiplies, the other applies GELU or slopes to its sums and stores them. So the
tensor cores wait for nobody's arithmetic. Slopes do not pass through shared memory: each thread stores its own side by
side, and the same thread of the kernel that goes back loads them. GELU is that of `gelu_pairs`.

Shapes as in `fused_kernels`: P rows in tiles of BM of one expert, D model width, F hidden width.
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

ROWS, COLUMNS, INNER = 128, 128, 64  # of a tile, of a block, and of a step: what leaves room for six stages
STAGES, REGISTERS = 6, 232
BRINGING_REGISTERS = gl.constexpr(40)  # what the bringing warp needs; the others share the rest
halves = gluon.jit(tma_gemm.halves.fn)
unpack_slope = gluon.jit(tma_gemm.unpack_slope.fn)
count_tiles = gluon.jit(tma_gemm.count_tiles.fn)
find_expert = gluon.jit(tma_gemm.find_expert.fn)
ASSEMBLY = gl.constexpr(gelu_f16x2.ASSEMBLY)
OPERANDS = gl.constexpr(gelu_f16x2.OPERANDS)
AT_ONCE = gl.constexpr(gelu_f16x2.AT_ONCE)


@gluon.jit
def make_barriers(NUMBER: gl.constexpr):
    """Barriers (NUMBER, 1) that one arrival completes."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def bring(
    a, b, a_room, b_room, full, empty, tile_expert, num_tiles, ROWS: gl.constexpr, INNER: gl.constexpr,
    COLUMNS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Fill the stages, step after step of job after job: a (BM, BK) and the expert's block of b, whose matrix has ROWS.

    full and empty have a barrier a stage: its blocks have come; its blocks are used up.
    """
    step = gl.to_tensor(0)
    for job in range(gl.program_id(0), count_tiles(num_tiles, tile_expert) * COLUMNS, gl.num_programs(0)):
        expert = find_expert(tile_expert, job // COLUMNS)
        first, column = job // COLUMNS * BM, job % COLUMNS * BN
        for k in range(0, INNER, BK):
            stage, lap = step % STAGES, step // STAGES
            mbarrier.wait(empty.index(stage), (lap & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(a, [first, k], full.index(stage), a_room.index(stage))
            if TRANSPOSED:
                at = [expert * ROWS + column, k]
            else:
                at = [expert * ROWS + k, column]
            tma.async_copy_global_to_shared(b, at, full.index(stage), b_room.index(stage))
            step += 1


@gluon.jit
def multiply(
    turn, a_room, b_room, full, empty, order, WHO: gl.constexpr, STEPS: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The sums (BM, BN) of job number `turn` of this program, from its steps' stages.

    order has a barrier for each group: the other one has begun its last step. Without waiting for it, a group could
    take a stage's lap before last for the one that it waits for: a barrier only tells odd laps from even ones.
    """
    acc = gl.zeros((BM, BN), gl.float32, LAYOUT)
    mbarrier.wait(order.index(WHO), ((turn // 2) & 1) ^ (1 - WHO))
    for s in range(STEPS):
        step = turn * STEPS + s
        stage, lap = step % STAGES, step // STAGES
        mbarrier.wait(full.index(stage), lap & 1)
        right = b_room.index(stage)
        if TRANSPOSED:
            right = right.permute((1, 0))
        acc = warpgroup_mma(a_room.index(stage), right, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))  # the step before is done with its stage
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=s > 0)
    mbarrier.arrive(order.index(1 - WHO), count=1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((turn * STEPS + STEPS - 1) % STAGES), count=1)
    return acc


@gluon.jit
def slopes_of(slope, job, SIZE: gl.constexpr):
    """Where the slopes of a job's tile begin."""
    return slope + job.to(gl.int64) * SIZE


@gluon.jit
def line_up(tile, BM: gl.constexpr, BN: gl.constexpr):
    """A tile's numbers in a line as the threads have them: 16 of one thread, 16 of its neighbour, and so on.

    A warp has rows 16·warp + 8·i + lane // 4 (and 64 more) and columns 8·j + lane % 4 · 2 (and the next).
    """
    bits = gl.reshape(tile, (BM // 64, 4, 2, 8, BN // 32, 2, 2, 4, 2))
    return gl.reshape(gl.permute(bits, (1, 0, 4, 3, 7, 5, 6, 2, 8)), (BM * BN,))


@gluon.jit
def line_back(line, BM: gl.constexpr, BN: gl.constexpr):
    """The tile (BM, BN) that `line_up` made a line of."""
    bits = gl.reshape(line, (4, BM // 64, BN // 32, 8, 4, 2, 2, 2, 2))
    return gl.reshape(gl.permute(bits, (1, 0, 7, 3, 2, 5, 6, 4, 8)), (BM, BN))


@gluon.jit
def activate(sums, bias, hidden, hidden_room, slope, first, column, BM: gl.constexpr, BN: gl.constexpr):
    """Store gelu(sums + bias) and gelu′ of it of half a tile."""
    high, steep = gl.inline_asm_elementwise(
        ASSEMBLY, OPERANDS, [sums, bias], (gl.bfloat16, gl.uint8), is_pure=True, pack=AT_ONCE
    )
    tma.store_wait(0)  # the half before has left its room
    hidden_room.store(high)
    line = line_up(steep, BM, BN)
    gl.store(slope + gl.arange(0, BM * BN, layout=line.type.layout), line)
    fence_async_shared()
    tma.async_copy_shared_to_global(hidden, [first, column], hidden_room)


@gluon.jit
def up_group(
    a_room, b_room, full, empty, order, hidden, slope, hidden_room, up_bias, tile_expert, num_tiles,
    WHO: gl.constexpr, D: gl.constexpr, F: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Every other job of this program, from number WHO on."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    COLUMNS: gl.constexpr = F // BN
    STEPS: gl.constexpr = (D + BK - 1) // BK
    hidden_room = hidden_room.index(WHO)
    turn = gl.to_tensor(WHO)
    programs = gl.num_programs(0)
    for job in range(gl.program_id(0) + WHO * programs, count_tiles(num_tiles, tile_expert) * COLUMNS, 2 * programs):
        expert = find_expert(tile_expert, job // COLUMNS)
        first, column = job // COLUMNS * BM, job % COLUMNS * BN
        columns = column + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
        bias = gl.load(up_bias + expert * F + columns)
        acc = multiply(turn, a_room, b_room, full, empty, order, WHO, STEPS, BM, BN, STAGES, True, LAYOUT)
        left, right = halves(acc, BM, BN)
        bias_left, bias_right = halves(gl.zeros((BM, BN), gl.float16, LAYOUT) + bias.to(gl.float16)[None, :], BM, BN)
        here = slopes_of(slope, job, BM * BN)
        activate(left, bias_left, hidden, hidden_room, here, first, column, BM, BN // 2)
        activate(right, bias_right, hidden, hidden_room, here + BM * BN // 2, first, column + BN // 2, BM, BN // 2)
        turn += 2
    tma.store_wait(0)


@gluon.jit
def up_kernel(
    spread, up, up_bias, hidden, slope, tile_expert, num_tiles, D: gl.constexpr, F: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """hidden = gelu(pre) and slope = gelu′(pre), both (P, F), of pre = spread @ upᵀ + bias."""
    a_room = gl.allocate_shared_memory(spread.dtype, [STAGES, BM, BK], spread.layout)
    b_room = gl.allocate_shared_memory(up.dtype, [STAGES, BN, BK], up.layout)
    hidden_room = gl.allocate_shared_memory(hidden.dtype, [2, BM, BN // 2], hidden.layout)
    full, empty, order = make_barriers(STAGES), make_barriers(STAGES), make_barriers(2)
    fence_async_shared()
    gl.warp_specialize([
        (up_group, (a_room, b_room, full, empty, order, hidden, slope, hidden_room, up_bias, tile_expert,
                    num_tiles, 0, D, F, BM, BN, BK, STAGES)),
        (up_group, (a_room, b_room, full, empty, order, hidden, slope, hidden_room, up_bias, tile_expert,
                    num_tiles, 1, D, F, BM, BN, BK, STAGES)),
        (bring, (spread, up, a_room, b_room, full, empty, tile_expert, num_tiles, F, D, F // BN, BM, BN, BK, STAGES,
                 True)),
    ], [4, 1], [REGISTERS, BRINGING_REGISTERS])  # fmt: skip


@gluon.jit
def put(part, target, room, first, column):
    """Store half a tile."""
    part = part.to(target.dtype)
    tma.store_wait(0)
    room.store(part)
    fence_async_shared()
    tma.async_copy_shared_to_global(target, [first, column], room)


@gluon.jit
def fetch(slope, LAYOUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Half a tile of slopes, by the threads that `activate` stored them from."""
    half, _ = halves(gl.zeros((BM, BN), gl.uint8, LAYOUT), BM, BN)
    line = line_up(half, BM, BN // 2)
    found = gl.load(slope + gl.arange(0, BM * BN // 2, layout=line.type.layout))
    return gl.convert_layout(line_back(found, BM, BN // 2), half.type.layout, assert_trivial=True)


@gluon.jit
def scale(back, steep, grad_pre, grad_room, sums, first, column, F: gl.constexpr, BM: gl.constexpr):
    """Store back · slope of half a tile; and where asked for, the sums of its columns, before they are rounded."""
    grad = back * unpack_slope(steep)
    if sums is not None:
        total = gl.sum(grad, 0)
        places = column + gl.arange(0, total.shape[0], layout=total.type.layout)
        gl.store(sums + first // BM * F + places, total)
    put(grad, grad_pre, grad_room, first, column)


@gluon.jit
def down_backward_group(
    a_room, b_room, full, empty, order, slope, grad_pre, grad_room, sums, tile_expert, num_tiles, WHO: gl.constexpr,
    D: gl.constexpr, F: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Every other job of this program, from number WHO on. Its slopes are fetched while it multiplies."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    COLUMNS: gl.constexpr = F // BN
    STEPS: gl.constexpr = (D + BK - 1) // BK
    grad_room = grad_room.index(WHO)
    turn = gl.to_tensor(WHO)
    programs = gl.num_programs(0)
    for job in range(gl.program_id(0) + WHO * programs, count_tiles(num_tiles, tile_expert) * COLUMNS, 2 * programs):
        first, column = job // COLUMNS * BM, job % COLUMNS * BN
        here = slopes_of(slope, job, BM * BN)
        steep_left, steep_right = fetch(here, LAYOUT, BM, BN), fetch(here + BM * BN // 2, LAYOUT, BM, BN)
        acc = multiply(turn, a_room, b_room, full, empty, order, WHO, STEPS, BM, BN, STAGES, False, LAYOUT)
        left, right = halves(acc, BM, BN)
        scale(left, steep_left, grad_pre, grad_room, sums, first, column, F, BM)
        scale(right, steep_right, grad_pre, grad_room, sums, first, column + BN // 2, F, BM)
        turn += 2
    tma.store_wait(0)


@gluon.jit
def down_backward_kernel(
    grad_rows, down, slope, grad_pre, sums, tile_expert, num_tiles, D: gl.constexpr, F: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """grad_pre (P, F) = (grad_rows @ down) · slope, slopes in bytes. sums (tiles, F), if not None: of the
    columns of each tile of grad_pre."""
    a_room = gl.allocate_shared_memory(grad_rows.dtype, [STAGES, BM, BK], grad_rows.layout)
    b_room = gl.allocate_shared_memory(down.dtype, [STAGES, BK, BN], down.layout)
    grad_room = gl.allocate_shared_memory(grad_pre.dtype, [2, BM, BN // 2], grad_pre.layout)
    full, empty, order = make_barriers(STAGES), make_barriers(STAGES), make_barriers(2)
    fence_async_shared()
    gl.warp_specialize([
        (down_backward_group, (a_room, b_room, full, empty, order, slope, grad_pre, grad_room, sums,
                               tile_expert, num_tiles, 0, D, F, BM, BN, BK, STAGES)),
        (down_backward_group, (a_room, b_room, full, empty, order, slope, grad_pre, grad_room, sums,
                               tile_expert, num_tiles, 1, D, F, BM, BN, BK, STAGES)),
        (bring, (grad_rows, down, a_room, b_room, full, empty, tile_expert, num_tiles, D, D, F // BN, BM, BN, BK,
                 STAGES, False)),
    ], [4, 1], [REGISTERS, BRINGING_REGISTERS])  # fmt: skip


@gluon.jit
def plain_group(
    a_room, b_room, full, empty, order, target, room, bias, tile_expert, num_tiles, WHO: gl.constexpr,
    INNER: gl.constexpr, WIDTH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Every other job of this program, from number WHO on."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    COLUMNS: gl.constexpr = WIDTH // BN
    STEPS: gl.constexpr = (INNER + BK - 1) // BK
    room = room.index(WHO)
    turn = gl.to_tensor(WHO)
    programs = gl.num_programs(0)
    for job in range(gl.program_id(0) + WHO * programs, count_tiles(num_tiles, tile_expert) * COLUMNS, 2 * programs):
        first, column = job // COLUMNS * BM, job % COLUMNS * BN
        if bias is not None:
            columns = column + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
            own = gl.load(bias + find_expert(tile_expert, job // COLUMNS) * WIDTH + columns)
        acc = multiply(turn, a_room, b_room, full, empty, order, WHO, STEPS, BM, BN, STAGES, TRANSPOSED, LAYOUT)
        if bias is not None:
            acc += own.to(gl.float32)[None, :]
        left, right = halves(acc, BM, BN)
        put(left, target, room, first, column)
        put(right, target, room, first, column + BN // 2)
        turn += 2
    tma.store_wait(0)


@gluon.jit
def plain_kernel(
    rows, weights, bias, target, tile_expert, num_tiles, INNER: gl.constexpr, WIDTH: gl.constexpr, HEIGHT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """target (P, WIDTH) = rows (P, INNER) @ the expert's matrix, of HEIGHT rows, + bias. TRANSPOSED: its rows are the
    columns of the result."""
    a_room = gl.allocate_shared_memory(rows.dtype, [STAGES, BM, BK], rows.layout)
    if TRANSPOSED:
        b_room = gl.allocate_shared_memory(weights.dtype, [STAGES, BN, BK], weights.layout)
    else:
        b_room = gl.allocate_shared_memory(weights.dtype, [STAGES, BK, BN], weights.layout)
    room = gl.allocate_shared_memory(target.dtype, [2, BM, BN // 2], target.layout)
    full, empty, order = make_barriers(STAGES), make_barriers(STAGES), make_barriers(2)
    fence_async_shared()
    gl.warp_specialize([
        (plain_group, (a_room, b_room, full, empty, order, target, room, bias, tile_expert, num_tiles, 0, INNER, WIDTH,
                       BM, BN, BK, STAGES, TRANSPOSED)),
        (plain_group, (a_room, b_room, full, empty, order, target, room, bias, tile_expert, num_tiles, 1, INNER, WIDTH,
                       BM, BN, BK, STAGES, TRANSPOSED)),
        (bring, (rows, weights, a_room, b_room, full, empty, tile_expert, num_tiles, HEIGHT, INNER, WIDTH // BN, BM, BN,
                 BK, STAGES, TRANSPOSED)),
    ], [4, 1], [REGISTERS, BRINGING_REGISTERS])  # fmt: skip


def can_take_turns(x: Tensor, rows: int, width: int) -> bool:
    """Whether these kernels fit: bf16 on Hopper, in tiles of so many rows, for a result of whole blocks."""
    fits = rows == ROWS and width % COLUMNS == 0
    return fits and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] == 9


def describe(matrix: Tensor, rows: int, columns: int) -> Any:
    """A matrix, for the copy engine to fetch blocks from or to bring them to."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


def launch(kernel: Any, programs: int, *arguments: Any, **sizes: Any) -> None:
    """Launch one of the kernels: one program a multiprocessor."""
    sizes |= {"BM": ROWS, "BN": COLUMNS, "BK": INNER, "STAGES": STAGES, "REGISTERS": REGISTERS}
    kernel[(programs,)](*arguments, **sizes, num_warps=4)

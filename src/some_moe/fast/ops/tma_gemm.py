"""The Triton kernels of the fused path. `fused.py` says in which order they run, and why.

Shapes: N tokens, K experts each, D model width, F hidden width. A slot is a (token, choice); its row lies with those
of the same expert, and each expert's rows begin at a multiple of BM, so that a tile of BM rows has one expert. P rows
in all, some of them between two experts and unused: nothing reads what is computed there. So no kernel needs a mask
for its rows, and all that the products read and write is moved by the copy engine, which cuts at the edges itself.
"""

import triton
import triton.language as tl

# Φ(x) ≈ ½ + ½ tanh(x·(P0 + P1·x² + P2·x⁴)), fitted so that x·Φ(x) is off by at most 3e-5, and its slope by 1.2e-4.
P0 = tl.constexpr(0.797497122)
P1 = tl.constexpr(0.0370154347)
P2 = tl.constexpr(-0.000353106229)


@triton.jit
def gelu_parts(x, EXACT: tl.constexpr):
    """Φ(x) and φ(x) of the exact GELU x·Φ(x): to 1e-7, or fast and still finer than bf16 rounds."""
    if EXACT:
        gauss = tl.exp2(x * x * -0.7213475204444817)
        t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))  # Abramowitz and Stegun, 7.1.26
        poly = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        tail = poly * gauss
        cdf = tl.where(x >= 0, 1.0 - tail, tail)
        pdf = 0.3989422804014327 * gauss
    else:
        z = tl.minimum(x * x, 32.0)  # beyond it Φ is 0 or 1, and the polynomial would turn back
        # One hardware instruction where the other way needs an exponential and a division.
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x * (P0 + z * (P1 + z * P2))], tl.float32, True, 1
        )
        cdf = 0.5 + 0.5 * t
        pdf = (0.5 - 0.5 * t * t) * (P0 + z * (3 * P1 + z * (5 * P2)))
    return cdf, pdf


@triton.jit
def find_pieces(num_tokens, D: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr):
    """BLOCK pieces of tokens, of at most BD columns each: token, whether it exists, columns, and which are there."""
    PIECES: tl.constexpr = (D + BD - 1) // BD
    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = (piece // PIECES).to(tl.int64)
    column = (piece % PIECES)[:, None] * BD + tl.arange(0, BD)[None, :]
    exists = token < num_tokens
    return token, exists, column, exists[:, None] & (column < D)


@triton.jit
def spread_kernel(x, row, out, num_tokens, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr):
    """out (P, D): each token's x (N, D) at the rows (N, K) of its slots."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    column = tl.arange(0, BD)
    keep = exists[:, None] & (column < D)[None, :]
    value = tl.load(x + token[:, None] * D + column[None, :], mask=keep, other=0.0)
    for k in tl.range(K, loop_unroll_factor=4):
        at = tl.load(row + token * K + k, mask=exists, other=0).to(tl.int64)
        tl.store(out + at[:, None] * D + column[None, :], value, mask=keep)


@triton.jit
def product(
    a, b, first, row, column, INNER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ over INNER of a (BM, INNER), rows from `first` on, times b (INNER, BN) of the expert whose matrix begins at
    `row` of the stack; TRANSPOSED: b's columns are the rows of that matrix.

    Beyond the expert's last row lies the next one's: what is read there meets zeros of a, or makes columns that are
    cut off when they are stored.
    """
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, INNER, BK):
        left = a.load([first, k])
        if TRANSPOSED:
            right = b.load([row + column, k]).T
        else:
            right = b.load([row + k, column])
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of the columns of a tile (BM, BN): stored part by part it takes less room."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def count_tiles(num_tiles, tile_expert):
    """How many tiles are in use; without a table of their experts it is known beforehand."""
    if tile_expert is None:
        number = num_tiles
    else:
        number = tl.load(num_tiles)
    return number


@triton.jit
def find_expert(tile_expert, tile):
    """A tile's expert; without a table there is but one."""
    if tile_expert is None:
        expert = tile * 0
    else:
        expert = tl.load(tile_expert + tile)
    return expert


# The products' programs stay: each takes one block of columns of a tile after the other, and while it finishes one
# (`flatten`), the copy engine fetches the beginning of the next.


@triton.jit
def up_kernel(
    spread, up, up_bias, hidden, slope, tile_expert, num_tiles,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden = gelu(pre) and slope = gelu′(pre), both (P, F), of pre = spread @ upᵀ + bias."""
    COLUMNS: tl.constexpr = (F + BN - 1) // BN
    for job in tl.range(
        tl.program_id(0), count_tiles(num_tiles, tile_expert) * COLUMNS, tl.num_programs(0), flatten=True
    ):
        first, column = job // COLUMNS * BM, job % COLUMNS * BN
        expert = find_expert(tile_expert, job // COLUMNS)
        acc = product(spread, up, first, expert * F, column, D, BM, BN, BK, True, PRECISION)
        columns = column + tl.arange(0, BN)
        acc += tl.load(up_bias + expert * F + columns, mask=columns < F, other=0.0).to(tl.float32)[None, :]
        left, right = halves(acc, BM, BN)
        part_1, part_2 = halves(left, BM, BN // 2)
        part_3, part_4 = halves(right, BM, BN // 2)
        activate(part_1, hidden, slope, first, column, PRECISION)
        activate(part_2, hidden, slope, first, column + BN // 4, PRECISION)
        activate(part_3, hidden, slope, first, column + BN // 2, PRECISION)
        activate(part_4, hidden, slope, first, column + BN // 2 + BN // 4, PRECISION)


@triton.jit
def activate(pre, hidden, slope, first, column, PRECISION: tl.constexpr):
    """Store gelu(pre) and gelu′(pre) of a block."""
    cdf, pdf = gelu_parts(pre, PRECISION == "ieee")
    hidden.store([first, column], (pre * cdf).to(hidden.dtype))
    slope.store([first, column], pack_slope(cdf + pre * pdf, slope.dtype))


# A slope lies between −0.13 and 1.13: counted from −0.13 in steps of 0.005 it fits a byte, to ±0.0025, as fine as bf16
# rounds the gradient beside it, with half the memory to write, to keep and to read. Adding 2²³ leaves a whole number in
# the last bits of a float, and taking it off gives the float back, in a fraction of a conversion's time.
STEPS = tl.constexpr(200.0)  # from 0 to 1
ZERO = tl.constexpr(26.0)  # the byte of slope 0
WHOLE = tl.constexpr(8388608.0)
WHOLE_BITS = tl.constexpr(0x4B000000)


@triton.jit
def pack_slope(slope, DTYPE: tl.constexpr):
    """Slopes as they are kept: bytes, or in the experts' type."""
    if tl.uint8 == DTYPE:
        packed = (slope * STEPS + (WHOLE + ZERO)).to(tl.int32, bitcast=True).to(tl.uint8)
    else:
        packed = slope.to(DTYPE)
    return packed


@triton.jit
def unpack_slope(packed):
    """Slopes in float32."""
    if packed.dtype == tl.uint8:
        whole = (packed.to(tl.int32) | WHOLE_BITS).to(tl.float32, bitcast=True) - (WHOLE + ZERO)
        slope = whole * (1 / STEPS)
    else:
        slope = packed.to(tl.float32)
    return slope


@triton.jit
def plain_kernel(
    rows, weights, bias, target, tile_expert, num_tiles,
    INNER: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """target (P, WIDTH) = rows (P, INNER) @ the expert's matrix, of HEIGHT rows, + bias. TRANSPOSED: its rows are the
    columns of the result."""
    COLUMNS: tl.constexpr = (WIDTH + BN - 1) // BN
    for job in tl.range(
        tl.program_id(0), count_tiles(num_tiles, tile_expert) * COLUMNS, tl.num_programs(0), flatten=True
    ):
        first, column = job // COLUMNS * BM, job % COLUMNS * BN
        expert = find_expert(tile_expert, job // COLUMNS)
        acc = product(rows, weights, first, expert * HEIGHT, column, INNER, BM, BN, BK, TRANSPOSED, PRECISION)
        if bias is not None:
            columns = column + tl.arange(0, BN)
            acc += tl.load(bias + expert * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
        left, right = halves(acc, BM, BN)
        target.store([first, column], left.to(target.dtype))
        target.store([first, column + BN // 2], right.to(target.dtype))


@triton.jit
def mix_kernel(
    rows, row, gates, onto, y, num_tokens, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr
):
    """y (N, D) = onto + Σ_k gate · rows[row]: no atomics, so the same bits every time.

    gates None: every one is 1. onto None: nothing.
    """
    token, exists, column, keep = find_pieces(num_tokens, D, BLOCK, BD)
    acc = tl.zeros((BLOCK, BD), dtype=tl.float32)
    if onto is not None:
        acc += tl.load(onto + token[:, None] * D + column, mask=keep, other=0.0).to(tl.float32)
    for k in tl.range(K, loop_unroll_factor=4):
        at = tl.load(row + token * K + k, mask=exists, other=0).to(tl.int64)
        part = tl.load(rows + at[:, None] * D + column, mask=keep, other=0.0).to(tl.float32)
        if gates is not None:
            part *= tl.load(gates + token * K + k, mask=exists, other=0.0).to(tl.float32)[:, None]
        acc += part
    tl.store(y + token[:, None] * D + column, acc.to(y.dtype.element_ty), mask=keep)


@triton.jit
def spread_backward_kernel(
    grad_y, row, gates, rows, out, grad_gates, num_tokens, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """out (P, D) = gate · grad_y at the rows of each token's slots; grad_gates (N, K) = rows · grad_y."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    column = tl.arange(0, BD)
    keep = exists[:, None] & (column < D)[None, :]
    incoming = tl.load(grad_y + token[:, None] * D + column[None, :], mask=keep, other=0.0).to(tl.float32)
    for k in tl.range(K, loop_unroll_factor=4):
        at = tl.load(row + token * K + k, mask=exists, other=0).to(tl.int64)[:, None] * D + column[None, :]
        gate = tl.load(gates + token * K + k, mask=exists, other=0.0).to(tl.float32)
        found = tl.load(rows + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(out + at, (gate[:, None] * incoming).to(out.dtype.element_ty), mask=keep)
        share = tl.sum(found * incoming, 1)
        tl.store(grad_gates + token * K + k, share.to(grad_gates.dtype.element_ty), mask=exists)


@triton.jit
def down_backward_kernel(
    grad_rows, down, slope, grad_pre, tile_expert, num_tiles,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,  # noqa: ARG001
    PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_pre (P, F) = (grad_rows @ down) · slope. One block a program: fetching slopes takes the room that a longer
    life would need."""
    n, tile = tl.program_id(0), tl.program_id(1)
    if tile >= count_tiles(num_tiles, tile_expert):
        return
    expert = find_expert(tile_expert, tile)
    acc = product(grad_rows, down, tile * BM, expert * D, n * BN, D, BM, BN, BK, False, PRECISION)
    grad = acc * unpack_slope(slope.load([tile * BM, n * BN]))
    grad_pre.store([tile * BM, n * BN], grad.to(grad_pre.dtype))

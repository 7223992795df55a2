"""Grouped GEMM kernels with TMA loads and stores (tensor descriptors), and fused GELU epilogues.

Rows are permuted by expert and padded to BM per expert (`permute`), so that an M-tile of BM rows has one expert. P rows
in all; nothing reads what is computed on padding rows. So no kernel masks rows, and TMA clips at the tensors' edges.

Shapes: P rows, D model width, F hidden width; each expert's matrix is a block of rows of one stacked matrix.
"""

import triton
import triton.language as tl

# Φ(x) ≈ ½ + ½ tanh(x·(P0 + P1·x² + P2·x⁴)), fitted so that x·Φ(x) is off by at most 3e-5, and gelu′ by 1.2e-4.
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
        # One hardware instruction instead of an exponential and a division.
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x * (P0 + z * (P1 + z * P2))], tl.float32, True, 1
        )
        cdf = 0.5 + 0.5 * t
        pdf = (0.5 - 0.5 * t * t) * (P0 + z * (3 * P1 + z * (5 * P2)))
    return cdf, pdf


@triton.jit
def gemm_tile(
    a, b, off_m, b_row, off_n, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The mainloop: a (BM, K) from row `off_m` on @ b (K, BN) of the expert whose matrix begins at `b_row` of the
    stack; TRANSPOSED: it is stored as (N, K).

    Beyond the expert's last row lies the next expert's: what is read there meets zeros of a, or makes columns that TMA
    clips at the store.
    """
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        left = a.load([off_m, k])
        if TRANSPOSED:
            right = b.load([b_row + off_n, k]).T
        else:
            right = b.load([b_row + k, off_n])
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def split_columns(tile, BM: tl.constexpr, BN: tl.constexpr):
    """The left and right halves of an accumulator (BM, BN): an epilogue by subtiles takes less shared memory."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def count_tiles(num_tiles, tile_expert):
    """M-tiles in use: on the device, unless there is but one expert (no table)."""
    if tile_expert is None:
        count = num_tiles
    else:
        count = tl.load(num_tiles)
    return count


@triton.jit
def find_expert(tile_expert, tile):
    """An M-tile's expert; without a table there is but one."""
    if tile_expert is None:
        expert = tile * 0
    else:
        expert = tl.load(tile_expert + tile)
    return expert


# Persistent kernels: each program loops over output tiles. With `flatten` the loop over tiles and the mainloop are
# pipelined as one, so that TMA prefetches the next tile's first stages during the epilogue.


@triton.jit
def up_gelu_kernel(
    x_rows, up, up_bias, hidden, dgelu, tile_expert, num_tiles,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden = gelu(pre) and dgelu = gelu′(pre), both (P, F), of pre = x_rows @ upᵀ + bias."""
    NUM_N: tl.constexpr = (F + BN - 1) // BN
    for tile_id in tl.range(
        tl.program_id(0), count_tiles(num_tiles, tile_expert) * NUM_N, tl.num_programs(0), flatten=True
    ):
        off_m, off_n = tile_id // NUM_N * BM, tile_id % NUM_N * BN
        expert = find_expert(tile_expert, tile_id // NUM_N)
        acc = gemm_tile(x_rows, up, off_m, expert * F, off_n, D, BM, BN, BK, True, PRECISION)
        offs_n = off_n + tl.arange(0, BN)
        acc += tl.load(up_bias + expert * F + offs_n, mask=offs_n < F, other=0.0).to(tl.float32)[None, :]
        left, right = split_columns(acc, BM, BN)
        part_1, part_2 = split_columns(left, BM, BN // 2)
        part_3, part_4 = split_columns(right, BM, BN // 2)
        gelu_epilogue(part_1, hidden, dgelu, off_m, off_n, PRECISION)
        gelu_epilogue(part_2, hidden, dgelu, off_m, off_n + BN // 4, PRECISION)
        gelu_epilogue(part_3, hidden, dgelu, off_m, off_n + BN // 2, PRECISION)
        gelu_epilogue(part_4, hidden, dgelu, off_m, off_n + BN // 2 + BN // 4, PRECISION)


@triton.jit
def gelu_epilogue(pre, hidden, dgelu, off_m, off_n, PRECISION: tl.constexpr):
    """Store gelu(pre) and gelu′(pre) of a subtile."""
    cdf, pdf = gelu_parts(pre, PRECISION == "ieee")
    hidden.store([off_m, off_n], (pre * cdf).to(hidden.dtype))
    dgelu.store([off_m, off_n], quantize_dgelu(cdf + pre * pdf, dgelu.dtype))


# gelu′ lies in [−0.13, 1.13]: quantized to uint8 with scale 1/200 and zero point 26 it is off by at most 0.0025, as
# fine as bf16 rounds the gradient that it multiplies, in half the memory. Conversion by the magic number 2²³: adding it
# leaves the integer in a float's low mantissa bits, subtracting it gives the float back, in a fraction of the time.
INV_SCALE = tl.constexpr(200.0)
ZERO_POINT = tl.constexpr(26.0)
MAGIC = tl.constexpr(8388608.0)
MAGIC_BITS = tl.constexpr(0x4B000000)


@triton.jit
def quantize_dgelu(dgelu, DTYPE: tl.constexpr):
    """gelu′ as it is saved: uint8, or cast to the experts' dtype."""
    if tl.uint8 == DTYPE:
        quantized = (dgelu * INV_SCALE + (MAGIC + ZERO_POINT)).to(tl.int32, bitcast=True).to(tl.uint8)
    else:
        quantized = dgelu.to(DTYPE)
    return quantized


@triton.jit
def dequantize_dgelu(quantized):
    """gelu′ in float32."""
    if quantized.dtype == tl.uint8:
        level = (quantized.to(tl.int32) | MAGIC_BITS).to(tl.float32, bitcast=True) - (MAGIC + ZERO_POINT)
        dgelu = level * (1 / INV_SCALE)
    else:
        dgelu = quantized.to(tl.float32)
    return dgelu


@triton.jit
def grouped_gemm_kernel(
    a, b, bias, out, tile_expert, num_tiles,
    K: tl.constexpr, N: tl.constexpr, B_ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out (P, N) = a (P, K) @ b + bias, b and bias of the tile's expert: B_ROWS rows of the stack. TRANSPOSED: b is
    stored as (N, K)."""
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    for tile_id in tl.range(
        tl.program_id(0), count_tiles(num_tiles, tile_expert) * NUM_N, tl.num_programs(0), flatten=True
    ):
        off_m, off_n = tile_id // NUM_N * BM, tile_id % NUM_N * BN
        expert = find_expert(tile_expert, tile_id // NUM_N)
        acc = gemm_tile(a, b, off_m, expert * B_ROWS, off_n, K, BM, BN, BK, TRANSPOSED, PRECISION)
        if bias is not None:
            offs_n = off_n + tl.arange(0, BN)
            acc += tl.load(bias + expert * N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
        left, right = split_columns(acc, BM, BN)
        out.store([off_m, off_n], left.to(out.dtype))
        out.store([off_m, off_n + BN // 2], right.to(out.dtype))


@triton.jit
def down_dgelu_kernel(
    grad_y_rows, down, dgelu, grad_pre, tile_expert, num_tiles,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,  # noqa: ARG001
    PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_pre (P, F) = (grad_y_rows @ down) · gelu′. Not persistent: loading gelu′ takes the shared memory that
    prefetching the next tile would need."""
    n, tile = tl.program_id(0), tl.program_id(1)
    if tile >= count_tiles(num_tiles, tile_expert):
        return
    expert = find_expert(tile_expert, tile)
    acc = gemm_tile(grad_y_rows, down, tile * BM, expert * D, n * BN, D, BM, BN, BK, False, PRECISION)
    grad = acc * dequantize_dgelu(dgelu.load([tile * BM, n * BN]))
    grad_pre.store([tile * BM, n * BN], grad.to(grad_pre.dtype))

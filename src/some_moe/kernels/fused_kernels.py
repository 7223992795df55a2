"""The Triton kernels of the fused path. `fused.py` says in which order they run, and why.

Shapes: N tokens, K experts each, S = N·K slots sorted by expert, D model width, F hidden width. A tile is
BM sorted slots of one expert; programs beyond the last tile find no expert and leave. Where an expert, a tile or
a row begins is a 64-bit offset (B3's stacks have more than 2³¹ elements); within it 32 bits save registers.
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
def tile_kernel(
    ends, tile_expert, tile_first, tile_end, num_experts, num_tiles, E: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr
):
    """Lay out the tiles: tile_expert (num_tiles,) is the tile's expert or −1; tile_first its first sorted
    slot; tile_end one past its last. ends (num_experts,): one past each expert's last sorted slot.
    """
    expert = tl.arange(0, E)
    known = expert < num_experts
    end = tl.load(ends + expert, mask=known, other=0)
    start = tl.load(ends + expert - 1, mask=known & (expert > 0), other=0)
    tiles = tl.where(known, (end - start + BM - 1) // BM, 0)
    last_tile = tl.cumsum(tiles, 0)
    first_tile = last_tile - tiles
    tile = tl.program_id(0) * BT + tl.arange(0, BT)
    mine = (tile[:, None] >= first_tile[None, :]) & (tile[:, None] < last_tile[None, :])
    found = tl.sum(tl.where(mine, expert[None, :] + 1, 0), 1) - 1
    first = tl.sum(tl.where(mine, start[None, :] + (tile[:, None] - first_tile[None, :]) * BM, 0), 1)
    last = tl.sum(tl.where(mine, end[None, :], 0), 1)
    tl.store(tile_expert + tile, found, mask=tile < num_tiles)
    tl.store(tile_first + tile, first, mask=tile < num_tiles)
    tl.store(tile_end + tile, tl.minimum(first + BM, last), mask=tile < num_tiles)


@triton.jit
def gathered_product(
    a_rows, weights, row, column, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ over K of a (BM, K) @ b (K, BN): a_rows points at the start of each row (BM, 1), and `tile_of` reads b."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    inner = tl.arange(0, BK)
    for k in range(0, K, BK):
        if K % BK == 0:
            a_tile = tl.load(a_rows + (k + inner)[None, :])
        else:
            a_tile = tl.load(a_rows + (k + inner)[None, :], mask=(k + inner < K)[None, :], other=0.0)
        acc = tl.dot(a_tile, tile_of(weights, row, column, k, TRANSPOSED), acc, input_precision=PRECISION)
    return acc


@triton.jit
def sorted_product(
    a, first, weights, row, column, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same where a's rows lie one after another: a is a descriptor of (S, K), read from row `first` on."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a.load([first, k]), tile_of(weights, row, column, k, TRANSPOSED), acc, input_precision=PRECISION)
    return acc


@triton.jit
def tile_of(weights, row, column, k, TRANSPOSED: tl.constexpr):
    """b (BK, BN) from the descriptor of a stack laid out as rows: rows from `row` on are one expert's.

    TRANSPOSED: b's columns are rows of the stack. Beyond the expert's last row lies the next one's; what is read
    there meets zeros of a, or makes columns that are not stored.
    """
    if TRANSPOSED:
        tile = weights.load([row + column, k]).T
    else:
        tile = weights.load([row + k, column])
    return tile


@triton.jit
def up_kernel(
    x, order, up, up_bias, pre, hidden, tile_expert, tile_first, tile_end,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """pre = x[token] @ upᵀ + bias and hidden = gelu(pre), both (S, F) in sorted order."""
    n, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_first + tile).to(tl.int64)
    slot = first.to(tl.int32) + tl.arange(0, BM)
    inside = slot < tl.load(tile_end + tile)
    if expert < 0:
        return
    token = tl.load(order + slot, mask=inside, other=0) // K
    column = n * BN + tl.arange(0, BN)
    exists = column < F
    bias = tl.load(up_bias + expert * F + column, mask=exists, other=0.0)
    acc = gathered_product(x + token[:, None] * D, up, expert * F, n * BN, D, BM, BN, BK, True, PRECISION)
    acc += bias.to(tl.float32)[None, :]
    cdf, _ = gelu_parts(acc, PRECISION == "ieee")
    out = tl.arange(0, BM)[:, None] * F + column[None, :]
    keep = inside[:, None] & exists[None, :]
    tl.store(pre + first * F + out, acc.to(pre.dtype.element_ty), mask=keep)
    tl.store(hidden + first * F + out, (acc * cdf).to(hidden.dtype.element_ty), mask=keep)


@triton.jit
def down_kernel(
    hidden, order, down, down_bias, out, tile_expert, tile_first, tile_end,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = hidden @ downᵀ + bias: (S, D), each row where its slot stood before sorting."""
    n, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_first + tile)
    slot = first + tl.arange(0, BM)
    inside = slot < tl.load(tile_end + tile)
    if expert < 0:
        return
    column = n * BN + tl.arange(0, BN)
    exists = column < D
    bias = tl.load(down_bias + expert * D + column, mask=exists, other=0.0)
    place = tl.load(order + slot, mask=inside, other=0).to(tl.int64)
    acc = sorted_product(hidden, first, down, expert * D, n * BN, F, BM, BN, BK, True, PRECISION)
    acc += bias.to(tl.float32)[None, :]
    keep = inside[:, None] & exists[None, :]
    tl.store(out + place[:, None] * D + column[None, :], acc.to(out.dtype.element_ty), mask=keep)


@triton.jit
def mix_kernel(rows, gates, y, num_tokens, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr):
    """y (N, D) = Σ_k gate · rows (N, K, D): no atomics, so the same bits every time."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BD)
    keep = (token < num_tokens)[:, None] & (column < D)[None, :]
    acc = tl.zeros((BLOCK, BD), dtype=tl.float32)
    for k in range(K):
        slot = token * K + k
        gate = tl.load(gates + slot, mask=token < num_tokens, other=0.0).to(tl.float32)
        acc += gate[:, None] * tl.load(rows + slot[:, None] * D + column[None, :], mask=keep, other=0.0).to(tl.float32)
    tl.store(y + token[:, None] * D + column[None, :], acc.to(y.dtype.element_ty), mask=keep)


@triton.jit
def halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of the columns of a tile (BM, BN)."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def backward_part(back, x, grad_pre, at, gate, keep, PRECISION: tl.constexpr):
    """Store gate · back · gelu′(x) for some columns of a tile, and return Σ gelu(x) · back (BM,)."""
    x = x.to(tl.float32)
    cdf, pdf = gelu_parts(x, PRECISION == "ieee")
    grad = gate[:, None] * back * (cdf + x * pdf)
    tl.store(grad_pre + at, grad.to(grad_pre.dtype.element_ty), mask=keep)
    # Where nothing was to be read x is 0, and so is its share.
    return tl.sum(x * cdf * back, 1)


@triton.jit
def down_backward_kernel(
    grad_y, order, gates, down, pre, grad_pre, partial, tile_expert, tile_first, tile_end,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """back = grad_y[token] @ down; grad_pre = gate · back · gelu′(pre) (S, F), sorted; and each column block's
    share of the gate gradient, Σ gelu(pre) · back, in partial (S, F / BN), where the slot stood before sorting."""
    n, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_first + tile).to(tl.int64)
    slot = first.to(tl.int32) + tl.arange(0, BM)
    inside = slot < tl.load(tile_end + tile)
    if expert < 0:
        return
    place = tl.load(order + slot, mask=inside, other=0)
    gate = tl.load(gates + place, mask=inside, other=0.0).to(tl.float32)
    # A quarter of the columns at a time: the registers would not hold more. Two are fetched before the product.
    column = n * BN + tl.arange(0, BN // 4)
    rows = tl.arange(0, BM)[:, None] * F
    at_1, at_2 = rows + column[None, :], rows + (column + BN // 4)[None, :]
    at_3, at_4 = rows + (column + BN // 2)[None, :], rows + (column + BN // 2 + BN // 4)[None, :]
    keep_1 = inside[:, None] & (column < F)[None, :]
    keep_2 = inside[:, None] & (column + BN // 4 < F)[None, :]
    keep_3 = inside[:, None] & (column + BN // 2 < F)[None, :]
    keep_4 = inside[:, None] & (column + BN // 2 + BN // 4 < F)[None, :]
    pre += first * F
    grad_pre += first * F
    x_1 = tl.load(pre + at_1, mask=keep_1, other=0.0)
    x_2 = tl.load(pre + at_2, mask=keep_2, other=0.0)
    back = gathered_product(
        grad_y + (place // K)[:, None] * D, down, expert * D, n * BN, D, BM, BN, BK, False, PRECISION
    )
    left, right = halves(back, BM, BN)
    back_1, back_2 = halves(left, BM, BN // 2)
    back_3, back_4 = halves(right, BM, BN // 2)
    x_3 = tl.load(pre + at_3, mask=keep_3, other=0.0)
    share = backward_part(back_1, x_1, grad_pre, at_1, gate, keep_1, PRECISION)
    x_4 = tl.load(pre + at_4, mask=keep_4, other=0.0)
    share += backward_part(back_2, x_2, grad_pre, at_2, gate, keep_2, PRECISION)
    share += backward_part(back_3, x_3, grad_pre, at_3, gate, keep_3, PRECISION)
    share += backward_part(back_4, x_4, grad_pre, at_4, gate, keep_4, PRECISION)
    tl.store(partial + place.to(tl.int64) * tl.num_programs(0) + n, share, mask=inside)


@triton.jit
def up_backward_kernel(
    grad_pre, order, up, grad_rows, tile_expert, tile_first, tile_end,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_rows = grad_pre @ up: (S, D), each row where its slot stood before sorting."""
    n, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_first + tile)
    slot = first + tl.arange(0, BM)
    inside = slot < tl.load(tile_end + tile)
    if expert < 0:
        return
    column = n * BN + tl.arange(0, BN)
    place = tl.load(order + slot, mask=inside, other=0).to(tl.int64)
    acc = sorted_product(grad_pre, first, up, expert * F, n * BN, F, BM, BN, BK, False, PRECISION)
    keep = inside[:, None] & (column < D)[None, :]
    tl.store(grad_rows + place[:, None] * D + column[None, :], acc.to(grad_rows.dtype.element_ty), mask=keep)


@triton.jit
def mix_backward_kernel(
    grad_rows, partial, grad_y, experts, down_bias, grad_x, grad_gates, num_tokens,
    K: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """grad_x (N, D) = Σ_k grad_rows; grad_gates (N, K) = Σ partial + down_bias[expert] · grad_y."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    column = tl.arange(0, BD)
    part = tl.arange(0, PARTS_PADDED)
    keep = exists[:, None] & (column < D)[None, :]
    incoming = tl.load(grad_y + token[:, None] * D + column[None, :], mask=keep, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCK, BD), dtype=tl.float32)
    for k in range(K):
        slot = token * K + k
        acc += tl.load(grad_rows + slot[:, None] * D + column[None, :], mask=keep, other=0.0).to(tl.float32)
        expert = tl.load(experts + slot, mask=exists, other=0).to(tl.int64)
        bias = tl.load(down_bias + expert[:, None] * D + column[None, :], mask=keep, other=0.0).to(tl.float32)
        shares = tl.load(
            partial + slot[:, None] * PARTS + part[None, :], mask=exists[:, None] & (part < PARTS)[None, :], other=0.0
        )
        tl.store(grad_gates + slot, tl.sum(bias * incoming, 1) + tl.sum(shares, 1), mask=exists)
    tl.store(grad_x + token[:, None] * D + column[None, :], acc.to(grad_x.dtype.element_ty), mask=keep)

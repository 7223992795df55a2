"""Expert weights from a number: the same bits on every device and in any order of generation.

Every weight is a function of (seed, layer, expert, matrix, index) through the integer hash of
`some_moe.hashing`. An upper 24-bit word m becomes the odd integer 2m + 1 − 2²⁴, which float32 holds exactly,
times one float32 factor: a single rounding, so no machine can differ.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from some_moe.experts import has_triton
from some_moe.hashing import derive_key, hash_words, to_unit24

MATRICES = {"up": 0, "up_bias": 1, "down": 2, "down_bias": 3}
_ZEROS = 16  # sparse init: where the zeros are has hash streams of its own
_CHUNK = 1 << 20  # words hashed at a time: small enough to stay in a CPU's cache


def fill_experts(
    out: Tensor,
    matrix: str,
    *,
    bound: float,
    seed: int,
    layer: int,
    experts: Iterable[int] | None = None,
    sparsity: float = 0.0,
) -> None:
    """Fill out (E, …) with the weights called `matrix` of the given experts (default: 0 … E−1) of a layer.

    Values are uniform within ±bound; with `sparsity`, that share is zero and the rest is scaled by
    1/√(1−sparsity), so that the variance stays the same.
    """
    chosen = range(out.shape[0]) if experts is None else experts
    code = MATRICES[matrix]
    scale = bound / (1 - sparsity) ** 0.5
    factor = torch.tensor(scale * 2.0**-24, dtype=torch.float32, device=out.device)
    num_zero = round(sparsity * 2**24)
    keys = [(derive_key(seed, layer, e, code), derive_key(seed, layer, e, code + _ZEROS)) for e in chosen]
    if out.is_cuda and has_triton():
        from some_moe.fast.ops.fill_experts import fill

        words = torch.tensor([[*value, *zero] for value, zero in keys], dtype=torch.int32, device=out.device)
        fill(out.view(out.shape[0], -1), words, factor, num_zero)
        return
    for row, (value_key, zero_key) in zip(out.view(out.shape[0], -1), keys, strict=True):
        for start in range(0, row.numel(), _CHUNK):
            part = row[start : start + _CHUNK]
            counter = torch.arange(start, start + part.numel(), dtype=torch.int32, device=out.device)
            odd = to_unit24(hash_words(counter, *value_key)) * 2 + (1 - 2**24)
            values = odd.to(torch.float32) * factor
            if sparsity:
                values = values * (to_unit24(hash_words(counter, *zero_key)) >= num_zero)
            part.copy_(values)


def fill_orthogonal(out: Tensor, matrix: str, *, seed: int, layer: int) -> None:
    """Fill out (E, rows, columns) with orthogonal matrices (orthonormal along the shorter side).

    The decomposition rounds differently on different machines, so these weights are saved, not regenerated.
    """
    uniform = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    fill_experts(uniform, matrix, bound=1.0, seed=seed, layer=layer)
    tall = out.shape[1] >= out.shape[2]
    for expert in range(out.shape[0]):
        normal = torch.erfinv(uniform[expert].double()) if tall else torch.erfinv(uniform[expert].double()).T
        q, r = torch.linalg.qr(normal)
        q = q * r.diagonal().sign()  # makes the decomposition unique, and the draw uniform
        out[expert].copy_(q if tall else q.T)


def checksum(tensors: Iterable[Tensor]) -> str:
    """Return 16 hexadecimal digits over the exact bits of the tensors, in order.

    A sum of the bit patterns, each times a scrambled number of its position, in wrapping 64-bit integers:
    exact whatever the order of addition, and fast on a GPU.
    """
    views = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for place, tensor in enumerate(tensors):
        bits = tensor.detach().contiguous().view(-1).view(views[tensor.element_size()])
        chunk = _CHUNK << 6 if bits.is_cuda else _CHUNK
        for start in range(0, bits.numel(), chunk):
            part = bits[start : start + chunk].to(torch.int64)
            first = start + (place << 40)
            weight = torch.arange(first, first + part.numel(), device=part.device)
            weight *= -0x61C8864680B583EB  # 2⁶⁴ over the golden ratio, as a signed word
            weight ^= weight >> 29
            total += int((weight * 2 + 1).mul_(part).sum())
    return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"

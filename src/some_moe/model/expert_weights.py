"""Expert weights from a number: the same bits on every device and in any order of generation.

Every weight is a function of (seed, layer, expert, matrix, index) through the integer hash of
`some_moe.hashing`. An upper 24-bit word m becomes the odd integer 2m + 1 − 2²⁴, which float32 holds exactly,
times one float32 factor: a single rounding, so no machine can differ.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

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
    chosen = list(range(out.shape[0]) if experts is None else experts)
    code = MATRICES[matrix]
    scale = bound / (1 - sparsity) ** 0.5
    factor = torch.tensor(scale * 2.0**-24, dtype=torch.float32, device=out.device)
    num_zero = round(sparsity * 2**24)
    values_key, zeros_key = (
        torch.tensor([derive_key(seed, layer, e, code + stream) for e in chosen], dtype=torch.int32, device=out.device)
        for stream in (0, _ZEROS)
    )
    flat = out.view(out.shape[0], -1)
    width = min(flat.shape[1], _CHUNK)
    for first in range(0, len(flat), height := max(1, _CHUNK // width)):
        some = slice(first, first + height)
        for start in range(0, flat.shape[1], width):
            part = flat[some, start : start + width]
            counter = torch.arange(start, start + part.shape[1], dtype=torch.int32, device=out.device)
            odd = to_unit24(hash_words(counter, *values_key[some, :, None].unbind(1))) * 2 + (1 - 2**24)
            values = odd.to(torch.float32) * factor
            if sparsity:
                values = values * (to_unit24(hash_words(counter, *zeros_key[some, :, None].unbind(1))) >= num_zero)
            part.copy_(values)


def fill_orthogonal(out: Tensor, matrix: str, *, seed: int, layer: int, experts: Iterable[int] | None = None) -> None:
    """Fill out (E, rows, columns) with orthogonal matrices (orthonormal along the shorter side).

    The decomposition rounds differently on different machines, so these weights are saved, not regenerated.
    """
    uniform = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    fill_experts(uniform, matrix, bound=1.0, seed=seed, layer=layer, experts=experts)
    tall = out.shape[1] >= out.shape[2]
    for expert in range(out.shape[0]):
        normal = torch.erfinv(uniform[expert].double()) if tall else torch.erfinv(uniform[expert].double()).T
        q, r = torch.linalg.qr(normal)
        q = q * r.diagonal().sign()  # makes the decomposition unique, and the draw uniform
        out[expert].copy_(q if tall else q.T)


def checksum(tensors: Iterable[Tensor], first: int = 0) -> str:
    """Return 16 hexadecimal digits over the exact bits of the stacks, in order; first: the number of their first row.

    A sum of the bit patterns, each times a scrambled number of its position, in wrapping 64-bit integers:
    exact whatever the order of addition, and fast on a GPU. Parts of a stack have sums that add up to its own.
    """
    views = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    totals = []
    for place, tensor in enumerate(tensors):
        bits = tensor.detach().contiguous().view(-1).view(views[tensor.element_size()])
        for start in range(0, bits.numel(), _CHUNK):
            part = bits[start : start + _CHUNK].to(torch.int64)
            begin = start + first * tensor[0].numel() + (place << 40)
            weight = torch.arange(begin, begin + part.numel(), device=part.device)
            weight *= -0x61C8864680B583EB  # 2⁶⁴ over the golden ratio, as a signed word
            weight ^= weight >> 29
            totals.append((weight * 2 + 1).mul_(part).sum())
    total = int(torch.stack(totals).sum()) if totals else 0
    return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"

"""Which tokens' queries are sampled for gravity: chosen by hash alone, so that it is known before they are computed.

Shapes: L layers, B rows, T positions, N = B·T tokens, S samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from some_moe.config import GravityConfig
from some_moe.experts import has_triton
from some_moe.hashing import derive_key, sample_order

NOT_SAMPLED = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Samples:
    """The first S counted tokens in the order of each layer, or of one layer: then L is left out."""

    place: Tensor  # (L, S) int64: where among the N tokens; anywhere, if not sampled
    order: Tensor  # (L, S) int64: rising, NOT_SAMPLED where the batch has fewer counted tokens

    def of(self, layer: int) -> "Samples":
        return Samples(self.place[layer], self.order[layer])


def make_layer_words(num_layers: int) -> Tensor:
    """The layers' numbers as `hashing.sample_order` takes them: (L, 2) int32."""
    return torch.tensor([derive_key(layer) for layer in range(num_layers)], dtype=torch.int32)


def lowest_uncounted(gravity: GravityConfig) -> int:
    """Tokens count in a layer's statistics whose order's upper 31 bits are below this."""
    return round(gravity.token_fraction * 2**31)


@torch.no_grad()
def choose_samples(salt: Tensor, layers: Tensor, rows: Tensor, counted: Tensor, gravity: GravityConfig) -> Samples:
    """Sample num_samples tokens a layer. layers (L, 2) int32: `make_layer_words`; the others as in `TokenInfo`."""
    size = min(gravity.num_samples, counted.numel())
    limit = lowest_uncounted(gravity)
    if counted.is_cuda and has_triton():
        from some_moe.fast.ops.sampling import MOST, first_samples

        if size <= MOST:
            place, order = first_samples(salt, layers, rows, counted, limit, size)
            return _pad(place, order, gravity.num_samples)
    order = sample_order(salt, layers, rows, counted.shape[1])
    order = torch.where(counted & (order >> 32 < limit), order, NOT_SAMPLED).flatten(1)
    first = order.topk(size, largest=False, sorted=True)
    return _pad(first.indices, first.values, gravity.num_samples)


def _pad(place: Tensor, order: Tensor, num_samples: int) -> Samples:
    """Samples of that many tokens, where a batch has fewer. F.pad would take NOT_SAMPLED for a float."""
    shape = (len(place), num_samples - place.shape[1])
    if shape[1] == 0:
        return Samples(place, order)
    nowhere, last = place.new_zeros(shape), order.new_full(shape, NOT_SAMPLED)
    return Samples(torch.cat((place, nowhere), 1), torch.cat((order, last), 1))

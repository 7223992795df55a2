"""The record of who was chosen, and the sums over tokens that gravity reads of it, which add up.

Shapes: B rows, T positions, N = B·T tokens, E experts, K chosen, D model width, S samples.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from some_moe.config import GravityConfig
from some_moe.hashing import sample_order
from some_moe.model.tokens import TokenInfo
from some_moe.precision import at_least_float32

NOT_SAMPLED = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which experts one layer chose, and sums over the counted tokens that add up over micro-batches and ranks.

    `a + b` adds the sums, keeps the samples that come first in the order, and drops what belongs to one batch.
    """

    counts: Tensor  # (E,) int64 selections n
    query_sum: Tensor  # (E, D) sum s of the unit queries of each expert's tokens
    pairs: Tensor  # (E, E) int64 co-selections C; the diagonal is n
    num_tokens: Tensor  # () int64 counted tokens
    raw_sum: Tensor  # (D,) sum of raw queries, before centring; (0,) where they are not centred
    sample: Tensor  # (S, D) unit queries, first in the order first; zero: no direction, or no token
    sample_order: Tensor  # (S,) int64, NOT_SAMPLED where the batch had fewer tokens
    experts: Tensor | None = None  # (B, T, K) int64
    gates: Tensor | None = None  # (B, T, K), a record: gradients go by what the router returns beside it
    query: Tensor | None = None  # (B, T, D) the layer's query, before centring; a record, but for `grounding`
    base_experts: Tensor | None = None  # (B, T, K) int64 those of the base, where branches add to what they say
    base_gates: Tensor | None = None  # (B, T, K)
    aux_loss: Tensor | None = None  # () what this layer adds to the training loss

    def __add__(self, other: "Routing") -> "Routing":
        order, place = torch.cat((self.sample_order, other.sample_order)).sort()
        keep = len(self.sample_order)
        return Routing(
            **{name: getattr(self, name) + getattr(other, name) for name in SUMS},
            sample=torch.cat((self.sample, other.sample))[place[:keep]],
            sample_order=order[:keep],
        )

    def detach(self) -> "Routing":
        """The sums and samples alone, without the batch's own tensors or their graph."""
        return Routing(**{name: getattr(self, name).detach() for name in (*SUMS, "sample", "sample_order")})


SUMS = ("counts", "query_sum", "pairs", "num_tokens", "raw_sum")
assert {f.name for f in fields(Routing)} >= set(SUMS)


def unit_vectors(x: Tensor) -> Tensor:
    """Scale vectors (…, D) to unit length, however long or short; a zero vector stays zero."""
    largest = x.abs().amax(-1, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp(min=1)


def lowest_uncounted(gravity: GravityConfig) -> int:
    """Tokens count in a layer's statistics whose order's upper 31 bits are below this."""
    return round(gravity.token_fraction * 2**31)


def count_fraction(info: TokenInfo, layer_words: Tensor, gravity: GravityConfig) -> Tensor:
    """Which tokens enter the sums: (B, T), or where each layer chooses its own, (…, B, T) as layer_words is (…, 2)."""
    if gravity.token_fraction == 1:
        return info.counted
    order = sample_order(info.salt, layer_words, info.rows, info.counted.shape[1])
    return info.counted & (order >> 32 < lowest_uncounted(gravity))


def choose_samples(info: TokenInfo, layer_words: Tensor, gravity: GravityConfig) -> tuple[Tensor, Tensor]:
    """The first S counted tokens by the order of (salt, layer, row, position): their places among the N, and orders.

    layer_words (…, 2): the layer as `hashing.sample_order` takes it, or several. Known before any query is computed.
    """
    order = sample_order(info.salt, layer_words, info.rows, info.counted.shape[1])
    order = torch.where(info.counted & (order >> 32 < lowest_uncounted(gravity)), order, NOT_SAMPLED).flatten(-2)
    first = order.topk(min(gravity.num_samples, order.shape[-1]), largest=False, sorted=True)
    return pad_samples(first.indices, first.values, gravity.num_samples)


def pad_samples(place: Tensor, order: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """Samples (…, S) where a batch has fewer tokens. F.pad would take NOT_SAMPLED for a float."""
    shape = (*place.shape[:-1], num_samples - place.shape[-1])
    if shape[-1] == 0:
        return place, order
    nowhere, last = place.new_zeros(shape), order.new_full(shape, NOT_SAMPLED)
    return torch.cat((place, nowhere), -1), torch.cat((order, last), -1)


@torch.no_grad()
def summarize(
    experts: Tensor,
    query: Tensor,
    mean: Tensor | None,
    info: TokenInfo,
    layer_words: Tensor,
    num_experts: int,
    gravity: GravityConfig,
) -> dict[str, Tensor]:
    """Add up what gravity needs. experts (B, T, K); query (B, T, D), and the mean that centring takes from it.

    layer_words (2,): the layer as `hashing.sample_order` takes it.
    """
    if not info.sums:
        return shape_sums(num_experts, query.shape[-1], gravity.num_samples, centred=mean is not None)
    raw = at_least_float32(query.flatten(0, 1))
    unit = unit_vectors(raw if mean is None else raw - mean.to(raw.dtype))
    counted = count_fraction(info, layer_words, gravity).flatten()
    # One row per token with a 1 at each chosen expert: all sums are matrix products, exact for counts.
    chosen = unit.new_zeros(len(unit), num_experts)
    experts = experts.flatten(0, 1)
    chosen.scatter_(1, experts, counted.to(unit.dtype)[:, None].expand(experts.shape))
    pairs = (chosen.T @ chosen).to(torch.int64)
    place, order = choose_samples(info, layer_words, gravity)
    return {
        "counts": pairs.diagonal().contiguous(),
        "query_sum": chosen.T @ unit,
        "pairs": pairs,
        "num_tokens": counted.sum(),
        "raw_sum": raw.new_empty(0) if mean is None else (raw * counted.to(raw.dtype)[:, None]).sum(0),
        "sample": torch.where((order < NOT_SAMPLED)[:, None], unit[place], 0.0),
        "sample_order": order,
    }


def shape_sums(num_experts: int, d_model: int, num_samples: int, *, centred: bool) -> dict[str, Tensor]:
    """Sums that were not made: shapes without values, so that whoever reads them fails."""
    shapes: dict[str, tuple[int, ...]] = {
        "counts": (num_experts,),
        "query_sum": (num_experts, d_model),
        "pairs": (num_experts, num_experts),
        "num_tokens": (),
        "raw_sum": (d_model if centred else 0,),
        "sample": (num_samples, d_model),
        "sample_order": (num_samples,),
    }
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

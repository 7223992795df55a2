"""The record of who was chosen, and the sums over tokens that gravity reads of it, which add up.

Shapes: L layers, B rows, T positions, N = B·T tokens, E experts, K chosen, D model width, S samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Self

import torch
from torch import Tensor

from some_moe.config import GravityConfig, ModelConfig
from some_moe.experts import has_triton, makes_bf16
from some_moe.hashing import make_salt, sample_order
from some_moe.model.samples import NOT_SAMPLED, Samples, choose_samples, lowest_uncounted


@dataclass(frozen=True, kw_only=True)
class TokenInfo:
    """What a layer must know about a batch's tokens besides their vectors."""

    counted: Tensor  # (B, T) bool: which tokens enter the statistics
    rows: Tensor  # (B,) int64: each row's number within the whole step, over micro-batches and ranks
    salt: Tensor  # (2,) int32: a hash of seed and step, see hashing.make_salt
    ids: Tensor | None = None  # (B, T) token ids, for hash routing
    # Whether the layer makes the sums that gravity reads. Not where nobody reads them, as in generation and evaluation;
    # nor where the model makes those of all layers at once.
    sums: bool = True
    samples: Samples | None = None  # this layer's, where they were chosen for all layers at once

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        device: torch.device,
        *,
        counted: Tensor | None = None,
        rows: Tensor | None = None,
        seed: int = 0,
        step: int = 0,
        salt: Tensor | None = None,
        ids: Tensor | None = None,
        sums: bool = True,
    ) -> Self:
        """Fill in what is not given: every token counts, rows are numbered from 0."""
        return cls(
            counted=torch.ones(shape, dtype=torch.bool, device=device) if counted is None else counted,
            rows=torch.arange(shape[0], device=device) if rows is None else rows,
            salt=make_salt(seed, step, device) if salt is None else salt,
            ids=ids,
            sums=sums,
        )


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


def at_least_float32(x: Tensor) -> Tensor:
    """Routing is decided in float32 or better, whatever the model computes in."""
    return x if x.dtype == torch.float64 else x.float()


def unit_vectors(x: Tensor) -> Tensor:
    """Scale vectors (…, D) to unit length, however long or short; a zero vector stays zero."""
    largest = x.abs().amax(-1, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp(min=1)


@dataclass(frozen=True)
class _Sums:
    """Sums over the counted ones of N tokens, called as in `Routing`."""

    counts: Tensor  # (E,) int64
    pairs: Tensor  # (E, E) int64
    query_sum: Tensor  # (E, D)
    num_tokens: Tensor  # () int64
    raw_sum: Tensor  # (D,) or (0,)


def _has_fast_sums(query: Tensor) -> bool:
    return query.is_cuda and query.dtype == torch.bfloat16 and has_triton()


def _add_up(experts: Tensor, query: Tensor, mean: Tensor | None, counted: Tensor, num_experts: int) -> _Sums:
    """Add up experts (N, K) and queries (N, D) over the counted tokens; unit queries are taken after centring."""
    if mean is None and _has_fast_sums(query):
        from some_moe.fast.ops.routing_stats import sum_by_expert

        counts, pairs, query_sum, number = sum_by_expert(experts, counted, query, num_experts)
        return _Sums(counts, pairs, query_sum, number, query_sum.new_empty(0))
    raw = at_least_float32(query)
    unit = unit_vectors(raw if mean is None else raw - mean.to(raw.dtype))
    # One row per token with a 1 at each chosen expert: all sums are matrix products, exact for counts.
    chosen = unit.new_zeros(len(unit), num_experts)
    chosen.scatter_(1, experts, counted.to(unit.dtype)[:, None].expand(experts.shape))
    pairs = (chosen.T @ chosen).to(torch.int64)
    return _Sums(
        pairs.diagonal().contiguous(),
        pairs,
        chosen.T @ unit,
        counted.sum(),
        raw.new_empty(0) if mean is None else (raw * counted.to(raw.dtype)[:, None]).sum(0),
    )


@cache
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


def _count_fraction(info: TokenInfo, layer_words: Tensor, gravity: GravityConfig) -> Tensor:
    """Which tokens enter the sums: (B, T), or where each layer chooses its own, (…, B, T) as layer_words is (…, 2)."""
    if gravity.token_fraction == 1:
        return info.counted
    order = sample_order(info.salt, layer_words, info.rows, info.counted.shape[1])
    return info.counted & (order >> 32 < lowest_uncounted(gravity))


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

    layer_words (2,): the layer as `sample_order` takes it.
    """
    if not info.sums:
        return shape_sums(num_experts, query.shape[-1], gravity.num_samples, centred=mean is not None)
    query = query.flatten(0, 1)
    counted = _count_fraction(info, layer_words, gravity)
    sums = _add_up(experts.flatten(0, 1), query, mean, counted.flatten(), num_experts)
    samples = info.samples
    if samples is None:
        samples = choose_samples(info.salt, layer_words[None], info.rows, info.counted, gravity).of(0)
    sample = at_least_float32(query[samples.place])
    sample = unit_vectors(sample if mean is None else sample - mean.to(sample.dtype))
    sample = torch.where((samples.order < NOT_SAMPLED)[:, None], sample, 0.0)
    return {name: getattr(sums, name) for name in SUMS} | {"sample": sample, "sample_order": samples.order}


def sums_come_together(model: ModelConfig, x: Tensor) -> bool:
    """Whether a model makes the sums of all its SoME layers in one go, once all have run: then they leave them out.

    x (…, D): what the layers' queries will be products of.
    """
    if model.router == "hash" or model.center_queries or not makes_bf16(x):
        return False
    from some_moe.fast.ops.routing_stats import can_sum

    return can_sum(model.d_model, model.num_experts)


@torch.no_grad()
def summarize_layers(
    routings: Sequence[Routing],
    info: TokenInfo,
    samples: Samples,
    layer_words: Tensor,
    num_experts: int,
    gravity: GravityConfig,
) -> tuple[Routing, ...]:
    """The records of all L layers with the sums and samples that they left out, see `sums_come_together`.

    info: as the layers got it, but with sums. layer_words (L, 2): the layers as `sample_order` takes them. On a GPU one
    launch does it for all layers: for one of them it would have too little to do. Elsewhere it is done one by one, by
    which tests know that it makes no difference.
    """
    experts, queries = [], []
    for routing in routings:
        assert routing.experts is not None
        assert routing.query is not None
        experts.append(routing.experts)
        queries.append(routing.query)
    if not all(map(_has_fast_sums, queries)):
        found = []
        with torch.autocast(info.counted.device.type, enabled=False):
            for layer, routing in enumerate(routings):
                told = replace(info, samples=samples.of(layer))
                words = layer_words[layer]
                made = summarize(experts[layer], queries[layer], None, told, words, num_experts, gravity)
                found.append(replace(routing, **made))
        return tuple(found)
    from some_moe.fast.ops.routing_stats import sum_layers

    counted = _count_fraction(info, layer_words, gravity).flatten(-2)
    experts, queries = [x.flatten(0, 1) for x in experts], [x.flatten(0, 1) for x in queries]
    stacks = sum_layers(experts, counted, queries, samples.place, samples.order, num_experts)
    return tuple(
        replace(
            routing,
            counts=counts,
            pairs=pairs,
            query_sum=query_sum,
            num_tokens=number,
            raw_sum=query_sum.new_empty(0),
            sample=sample,
            sample_order=order,
        )
        for routing, counts, pairs, query_sum, number, sample, order in zip(
            routings, *stacks, samples.order, strict=True
        )
    )

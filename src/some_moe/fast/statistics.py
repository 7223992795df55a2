"""The sums and samples that gravity reads, by kernels: of one layer, or of all layers in one go.

Shapes: L layers, B rows, T positions, N = B·T tokens, E experts, K chosen, D model width, S samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from some_moe.config import GravityConfig, ModelConfig
from some_moe.fast.ops.routing_stats import can_sum, sum_by_expert, sum_layers
from some_moe.fast.ops.sampling import MOST, first_samples
from some_moe.model import routing as plain
from some_moe.model.routing import NOT_SAMPLED, Routing, count_fraction, lowest_uncounted, pad_samples, unit_vectors
from some_moe.model.tokens import TokenInfo
from some_moe.precision import product_dtype


@dataclass(frozen=True, kw_only=True)
class SampledInfo(TokenInfo):
    """What a layer must know about its tokens, its samples among it: chosen for all layers by three launches."""

    samples: tuple[Tensor, Tensor]  # places and orders (S,)


def inform_layers(info: TokenInfo, layer_words: Tensor, gravity: GravityConfig) -> list[TokenInfo]:
    """What each of L layers must know, with its samples. layer_words (L, 2)."""
    places, orders = choose_samples(info, layer_words, gravity)
    return [SampledInfo(**vars(info), samples=pair) for pair in zip(places.unbind(), orders.unbind(), strict=True)]


@torch.no_grad()
def choose_samples(info: TokenInfo, layer_words: Tensor, gravity: GravityConfig) -> tuple[Tensor, Tensor]:
    """`model.routing.choose_samples` for layer_words (L, 2): places and orders (L, S)."""
    size = min(gravity.num_samples, info.counted.numel())
    if size > MOST:
        return plain.choose_samples(info, layer_words, gravity)
    limit = lowest_uncounted(gravity)
    place, order = first_samples(info.salt, layer_words, info.rows, info.counted, limit, size)
    return pad_samples(place, order, gravity.num_samples)


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
    """`model.routing.summarize`; by kernels where queries are in bf16 and not centred."""
    if not info.sums or mean is not None or query.dtype != torch.bfloat16:
        return plain.summarize(experts, query, mean, info, layer_words, num_experts, gravity)
    query, experts = query.flatten(0, 1), experts.flatten(0, 1)
    counted = count_fraction(info, layer_words, gravity).flatten()
    counts, pairs, query_sum, number = sum_by_expert(experts, counted, query, num_experts)
    if isinstance(info, SampledInfo):
        place, order = info.samples
    else:
        (place,), (order,) = choose_samples(info, layer_words[None], gravity)
    return {
        "counts": counts,
        "query_sum": query_sum,
        "pairs": pairs,
        "num_tokens": number,
        "raw_sum": query_sum.new_empty(0),
        "sample": torch.where((order < NOT_SAMPLED)[:, None], unit_vectors(query[place].float()), 0.0),
        "sample_order": order,
    }


def sums_come_together(model: ModelConfig, x: Tensor) -> bool:
    """Whether the sums of all SoME layers are made in one go, once all have run: then they leave them out.

    x (…, D): what the layers' queries will be products of.
    """
    has_raw_queries = model.ffn == "some" and model.router != "hash" and not model.center_queries
    return has_raw_queries and product_dtype(x) == torch.bfloat16 and can_sum(model.d_model, model.num_experts)


@torch.no_grad()
def summarize_layers(
    routings: Sequence[Routing],
    info: TokenInfo,
    samples: tuple[Tensor, Tensor],
    layer_words: Tensor,
    num_experts: int,
    gravity: GravityConfig,
) -> tuple[Routing, ...]:
    """The records of all L layers with the sums and samples that they left out, see `sums_come_together`.

    samples: of `choose_samples`. layer_words (L, 2). One launch for all layers: for one of them it would have too
    little to do.
    """
    experts, queries = [], []
    for routing in routings:
        assert routing.experts is not None
        assert routing.query is not None
        experts.append(routing.experts.flatten(0, 1))
        queries.append(routing.query.flatten(0, 1))
    counted = count_fraction(info, layer_words, gravity).flatten(-2)
    stacks = sum_layers(experts, counted, queries, *samples, num_experts)
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
        for routing, counts, pairs, query_sum, number, sample, order in zip(routings, *stacks, samples[1], strict=True)
    )

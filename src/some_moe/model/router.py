"""Chooses each token's experts, by keys or by hash.

Shapes: B rows, T positions, E experts, K chosen, D model width.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.config import GravityConfig, ModelConfig
from some_moe.hashing import assign_experts, make_layer_words
from some_moe.model.keystore import KeyState
from some_moe.model.routing import Routing, summarize
from some_moe.model.tokens import TokenInfo
from some_moe.precision import at_least_float32, full_precision


class Temperature(nn.Module):
    """One learned temperature, kept within bounds by a sigmoid on the logarithmic scale."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.low, self.high = config.temperature_bounds
        place = math.log(config.temperature / self.low) / math.log(self.high / self.low)
        self.start = math.log(place / (1 - place))
        self.place = nn.Parameter(torch.empty(()))

    def forward(self) -> Tensor:
        return self.low * (self.high / self.low) ** self.place.sigmoid()


class Choice(NamedTuple):
    """Who was chosen for each token, K of E experts."""

    experts: Tensor  # (B, T, K)
    gates: Tensor  # (B, T, K)
    scores: Tensor  # (B, T, E) of all, tempered
    base: tuple[Tensor, Tensor] | None = None  # experts and gates (B, T, K) beneath those, see `Routing`


class KeyRouter(nn.Module):
    """Content-based routing: the K experts whose keys score highest against the query."""

    def __init__(self, model: ModelConfig, gravity: GravityConfig, layer: int, seed: int) -> None:
        super().__init__()
        self.model, self.gravity = model, gravity
        self.layer_words: Tensor
        self.register_buffer("layer_words", make_layer_words([layer])[0], persistent=False)
        self.state = KeyState(model, gravity, layer, seed)
        self.temperature = Temperature(model) if model.learn_temperature else None

    def addresses(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (…, D) and keys (E, D) whose inner products are the scores."""
        keys = self.state.routing_keys.to(query.dtype)
        if self.model.score == "cosine":
            return self.model.cosine_scale * F.normalize(query, dim=-1), F.normalize(keys, dim=-1)
        return query, keys

    def score(self, query: Tensor) -> Tensor:
        """Compare queries (…, D) with the keys: (…, E)."""
        address, keys = self.addresses(query)
        return address @ keys.T

    def choose(self, query: Tensor, top_k: int, shares: Tensor | None = None) -> Choice:
        """The experts of each centred query (B, T, D). shares (B, T, E): see `TokenInfo`."""
        scores = self.score(query)
        biased = self.rank(scores, shares)
        experts = self.select(biased, top_k)
        tempered = scores / (self.model.temperature if self.temperature is None else self.temperature())
        return Choice(experts, self.weigh(tempered, experts), tempered, self.choose_base(biased, tempered, top_k))

    def rank(self, scores: Tensor, shares: Tensor | None) -> Tensor:  # noqa: ARG002
        """What decides who is chosen (B, T, E), and never how much the chosen count."""
        return scores.detach() + self.state.bias

    def select(self, biased: Tensor, top_k: int) -> Tensor:
        """The experts (B, T, K) that stand highest, by scores with their bias (B, T, E)."""
        return biased.topk(top_k, dim=-1).indices

    def weigh(self, tempered: Tensor, experts: Tensor) -> Tensor:
        """The gates (B, T, K) of chosen experts, by all tempered scores (B, T, E)."""
        if experts.shape[-1] == 1:  # a softmax over one is constant: the share among all E keeps a gradient
            return tempered.softmax(-1).gather(-1, experts)
        return tempered.gather(-1, experts).softmax(-1)

    def choose_base(self, biased: Tensor, tempered: Tensor, top_k: int) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """Who runs beneath the chosen, whoever is chosen: nobody, but in a model with branches."""
        return None

    def forward(self, query: Tensor, info: TokenInfo, top_k: int) -> tuple[Tensor, Routing]:
        """Choose top_k experts for each query (B, T, D): their gates (B, T, K), and the record."""
        with full_precision(query):
            raw, mean = at_least_float32(query), self.state.query_mean
            centred = raw if mean is None else raw - mean.to(raw.dtype)
            experts, gates, scores, base = self.choose(centred, top_k, info.shares)
            sums = summarize(experts, query, mean, info, self.layer_words, self.model.num_experts, self.gravity)
            aux_loss = auxiliary_loss(self.model, scores, experts, info.counted)
        return gates, self.record(experts, gates, query, sums, aux_loss, base)

    def record(
        self,
        experts: Tensor,
        gates: Tensor,
        query: Tensor,
        sums: dict[str, Tensor],
        aux_loss: Tensor | None,
        base: tuple[Tensor, Tensor] | None = None,
    ) -> Routing:
        # Whatever leaves with a gradient gets one, if only of zeros. Gates are copied: where a compiled graph breaks
        # behind the router, torch would take an alias for the gates themselves, and the query network would get none.
        kept = query if self.model.grounding else query.detach()
        base_experts, base_gates = base or (None, None)
        return Routing(
            **sums,
            experts=experts,
            gates=gates.detach().clone(),
            base_experts=base_experts,
            base_gates=base_gates,
            query=kept,
            aux_loss=aux_loss,
        )


class HashRouter(nn.Module):
    """No content: a token's experts follow from its id, and all count the same."""

    def __init__(self, model: ModelConfig, gravity: GravityConfig, layer: int) -> None:
        super().__init__()
        self.model, self.gravity, self.layer = model, gravity, layer
        self.layer_words: Tensor
        self.register_buffer("layer_words", make_layer_words([layer])[0], persistent=False)

    def assign(self, ids: Tensor, top_k: int) -> Tensor:  # (…) → (…, K)
        return assign_experts(ids, self.model.num_experts, top_k, self.model.expert_seed, self.layer)

    def forward(self, x: Tensor, info: TokenInfo, top_k: int) -> tuple[Tensor, Routing]:
        """Choose by info.ids; x (B, T, D) only stands in for queries in the sums. Returns gates and record."""
        if info.ids is None:
            raise ValueError("hash routing chooses by token id; pass TokenInfo(ids=...)")
        experts = self.assign(info.ids, top_k)
        sums = summarize(experts, x.detach(), None, info, self.layer_words, self.model.num_experts, self.gravity)
        gates = torch.full(experts.shape, 1 / top_k, dtype=at_least_float32(x).dtype, device=x.device)
        return gates, Routing(**sums, experts=experts, gates=gates)


def auxiliary_loss(config: ModelConfig, scores: Tensor, experts: Tensor, counted: Tensor) -> Tensor | None:
    """Weighted sum of the balance loss and the entropy band's penalty over counted tokens; None when both are off."""
    if not config.has_auxiliary_loss:
        return None
    weight = counted.to(scores.dtype)
    num_tokens = weight.sum().clamp(min=1)
    log_share = scores.log_softmax(-1)
    share = log_share.exp()
    loss = scores.new_zeros(())
    if config.balance_loss:
        mean_share = (share * weight[..., None]).sum((0, 1)) / num_tokens
        picked = weight[..., None].expand(experts.shape).reshape(-1)
        load = torch.zeros_like(mean_share).index_add(0, experts.reshape(-1), picked)
        load = load / (num_tokens * experts.shape[-1])
        loss = loss + config.balance_loss * config.num_experts * (load * mean_share).sum()
    if config.entropy_band is not None:
        low, high = config.entropy_band
        entropy = (-(share * log_share).sum(-1) * weight).sum() / num_tokens
        outside = (low - entropy).clamp(min=0) + (entropy - high).clamp(min=0)
        loss = loss + config.entropy_band_weight * outside**2
    return loss

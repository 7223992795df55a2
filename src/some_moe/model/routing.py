"""Chooses each token's experts, by keys or by hash.

Shapes: B rows, T positions, E experts, K chosen, D model width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.config import GravityConfig, ModelConfig
from some_moe.experts import has_triton
from some_moe.hashing import assign_experts, derive_key
from some_moe.model.keystore import KeyState
from some_moe.model.record import Routing, TokenInfo, at_least_float32, summarize


class Temperature(nn.Module):
    """One learned temperature, kept within bounds by a sigmoid on the logarithmic scale."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.low, self.high = config.temperature_bounds
        place = math.log(config.temperature / self.low) / math.log(self.high / self.low)
        self.start = math.log(place / (1 - place))
        self.place = nn.Parameter(torch.empty(()))

    def forward(self) -> Tensor:
        temperature: Tensor = self.low * (self.high / self.low) ** self.place.sigmoid()
        return temperature


class KeyRouter(nn.Module):
    """Content-based routing: the K experts whose keys score highest against the query."""

    def __init__(self, model: ModelConfig, gravity: GravityConfig, layer: int, seed: int) -> None:
        super().__init__()
        self.model, self.gravity = model, gravity
        self.layer_words: Tensor
        self.register_buffer("layer_words", torch.tensor(derive_key(layer), dtype=torch.int32), persistent=False)
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
        query, keys = self.addresses(query)
        return query @ keys.T

    def choose(self, query: Tensor, scored: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The experts (B, T, K) of each query, their gates, and all scores (B, T, E) at the temperature.

        query (B, T, D) as it came; scored, in float32 and centred.

        On a GPU the scores of those not chosen are never made, where nothing asks for them.
        """
        temperature = self.model.temperature if self.temperature is None else self.temperature()
        wants_all = top_k == 1 or self.model.has_auxiliary_loss or self.state.keys.requires_grad
        fits = scored.dtype == torch.float32 and top_k <= 16
        if scored.is_cuda and not wants_all and fits and has_triton():
            from some_moe.fast.ops.topk_keys import topk_keys

            address, keys = self.addresses(scored)
            if self.model.score == "dot" and self.state.query_mean is None:
                address = query  # before it was widened to float32: the same numbers in half the bytes
            settled = temperature if self.temperature is None else None  # a learned one must get its gradient
            experts, gates = topk_keys(address.flatten(0, 1), keys.contiguous(), self.state.bias, top_k, settled)
            if settled is None:
                gates = (gates / temperature).softmax(-1)
            shape = (*scored.shape[:2], top_k)
            return experts.view(shape), gates.view(shape), None
        scores = self.score(scored)
        # The bias decides who is chosen, and never how much the chosen count.
        experts = (scores.detach() + self.state.bias).topk(top_k, dim=-1).indices
        tempered = scores / temperature
        if top_k == 1:
            # A softmax over one is constant: the share among all E keeps a gradient for the query network.
            return experts, tempered.softmax(-1).gather(-1, experts), tempered
        return experts, tempered.gather(-1, experts).softmax(-1), tempered

    def forward(self, query: Tensor, info: TokenInfo, top_k: int) -> tuple[Tensor, Routing]:
        """Choose top_k experts for each query (B, T, D): their gates (B, T, K), and the record."""
        with torch.autocast(query.device.type, enabled=False):
            raw = at_least_float32(query)
            mean = self.state.query_mean
            scored = raw if mean is None else raw - mean.to(raw.dtype)
            experts, gates, scores = self.choose(query, scored, top_k)
            sums = summarize(experts, query, mean, info, self.layer_words, self.model.num_experts, self.gravity)
            aux_loss = None if scores is None else auxiliary_loss(self.model, scores, experts, info.counted)
        # Whatever leaves with a gradient gets one in the backward pass, if only of zeros. The copy of the gates is not
        # an alias of them: where a compiled graph breaks behind the router, torch would take one for the other, and
        # the query network would get no gradient.
        kept = query if self.model.grounding else query.detach()
        return gates, Routing(**sums, experts=experts, gates=gates.detach().clone(), query=kept, aux_loss=aux_loss)


class HashRouter(nn.Module):
    """No content: a token's experts follow from its id, and all count the same."""

    def __init__(self, model: ModelConfig, gravity: GravityConfig, layer: int) -> None:
        super().__init__()
        self.model, self.gravity, self.layer = model, gravity, layer
        self.layer_words: Tensor
        self.register_buffer("layer_words", torch.tensor(derive_key(layer), dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor, info: TokenInfo, top_k: int) -> tuple[Tensor, Routing]:
        """Choose by info.ids; x (B, T, D) only stands in for queries in the sums. Returns gates and record."""
        if info.ids is None:
            raise ValueError("hash routing chooses by token id; pass TokenInfo(ids=...)")
        experts = assign_experts(info.ids, self.model.num_experts, top_k, self.model.expert_seed, self.layer)
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

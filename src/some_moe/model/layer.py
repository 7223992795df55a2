"""The SoME layer: a feed-forward layer whose experts are found by content. Usable in any transformer.

layer = SomeLayer(ModelConfig(d_model=64, num_experts=16, d_ffn=128, top_k=2))
y, routing = layer(x, step=step)           # x, y: (batch, time, d_model); changes no state
layer.gravity_step(routing, step)          # after the optimizer's step: the keys move
"""

from typing import Any

import torch
from torch import Tensor, nn

from some_moe.config import GravityConfig, ModelConfig, check_gravity_fits
from some_moe.model import gravity as gravity_rules
from some_moe.model.init import init_weights
from some_moe.model.keystore import KeyState
from some_moe.model.library import ExpertLibrary, make_library
from some_moe.model.linear import DenseFFN
from some_moe.model.query import make_query
from some_moe.model.router import HashRouter, KeyRouter
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo


class FrozenDenseFFN(nn.Module):
    """The same, random and frozen: a library of one expert that every token uses."""

    def __init__(self, config: ModelConfig, layer: int, **options: Any) -> None:
        super().__init__()
        only = config.model_copy(update={"num_experts": 1, "d_ffn": config.dense_width})
        self.library = ExpertLibrary(only, layer, **options)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        only = torch.zeros(len(rows), 1, dtype=torch.int64, device=x.device)
        y: Tensor = self.library(rows, only, torch.ones_like(only, dtype=x.dtype))
        return y.view_as(x)


class OutputScale(nn.Module):
    """Study: a learned factor on the library's output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor, x: Tensor, query: Tensor | None) -> Tensor:  # noqa: ARG002
        return y * self.scale.to(y.dtype)


class SharedExpert(nn.Module):
    """Study: a trained expert beside the library that runs for every token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ffn = DenseFFN(config.d_model, config.shared_expert, config.activation)

    def forward(self, y: Tensor, x: Tensor, query: Tensor | None) -> Tensor:  # noqa: ARG002
        shared: Tensor = self.ffn(x)
        return y + shared


class QueryResidual(nn.Module):
    """Study: the query network's output joins the layer's output."""

    def forward(self, y: Tensor, x: Tensor, query: Tensor | None) -> Tensor:  # noqa: ARG002
        assert query is not None
        return y + query


def make_studies(config: ModelConfig) -> nn.ModuleList:
    """The study options that act on a layer's output, in the order in which they act."""
    studies = nn.ModuleList()
    if config.output_scale:
        studies.append(OutputScale())
    if config.shared_expert:
        studies.append(SharedExpert(config))
    if config.query_residual:
        studies.append(QueryResidual())
    return studies


class SomeLayer(nn.Module):
    """Query network, router and expert library; whatever studies ask for is applied to the output."""

    def __init__(
        self,
        model: ModelConfig,
        gravity: GravityConfig | None = None,
        *,
        layer: int = 0,
        seed: int = 0,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        """model, gravity: the settings. layer: its number, which with the seed decides its weights. seed: of keys and
        samples too. device: where. options: `kernel` and `experts`, as `ExpertLibrary` takes them."""
        super().__init__()
        self.model = model
        self.gravity = gravity or (GravityConfig() if model.router == "gravity" else GravityConfig.off())
        check_gravity_fits(model, self.gravity)
        self.layer = layer
        self.seed = seed
        self.library = make_library(model, layer, device=device, **options)
        with torch.device(device or "cpu"):
            by_hash = model.router == "hash"
            self.query = None if by_hash else make_query(model)
            self.hash_router = HashRouter(model, self.gravity, layer) if by_hash else None
            self.key_router = None if by_hash else KeyRouter(model, self.gravity, layer, seed)
            self.studies = make_studies(model)
        if self.state is not None and model.router == "weights" and not self.library.up.is_meta:
            # An expert's score is then the mean pre-activation of its hidden units, up to a factor.
            self.state.place_keys(self.library.up.float().mean(1))
        init_weights(self, model, seed=seed, name=f"layer.{layer}")

    @property
    def state(self) -> KeyState | None:
        """The key store; None under hash routing."""
        return None if self.key_router is None else self.key_router.state

    def forward(
        self,
        x: Tensor,
        info: TokenInfo | None = None,
        *,
        step: int = 0,
        top_k: int | None = None,
        previous_query: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """x (B, T, D) → y (B, T, D) and the record of who was chosen. Changes no state.

        step: chooses what is sampled, where no info says so. top_k: experts a token, if not the config's (warm-up).
        previous_query: the query of the layer before, for `grounding`.
        """
        if info is None:
            info = TokenInfo.of(x.shape[:2], x.device, seed=self.seed, step=step)
        query, gates, routing = self.route(x, info, top_k or self.model.top_k, previous_query)
        y = self.run_experts(x, gates, routing)
        for study in self.studies:
            y = study(y, x, query)
        return y, routing

    def route(
        self, x: Tensor, info: TokenInfo, top_k: int, previous_query: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Routing]:
        """The query (B, T, D) of each token, where there are any; its experts' gates (B, T, K); and the record."""
        if self.query is None or self.key_router is None:
            assert self.hash_router is not None
            return None, *self.hash_router(x, info, top_k)
        query = address = self.query(x)
        if self.model.grounding and previous_query is not None:
            address = query + self.model.grounding * previous_query
        return query, *self.key_router(address, info, top_k)

    def run_experts(self, x: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        """The gated sum (B, T, D) of the chosen experts' outputs."""
        assert routing.experts is not None
        chosen = (routing.experts, gates, routing.base_experts, routing.base_gates)
        y: Tensor = self.library(x.flatten(0, 1), *(part.flatten(0, 1) for part in chosen if part is not None))
        return y.view_as(x)

    def gravity_step(self, routing: Routing, step: int, total_steps: int | None = None) -> None:
        """Let the keys move by what `routing` recorded (the sum over the step's micro-batches and ranks)."""
        if self.state is not None:
            gravity_rules.step(self.state, routing, self.gravity, step, total_steps)

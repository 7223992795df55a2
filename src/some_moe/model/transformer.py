"""The whole model: embedding, blocks of attention and SoME layer, output head.

No learned positions and no final LayerNorm; the head is untied and has a bias: the published parameter
counts allow nothing else. Shapes: B rows, T positions, D model width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from some_moe.config import GravityConfig, ModelConfig, check_gravity_fits
from some_moe.model.attention import Attention, Cache, Geometry, make_geometry, sinusoidal_positions
from some_moe.model.dropout import Dropout
from some_moe.model.init import init_weights
from some_moe.model.layer import FrozenDenseFFN, SomeLayer
from some_moe.model.library import ExpertLibrary
from some_moe.model.linear import DenseFFN, LayerNorm, Linear
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo
from some_moe.precision import at_least_float32


def sum_aux_losses(routings: Sequence[Routing]) -> Tensor | None:
    """What the layers add to the training loss, where anything is asked for."""
    losses = [routing.aux_loss for routing in routings if routing.aux_loss is not None]
    return torch.stack(losses).sum() if losses else None


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """What one forward pass gives."""

    logits: Tensor  # (B, T, V)
    routings: tuple[Routing, ...]  # one a SoME layer, in order of depth; empty for dense models

    @property
    def aux_loss(self) -> Tensor | None:
        return sum_aux_losses(self.routings)


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """What a model learns from."""

    loss: Tensor  # () the weighted sum of the targets' cross-entropies over the denominator; differentiate it once
    aux_loss: Tensor | None  # () sum of the layers' auxiliary losses, where any are asked for
    routings: tuple[Routing, ...]


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats of each target (B, T), in float32 or better, from logits (B, T, V)."""
    losses = F.cross_entropy(at_least_float32(logits).flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its LayerNorm and residual sum."""

    def __init__(self, model: ModelConfig, gravity: GravityConfig, layer: int, *, seed: int, **options: Any) -> None:
        """options: `kernel`, `experts` and `device`, as `ExpertLibrary` takes them."""
        super().__init__()
        device = options["device"]
        self.norm_first = model.norm == "pre"
        self.dtype: torch.dtype | None = None  # see `SomeLM.compute_in`
        with torch.device(device or "cpu"):
            self.drop_attention = Dropout(model.dropout, 2 * layer + 1)
            self.drop_ffn = Dropout(model.dropout, 2 * layer + 2)
            self.attention_norm = LayerNorm(model.d_model)
            self.attention = Attention(model, layer)
            self.ffn_norm = LayerNorm(model.d_model)
        self.ffn: SomeLayer | DenseFFN | FrozenDenseFFN
        if model.ffn == "some":
            self.ffn = SomeLayer(model, gravity, layer=layer, seed=seed, **options)
        elif model.ffn == "dense":
            with torch.device(device or "cpu"):
                self.ffn = DenseFFN(model.d_model, model.dense_width, model.activation)
        else:
            self.ffn = FrozenDenseFFN(model, layer, **options)

    def forward(
        self,
        x: Tensor,
        geometry: Geometry,
        info: TokenInfo,
        top_k: int | None,
        previous_query: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor, Routing | None]:
        """x (B, T, D) → (B, T, D) and the layer's routing."""
        if self.norm_first:
            x = x + self.attend(self.attention_norm(x), geometry, info, cache)
            y, routing = self.feed_forward(self.ffn_norm(x), info, top_k, previous_query)
            return x + y, routing
        x = self.attention_norm(x + self.attend(x, geometry, info, cache))
        y, routing = self.feed_forward(x, info, top_k, previous_query)
        return self.ffn_norm(x + y), routing

    def attend(self, x: Tensor, geometry: Geometry, info: TokenInfo, cache: Cache | None) -> Tensor:
        y: Tensor = self.drop_attention(self.attention(self.cast(x), geometry, cache), info)
        return y

    def feed_forward(
        self, x: Tensor, info: TokenInfo, top_k: int | None, previous_query: Tensor | None
    ) -> tuple[Tensor, Routing | None]:
        """What the layer makes of x (B, T, D), and its routing where it is a SoME layer."""
        x = self.cast(x)
        if not isinstance(self.ffn, SomeLayer):
            return self.drop_ffn(self.ffn(x), info), None
        y, routing = self.ffn(x, info, top_k=top_k, previous_query=previous_query)
        return self.drop_ffn(y, info), routing

    def cast(self, x: Tensor) -> Tensor:
        """x as the layers compute in, whatever type the residual stream has."""
        return x if self.dtype is None else x.to(self.dtype)


class SomeLM(nn.Module):
    """A causal language model of SoME layers: embed → blocks → head."""

    def __init__(
        self,
        model: ModelConfig,
        gravity: GravityConfig | None = None,
        *,
        seed: int = 0,
        kernel: str = "auto",
        checkpoint_activations: bool = False,
        dtype: torch.dtype | None = None,
        experts: range | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """model, gravity: the settings. seed: of first weights, keys and samples. kernel: as `train.kernel`.
        checkpoint_activations: less memory, more time. dtype: see `compute_in`. experts: those of each layer that are
        made here; None is all. device: where."""
        super().__init__()
        self.model = model
        has_keys = model.ffn == "some" and model.router == "gravity"
        self.gravity = gravity or (GravityConfig() if has_keys else GravityConfig.off())
        check_gravity_fits(model, self.gravity)
        self.seed, self.checkpoint_activations = seed, checkpoint_activations
        self.context: nn.Module | None = None  # finds `TokenInfo.shares` by the text so far
        self.voices: nn.Module | None = None  # what branches add to the logits
        with torch.device(device or "cpu"):
            shape = (model.vocab_size, model.d_model)
            self.embedding = nn.Embedding(*shape, _weight=torch.empty(shape))  # `init_weights` fills it
            self.drop_embedding = Dropout(model.dropout, 0)
            self.head = Linear(model.d_model, model.vocab_size)
        options: dict[str, Any] = {"seed": seed, "kernel": kernel, "experts": experts, "device": device}
        self.blocks = nn.ModuleList(Block(model, self.gravity, n, **options) for n in range(model.num_layers))
        self.compute_in(dtype)
        init_weights(self, model, seed=seed)

    def compute_in(self, dtype: torch.dtype | None) -> Self:
        """Let layers compute in dtype, such as torch.bfloat16; None is what the parameters are kept in."""
        self.dtype = dtype
        for block in self.blocks:
            assert isinstance(block, Block)
            block.dtype = dtype
        return self

    def obey(self, gravity: GravityConfig) -> Self:
        """Let the keys move by other rules from here on; what a key store holds must suit both."""
        self.gravity = gravity
        for layer in self.layers:
            layer.gravity = gravity
            if layer.key_router is not None:
                layer.key_router.gravity = gravity
        return self

    @property
    def layers(self) -> list[SomeLayer]:
        """The SoME layers, in order of depth."""
        return [block.ffn for block in self.blocks if isinstance(block.ffn, SomeLayer)]

    @property
    def libraries(self) -> list[ExpertLibrary]:
        """Every expert library, in order of depth."""
        return [module for module in self.modules() if isinstance(module, ExpertLibrary)]

    def forward(
        self, tokens: Tensor, info: TokenInfo | None = None, *, top_k: int | None = None, cache: Cache | None = None
    ) -> ModelOutput:
        """tokens (B, T) int64 → logits (B, T, V) and one `Routing` a layer. Changes no state but the cache.

        info: which tokens count and what is sampled (default: all count, step 0). top_k: experts a token, if not the
        config's (warm-up). cache: keys and values of the tokens before these.
        """
        info = self.inform(tokens, info)
        if self.context is not None:
            info = replace(info, shares=self.context(info, cache))
        positions, geometry = self.locate(tokens, info, cache)
        x = self.embed(tokens, positions, info)
        x, routings = self.run_blocks(x, geometry, info, top_k, cache)
        x = x if self.dtype is None else x.to(self.dtype)
        logits = self.head(x)
        if self.voices is not None:
            logits = logits + self.voices(x, logits, routings[-1])
        return ModelOutput(logits=logits, routings=routings)

    def inform(self, tokens: Tensor, info: TokenInfo | None) -> TokenInfo:
        """Fill in what a caller left out: that every token counts, and the tokens' ids."""
        if info is None:
            return TokenInfo.of(tokens.shape, tokens.device, seed=self.seed, ids=tokens)
        return replace(info, ids=tokens) if info.ids is None else info

    def locate(self, tokens: Tensor, info: TokenInfo, cache: Cache | None) -> tuple[Tensor, Geometry]:
        """The tokens' positions (B or 1, T), and what follows from them for attention."""
        past = 0 if cache is None else cache.length
        past_positions = torch.arange(past, device=tokens.device)[None] if past else None
        positions = info.positions
        if positions is None:
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)[None]
        return positions, make_geometry(self.model, positions, past_positions, info.segments)

    def embed(self, tokens: Tensor, positions: Tensor, info: TokenInfo) -> Tensor:
        """The residual stream (B, T, D) before the first block."""
        x: Tensor = self.embedding(tokens)
        if self.model.positions == "sinusoidal":
            x = x + sinusoidal_positions(positions, self.model.d_model).to(x.dtype)
        x = self.drop_embedding(x, info)
        return x if self.dtype is None or self.model.residual_dtype == "float32" else x.to(self.dtype)

    def run_blocks(
        self, x: Tensor, geometry: Geometry, info: TokenInfo, top_k: int | None, cache: Cache | None
    ) -> tuple[Tensor, tuple[Routing, ...]]:
        """x (B, T, D) through all blocks, and the routings of the SoME layers."""
        routings: list[Routing] = []
        for block in self.blocks:
            previous_query = routings[-1].query if routings else None
            arguments = (x, geometry, info, top_k, previous_query, cache)
            if self.checkpoint_activations and torch.is_grad_enabled():
                x, routing = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x, routing = block(*arguments)
            if routing is not None:
                routings.append(routing)
        if cache is not None:
            cache.length += x.shape[1]
        return x, tuple(routings)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        info: TokenInfo | None = None,
        *,
        weights: Tensor | None = None,
        denominator: Tensor,
        top_k: int | None = None,
    ) -> LossOutput:
        """Σ weights · cross-entropy of the targets (B, T) / denominator (), and the routings.

        weights (B, T): of each target, none getting a gradient; None is 1 everywhere.
        """
        output = self(tokens, info, top_k=top_k)
        losses = token_cross_entropy(output.logits, targets)
        weighed = losses if weights is None else losses * weights
        return LossOutput(loss=weighed.sum() / denominator, aux_loss=output.aux_loss, routings=output.routings)

    def score(self, tokens: Tensor, targets: Tensor, info: TokenInfo) -> tuple[Tensor, tuple[Routing, ...]]:
        """Nats (B, T) of each target (B, T), and the routings."""
        output: ModelOutput = self(tokens, info)
        return token_cross_entropy(output.logits, targets), output.routings

    def gravity_step(self, routings: Sequence[Routing], step: int, total_steps: int | None = None) -> None:
        """Move every layer's keys by the step's routing: the one write that is not a gradient step."""
        for layer, routing in zip(self.layers, routings, strict=True):
            layer.gravity_step(routing, step, total_steps)

    def count_parameters(self) -> tuple[int, int]:
        """Return (trainable, total): frozen experts count in the total; keys, being buffers, in neither."""
        trainable = sum(p.numel() for p in self.parameters() if p.requires_grad)
        stacks = (stack for library in self.libraries for stack in library.stacks())
        frozen = sum(stack.numel() for stack in stacks if not isinstance(stack, nn.Parameter))
        return trainable, sum(p.numel() for p in self.parameters()) + frozen

"""The whole model: embedding, blocks of attention and SoME layer, output head.

No learned positions and no final LayerNorm; the head is untied and has a bias: the published parameter
counts allow nothing else. Shapes: B rows, T positions, D model width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from some_moe.config import GravityConfig, ModelConfig, check_gravity_fits
from some_moe.experts import Linear, has_triton, linear_detached, makes_bf16
from some_moe.model.attention import Attention, Cache, Geometry, make_geometry, plain_positions, sinusoidal_positions
from some_moe.model.dropout import Dropout
from some_moe.model.embedding import Embedding
from some_moe.model.gravity import Advance, advance_layers, step_layers
from some_moe.model.init import init_weights
from some_moe.model.layer import DenseFFN, FrozenDenseFFN, SomeLayer
from some_moe.model.library import ExpertLibrary
from some_moe.model.record import Routing, TokenInfo, summarize_layers, sums_come_together
from some_moe.model.samples import choose_samples, make_layer_words


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """What one forward pass gives."""

    scores: Tensor  # (B, T, V) logits; or, where targets were given, (B, T) the nats of each target
    routings: tuple[Routing, ...]  # one a SoME layer, in order of depth; empty for dense models
    aux_loss: Tensor | None  # sum of the layers' auxiliary losses, where any are asked for
    loss: Tensor | None = None  # () what the model learns from, where a denominator was given: scores is then a record

    @property
    def logits(self) -> Tensor:
        assert self.scores.dim() == 3, "targets were given: there are nats, not logits"
        return self.scores

    @property
    def nats(self) -> Tensor:
        assert self.scores.dim() == 2, "no targets were given: there are logits, not nats"
        return self.scores


def token_nats(logits: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Negative log-likelihood of each target (B, T), in float32 or better.

    bias (V,): one that is part of the logits, but cut off from them for autograd; only where Triton's kernel runs.
    """
    if logits.is_cuda and has_triton() and logits.dtype in (torch.bfloat16, torch.float32):
        from some_moe.fast.ops import nats

        found: Tensor = nats.token_nats(logits.flatten(0, 1), targets.flatten(), bias)[0]
        return found.view(targets.shape)
    assert bias is None
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def norm_beside(norm: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """x, to go on with, and its norm."""
    if can_fuse_norm(x):
        from some_moe.fast.ops.layer_norm import ResidualNorm

        beside: tuple[Tensor, Tensor] = ResidualNorm.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
        return beside
    return x, norm(x)


def add_norm(norm: nn.LayerNorm, x: Tensor, y: Tensor, y_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x + y, and the norm of that, twice: for two readers, whose gradients are then summed by one kernel.

    y_bias (D,): one that is part of y, but cut off from it for autograd; only where Triton's kernel runs.
    """
    if can_fuse_norm(x):
        from some_moe.fast.ops.layer_norm import AddNorm

        found: tuple[Tensor, Tensor, Tensor] = AddNorm.apply(x, y, norm.weight, norm.bias, norm.eps, y_bias)  # type: ignore[no-untyped-call]
        return found
    assert y_bias is None
    total = x + y
    normed = norm(total)
    return total, normed, normed


def can_fuse_norm(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-1] <= 8192 and has_triton()


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its LayerNorm and residual sum."""

    def __init__(
        self,
        model: ModelConfig,
        gravity: GravityConfig,
        layer: int,
        *,
        seed: int,
        kernel: str,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.norm_first = model.norm == "pre"
        with torch.device(device or "cpu"):
            self.drop_attention = Dropout(model.dropout, 2 * layer + 1)
            self.drop_ffn = Dropout(model.dropout, 2 * layer + 2)
        with torch.device(device or "cpu"):
            self.attention_norm = nn.LayerNorm(model.d_model)
            self.attention = Attention(model, layer)
            self.ffn_norm = nn.LayerNorm(model.d_model)
        self.ffn: SomeLayer | DenseFFN | FrozenDenseFFN
        if model.ffn == "some":
            self.ffn = SomeLayer(model, gravity, layer=layer, seed=seed, kernel=kernel, device=device)
        elif model.ffn == "dense":
            with torch.device(device or "cpu"):
                self.ffn = DenseFFN(model.d_model, model.dense_width)
        else:
            self.ffn = FrozenDenseFFN(model, layer, kernel, device)

    def feed_forward(
        self, onto: Tensor, x: Tensor, again: Tensor, info: TokenInfo, top_k: int | None, previous_query: Tensor | None
    ) -> tuple[Tensor, Routing | None]:
        """onto + what the layer makes of x. again: x once more, for a second reader."""
        if not isinstance(self.ffn, SomeLayer):
            return onto + self.drop_ffn(self.ffn(x), info), None
        options = {"top_k": top_k, "previous_query": previous_query, "again": again}
        if self.drop_ffn.is_on:
            y, routing = self.ffn(x, info, **options)
            return onto + self.drop_ffn(y, info), routing
        y, routing = self.ffn(x, info, **options, onto=onto)
        return y, routing

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
            x, normed = norm_beside(self.attention_norm, x)
            # The kernel that makes the gradient of what is added can make that of a bias within it, if nothing dropped.
            bias = self.attention.out.bias if can_fuse_norm(x) and not self.drop_attention.is_on else None
            attended = self.attention(normed, geometry, cache, cut_bias=bias is not None)
            x, normed, again = add_norm(self.ffn_norm, x, self.drop_attention(attended, info), bias)
            return self.feed_forward(x, normed, again, info, top_k, previous_query)
        x = self.attention_norm(x + self.drop_attention(self.attention(x, geometry, cache), info))
        x, routing = self.feed_forward(x, x, x, info, top_k, previous_query)
        return self.ffn_norm(x), routing


class SomeLM(nn.Module):
    """A causal language model of SoME layers."""

    def __init__(
        self,
        model: ModelConfig,
        gravity: GravityConfig | None = None,
        *,
        seed: int = 0,
        kernel: str = "auto",
        checkpoint_activations: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        has_keys = model.ffn == "some" and model.router == "gravity"
        self.gravity = gravity or (GravityConfig() if has_keys else GravityConfig.off())
        check_gravity_fits(model, self.gravity)
        self.seed = seed
        self.checkpoint_activations = checkpoint_activations
        with torch.device(device or "cpu"):
            plain = model.residual_dtype == "auto" and model.positions != "sinusoidal" and model.dropout == 0
            self.embedding = Embedding(model.vocab_size, model.d_model, may_round=plain)
            self.drop_embedding = Dropout(model.dropout, 0)
            self.head = Linear(model.d_model, model.vocab_size)
            self.layer_words: Tensor
            self.register_buffer("layer_words", make_layer_words(model.num_layers), persistent=False)
        self.blocks = nn.ModuleList(
            Block(model, self.gravity, layer, seed=seed, kernel=kernel, device=device)
            for layer in range(model.num_layers)
        )
        init_weights(self, model, seed=seed)

    @property
    def layers(self) -> list[SomeLayer]:
        """The SoME layers, in order of depth."""
        return [block.ffn for block in self.blocks if isinstance(block.ffn, SomeLayer)]

    @property
    def libraries(self) -> list[ExpertLibrary]:
        """Every expert library, in order of depth."""
        return [module for module in self.modules() if isinstance(module, ExpertLibrary)]

    def forward(
        self,
        tokens: Tensor,
        *,
        counted: Tensor | None = None,
        rows: Tensor | None = None,
        step: int = 0,
        salt: Tensor | None = None,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        denominator: Tensor | None = None,
        top_k: int | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        sums: bool = True,
    ) -> ModelOutput:
        """tokens (B, T) int64 → logits (B, T, V) and one `Routing` a layer. Changes no state.

        counted (B, T): tokens that enter the statistics (default all). rows (B,): each row's number within
        the whole step. step: chooses what is sampled; or salt, a hash of seed and step that is on the device
        already. targets (B, T): asks for their nats instead of the logits; denominator (), for the loss too, which is
        their sum, by weights (B, T) where there are any, divided by it. Gradients then go by the loss alone, once, and
        none to the weights.
        positions (B, T) and segments (B, T): for packed rows. sums: off where the keys will not move by this pass.
        """
        assert targets is not None or denominator is None, "a loss needs targets"
        past = 0 if cache is None else cache.length
        past_positions = torch.arange(past, device=tokens.device)[None] if past else None
        rotation = None
        if positions is None:
            end = past + tokens.shape[1]
            positions, rotation = plain_positions(past, end, self.model.head_width, tokens.device)
        geometry = make_geometry(self.model, positions, past_positions, segments, rotation)
        info = TokenInfo.of(
            (tokens.shape[0], tokens.shape[1]),
            tokens.device,
            counted=counted,
            rows=rows,
            seed=self.seed,
            step=step,
            salt=salt,
            ids=tokens,
            sums=sums,
        )
        samples = None
        if sums and self.model.ffn == "some":
            samples = choose_samples(info.salt, self.layer_words, info.rows, info.counted, self.gravity)
        x = self.embedding(tokens)
        if self.model.positions == "sinusoidal":
            x = x + sinusoidal_positions(positions, self.model.d_model).to(x.dtype)
        x = self.drop_embedding(x, info)
        if self.model.residual_dtype == "auto" and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        together = samples is not None and sums_come_together(self.model, x)
        told = replace(info, sums=False) if together else info
        routings: list[Routing] = []
        for layer, block in enumerate(self.blocks):
            previous_query = routings[-1].query if routings else None
            if samples is not None and not together:
                told = replace(info, samples=samples.of(layer))
            arguments = (x, geometry, told, top_k, previous_query, cache)
            if self.checkpoint_activations and torch.is_grad_enabled():
                x, routing = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x, routing = block(*arguments)
            if routing is not None:
                routings.append(routing)
        if cache is not None:
            cache.length += tokens.shape[1]
        if samples is not None and together:
            sizes = self.layer_words, self.model.num_experts, self.gravity
            routings = list(summarize_layers(routings, info, samples, *sizes))
        loss = None
        if targets is None:
            scores = self.head(x)
        elif denominator is None:
            scores = self.score_targets(x, targets)
        else:
            loss, scores = self.find_loss(x, targets, weights, denominator)
        losses = [routing.aux_loss for routing in routings if routing.aux_loss is not None]
        return ModelOutput(
            scores=scores,
            routings=tuple(routings),
            aux_loss=torch.stack(losses).sum() if losses else None,
            loss=loss,
        )

    def score_targets(self, x: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood (B, T) of the targets. On a GPU and compiled, float32 logits are never stored, and
        the kernel that makes the gradient of bf16 logits also makes the bias's.
        """
        if not makes_bf16(x):
            return token_nats(self.head(x), targets)
        return token_nats(linear_detached(x, self.head), targets, self.head.bias)

    def find_loss(
        self, x: Tensor, targets: Tensor, weights: Tensor | None, denominator: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Σ weights · nats / denominator (), and the nats (B, T), without their gradient.

        On a GPU one kernel makes both, and the gradient of bf16 logits: it reads them while they are there. One
        backward pass uses that up.
        """
        assert weights is None or not weights.requires_grad
        if makes_bf16(x) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            from some_moe.fast.ops import cross_entropy

            if cross_entropy.can_run(self.model.vocab_size):
                flat = None if weights is None else weights.flatten()
                logits = linear_detached(x, self.head).flatten(0, 1)
                found, nats = cross_entropy.find_loss(logits, targets.flatten(), flat, denominator, self.head.bias)
                return found, nats.view(targets.shape)
        nats = self.score_targets(x, targets)
        weighed = nats if weights is None else nats * weights
        return weighed.sum() / denominator, nats.detach()

    advance_layers: Advance | None = None  # gravity's, once compiled

    def fits_graph(self, bf16: bool) -> bool:
        """Whether each block can be one graph, and whole steps be recorded: on a GPU, unless the experts are a loop."""
        return self.head.weight.is_cuda and all(library.fits_graph(bf16) for library in self.libraries)

    def compile_parts(self, *, dynamic: bool | None = False, bf16: bool = False) -> None:
        """Compile the block, once for all layers, the head with its nats (where `find_loss` has no kernel for both),
        and gravity (dynamic: as torch.compile).
        """
        # A block's code is one for all layers; what differs between them is data. Shapes and top_k may vary.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        whole = self.fits_graph(bf16)
        for block in self.blocks:
            block.compile(fullgraph=whole, dynamic=dynamic)
        self.score_targets = torch.compile(self.score_targets, fullgraph=True, dynamic=dynamic)  # type: ignore[method-assign]
        self.advance_layers = torch.compile(advance_layers, fullgraph=True, dynamic=False)

    def gravity_step(self, routings: Sequence[Routing], step: int, total_steps: int | None = None) -> None:
        """Move every layer's keys by the step's routing: the one write that is not a gradient step."""
        if self.advance_layers is not None:
            states = [layer.state for layer in self.layers]
            step_layers(states, routings, self.gravity, step, total_steps, advance=self.advance_layers)
            return
        for layer, routing in zip(self.layers, routings, strict=True):
            layer.gravity_step(routing, step, total_steps)

    def count_parameters(self) -> tuple[int, int]:
        """Return (trainable, total): frozen experts count in the total; keys, being buffers, in neither."""
        trainable = sum(p.numel() for p in self.parameters() if p.requires_grad)
        frozen = sum(stack.numel() for library in self.libraries for stack in library.stacks() if not library.trained)
        return trainable, trainable + frozen

"""The model's parts as a CUDA GPU runs them. Each class has the parameters, the buffers and the meaning of the plain
one that it derives from, and another forward: fused kernels, casts made once a pass, sums of all layers at once.

Shapes: B rows, T positions, D model width, F hidden width, K experts a token, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from some_moe.experts.weights import activate
from some_moe.fast import statistics
from some_moe.fast.casts import Cast, Casts, attach_bias, below, cast_maps, embed, linear
from some_moe.fast.experts import mix_onto
from some_moe.fast.gravity import advance_layers, step_layers
from some_moe.fast.ops import cross_entropy
from some_moe.fast.ops.dropout import dropout
from some_moe.fast.ops.layer_norm import AddNorm, ResidualNorm
from some_moe.fast.ops.mlp import GeluMlp
from some_moe.fast.ops.mlp import can_run as can_fuse_gelu
from some_moe.fast.ops.rotary import rotate_qkv
from some_moe.fast.ops.topk_keys import topk_keys
from some_moe.fast.static_cache import StaticCache
from some_moe.model.attention import (
    Attention,
    Cache,
    Geometry,
    make_geometry,
    rotary_angles,
    sinusoidal_positions,
)
from some_moe.model.dropout import Dropout
from some_moe.model.layer import SharedExpert, SomeLayer
from some_moe.model.library import SharedDownLibrary
from some_moe.model.linear import DenseFFN
from some_moe.model.query import LinearQuery, MlpQuery
from some_moe.model.router import HashRouter, KeyRouter, auxiliary_loss
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import Block, LossOutput, ModelOutput, SomeLM, sum_aux_losses, token_cross_entropy
from some_moe.precision import at_least_float32, full_precision, product_dtype
from some_moe.sampling import Chooser

# --- pieces ---------------------------------------------------------------------------------------------------


def mlp(x: Tensor, expand: nn.Linear, project: nn.Linear, casts: Casts, *, gated: bool = False) -> Tensor:
    """project(gelu(expand(x))) of x (…, D). In bf16 and for many rows, GELU is part of the products beside it. gated:
    with SwiGLU in its place."""
    if gated:
        return linear(activate(linear(x, expand, casts["expand"]), gated=True), project, casts["project"])
    if product_dtype(x) == torch.bfloat16 and can_fuse_gelu(x, expand.weight):
        given = x.reshape(-1, x.shape[-1]), *casts["expand"], *casts["project"]
        y: Tensor = GeluMlp.apply(*(part.to(torch.bfloat16) for part in given), expand.bias, project.bias)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], y.shape[-1])
    return linear(F.gelu(linear(x, expand, casts["expand"])), project, casts["project"])


def can_fuse_norm(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.shape[-1] <= 8192


def residual_and_norm(norm: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """x, to go on with, and its norm: one node of autograd, so that both gradients are summed by one kernel."""
    if not can_fuse_norm(x):
        return x, norm(x)
    found: tuple[Tensor, Tensor] = ResidualNorm.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    return found


def add_norm(norm: nn.LayerNorm, x: Tensor, y: Tensor, y_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x + y, and the norm of that, twice: for two readers, whose gradients are then summed by one kernel.

    y_bias (D,): detached and part of y; the kernel makes its gradient with that of y.
    """
    if can_fuse_norm(x):
        found: tuple[Tensor, Tensor, Tensor] = AddNorm.apply(x, y, norm.weight, norm.bias, norm.eps, y_bias)  # type: ignore[no-untyped-call]
        return found
    assert y_bias is None
    total = x + y
    normed = norm(total)
    return total, normed, normed


# --- modules --------------------------------------------------------------------------------------------------


class FastAttention(Attention):
    """One product for queries, keys and values; rotation, and the gradient of their biases, by one kernel each."""

    def project_cast(self, x: Tensor, geometry: Geometry, cast: Cast) -> tuple[Tensor, ...]:
        qkv = F.linear(x, *cast)
        biases = self.query.bias, self.key.bias, self.value.bias
        if geometry.rotation is not None and qkv.dtype != torch.float64:
            return rotate_qkv(qkv, *geometry.rotation, self.num_heads, biases)
        q, k, v = attach_bias(qkv, *biases).chunk(3, dim=-1)
        return self.place_heads(q, k, v, geometry)

    def run(self, x: Tensor, geometry: Geometry, cache: Cache | None, casts: Casts, *, detach_bias: bool) -> Tensor:
        """x (B, T, D) → (B, T, D). detach_bias: the gradient of the last bias is made elsewhere."""
        y = self.attend(self.project_cast(x, geometry, casts["qkv"]), geometry, cache)
        return F.linear(y, *casts["out"]) if detach_bias else linear(y, self.out, casts["out"])


class FastRouter(KeyRouter):
    """Scores of experts that are not chosen are never made, where nothing asks for them."""

    def can_choose_topk(self, query: Tensor, top_k: int) -> bool:
        wants_all = top_k == 1 or self.model.has_auxiliary_loss or self.state.keys.requires_grad
        return not wants_all and top_k <= 16 and query.dtype != torch.float64

    def centre(self, query: Tensor) -> Tensor:
        """The queries less their running mean, where that is asked for, in float32."""
        raw, mean = at_least_float32(query), self.state.query_mean
        return raw if mean is None else raw - mean.to(raw.dtype)

    def choose_topk(self, query: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Experts and gates (B, T, K) of each query (B, T, D)."""
        if self.model.score == "dot" and self.state.query_mean is None:
            # As it came, not widened to float32: the same numbers in half the bytes.
            address, keys = query, at_least_float32(self.state.routing_keys)
        else:
            address, keys = self.addresses(self.centre(query))
        settled = self.model.temperature if self.temperature is None else None  # a learned one must get its gradient
        experts, gates = topk_keys(address.flatten(0, 1), keys.contiguous(), self.state.bias, top_k, settled)
        if self.temperature is not None:
            gates = (gates / self.temperature()).softmax(-1)
        shape = (*query.shape[:2], top_k)
        return experts.view(shape), gates.view(shape)

    def forward(self, query: Tensor, info: TokenInfo, top_k: int) -> tuple[Tensor, Routing]:
        """As `KeyRouter.forward`."""
        with full_precision(query):
            aux_loss = None
            if self.can_choose_topk(query, top_k):
                experts, gates = self.choose_topk(query, top_k)
            else:
                experts, gates, scores, _ = self.choose(self.centre(query), top_k)
                aux_loss = auxiliary_loss(self.model, scores, experts, info.counted)
            mean, sizes = self.state.query_mean, (self.model.num_experts, self.gravity)
            sums = statistics.summarize(experts, query, mean, info, self.layer_words, *sizes)
        return gates, self.record(experts, gates, query, sums, aux_loss)


class FastHashRouter(HashRouter):
    """A token's experts from a table, where the vocabulary is known: they follow from its id alone."""

    table: Tensor  # (V, K)

    def make_table(self) -> None:
        every = torch.arange(self.model.vocab_size, device=self.layer_words.device)
        self.register_buffer("table", super().assign(every, self.model.top_k), persistent=False)

    def assign(self, ids: Tensor, top_k: int) -> Tensor:
        return F.embedding(ids, self.table)[..., :top_k] if "table" in self._buffers else super().assign(ids, top_k)


class FastDropout(Dropout):
    """The same elements fall away, by one kernel each way."""

    def forward(self, x: Tensor, info: TokenInfo) -> Tensor:
        """As `Dropout.forward`."""
        if not self.is_on or x.dtype == torch.float64:
            return super().forward(x, info)
        return dropout(x, info.rows, info.salt, self.words, self.share)


class FastLayer(SomeLayer):
    """The layer onto the residual stream: frozen experts add their output there themselves."""

    def forward(
        self,
        x: Tensor,
        info: TokenInfo | None = None,
        *,
        step: int = 0,
        top_k: int | None = None,
        previous_query: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """As `SomeLayer.forward`: for a layer in anybody's transformer."""
        if info is None:
            info = TokenInfo.of(x.shape[:2], x.device, seed=self.seed, step=step)
        casts, _ = cast_maps(self, product_dtype(x))
        return self.run(x, x, None, info, top_k, previous_query, casts)

    def run(
        self,
        x: Tensor,
        again: Tensor,
        onto: Tensor | None,
        info: TokenInfo,
        top_k: int | None,
        previous_query: Tensor | None,
        casts: Casts,
    ) -> tuple[Tensor, Routing]:
        """onto (B, T, D) + what the layer makes of x (B, T, D), and the record.

        again: x once more, so that the gradients by query and by experts stay apart until one kernel sums them.
        """
        top_k = top_k or self.model.top_k
        query = None
        if self.query is None or self.key_router is None:
            assert self.hash_router is not None
            gates, routing = self.hash_router(x, info, top_k)
        else:
            query = address = self.find_query(again, below(casts, "query"))
            if self.model.grounding and previous_query is not None:
                address = query + self.model.grounding * previous_query
            gates, routing = self.key_router(address, info, top_k)
        if not self.studies:
            return self.mix(x, gates, routing, onto, casts), routing
        y = self.mix(x, gates, routing, None, casts)
        for number, study in enumerate(self.studies):
            if isinstance(study, SharedExpert):
                ffn = study.ffn
                y = y + mlp(x, ffn.expand, ffn.project, below(casts, f"studies.{number}.ffn"), gated=ffn.gated)
            else:
                y = study(y, x, query)
        return y if onto is None else onto + y, routing

    def find_query(self, x: Tensor, casts: Casts) -> Tensor:
        if isinstance(self.query, MlpQuery):
            return mlp(x, self.query.expand, self.query.project, casts)
        assert isinstance(self.query, LinearQuery)
        return linear(x, self.query.project, casts["project"])

    def mix(self, x: Tensor, gates: Tensor, routing: Routing, onto: Tensor | None, casts: Casts) -> Tensor:
        """onto + the gated sum (B, T, D) of the chosen experts' outputs."""
        library = self.library
        assert routing.experts is not None
        rows = x.reshape(-1, x.shape[-1])
        rows, experts = rows.to(product_dtype(rows)), routing.experts.flatten(0, 1)
        shares_down = isinstance(library, SharedDownLibrary)
        stream = None if onto is None or shares_down else onto.reshape(-1, x.shape[-1])
        with full_precision(rows):
            y = mix_onto(library.kernel, rows, experts, gates.flatten(0, 1), library.weights(), stream)
        if isinstance(library, SharedDownLibrary):
            y = linear(y, library.shared, casts["library.shared"])
            return y.view_as(x) if onto is None else onto + y.view_as(x)
        return y.view_as(x)


class FastBlock(Block):
    """Residual sums within the kernels of norms and experts."""

    def forward(
        self,
        x: Tensor,
        geometry: Geometry,
        info: TokenInfo,
        top_k: int | None,
        previous_query: Tensor | None,
        cache: Cache | None,
        casts: Casts | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """As `Block.forward`. casts: of the block's maps, where they were made for all blocks at once."""
        if casts is None:
            casts, _ = cast_maps(self, product_dtype(x))
        attention = self.attention
        assert isinstance(attention, FastAttention)
        attention_casts = below(casts, "attention")
        if self.norm_first:
            x, normed = residual_and_norm(self.attention_norm, x)
            # The kernel that makes the gradient of what is added makes that of a bias within it, if nothing dropped.
            detach_bias = can_fuse_norm(x) and not self.drop_attention.is_on
            attended = attention.run(normed, geometry, cache, attention_casts, detach_bias=detach_bias)
            bias = attention.out.bias if detach_bias else None
            x, normed, again = add_norm(self.ffn_norm, x, self.drop_attention(attended, info), bias)
            return self.run_ffn(x, normed, again, info, top_k, previous_query, casts)
        attended = attention.run(x, geometry, cache, attention_casts, detach_bias=False)
        x = self.attention_norm(x + self.drop_attention(attended, info))
        x, routing = self.run_ffn(x, x, x, info, top_k, previous_query, casts)
        return self.ffn_norm(x), routing

    def run_ffn(
        self,
        onto: Tensor,
        x: Tensor,
        again: Tensor,
        info: TokenInfo,
        top_k: int | None,
        previous_query: Tensor | None,
        casts: Casts,
    ) -> tuple[Tensor, Routing | None]:
        """onto + what the feed-forward layer makes of x. again: see `FastLayer.run`."""
        ffn, casts = self.ffn, below(casts, "ffn")
        if isinstance(ffn, FastLayer):
            stream = None if self.drop_ffn.is_on else onto
            y, routing = ffn.run(x, again, stream, info, top_k, previous_query, casts)
            return (y, routing) if stream is not None else (onto + self.drop_ffn(y, info), routing)
        y = mlp(x, ffn.expand, ffn.project, casts, gated=ffn.gated) if isinstance(ffn, DenseFFN) else ffn(x)
        return onto + self.drop_ffn(y, info), None


class FastLM(SomeLM):
    """The whole model: weights cast once a pass, sums of all layers in one go, loss and its gradient in one."""

    layer_words: Tensor  # (L, 2) int32: the layers' numbers as `hashing.sample_order` takes them
    position_tables: dict[tuple[int, torch.device], tuple[Tensor, tuple[Tensor, Tensor]]]  # by length and device
    advance_layers = staticmethod(advance_layers)
    held_casts: tuple[Casts, Tensor | None] | None = None

    def become_fast(self) -> None:
        """What this class has beside the plain one's; called once, when it takes over."""
        words = [layer.key_router or layer.hash_router for layer in self.layers]
        stacked = torch.stack([router.layer_words for router in words if router is not None]) if words else None
        self.register_buffer("layer_words", stacked, persistent=False)
        self.position_tables = {}
        for layer in self.layers:
            if isinstance(layer.hash_router, FastHashRouter):
                layer.hash_router.make_table()

    def computing(self) -> AbstractContextManager[object]:
        """Within, products are in what the model computes in."""
        return nullcontext() if self.dtype is None else torch.autocast(self.head.weight.device.type, self.dtype)

    def forward(
        self, tokens: Tensor, info: TokenInfo | None = None, *, top_k: int | None = None, cache: Cache | None = None
    ) -> ModelOutput:
        """As `SomeLM.forward`."""
        with self.computing():
            x, routings, head = self.read(tokens, info, top_k, cache)
            return ModelOutput(logits=linear(x, self.head, head), routings=routings)

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
        """As `SomeLM.loss`."""
        with self.computing():
            x, routings, head = self.read(tokens, info, top_k, None)
            loss = self.find_loss(x, head, targets, weights, denominator)
        return LossOutput(loss=loss, aux_loss=sum_aux_losses(routings), routings=routings)

    @torch.no_grad()
    def score(self, tokens: Tensor, targets: Tensor, info: TokenInfo) -> tuple[Tensor, tuple[Routing, ...]]:
        """As `SomeLM.score`; the kernel that makes the training loss tells those of single tokens too."""
        if self.dtype != torch.bfloat16 or not cross_entropy.can_run(self.model.vocab_size):
            return super().score(tokens, targets, info)
        with self.computing():
            x, routings, head = self.read(tokens, info, None, None)
            logits = F.linear(x, *head).flatten(0, 1)
        one = torch.ones((), device=logits.device)
        return cross_entropy.find_loss(logits, targets.flatten(), None, one)[1].view_as(targets), routings

    def find_loss(self, x: Tensor, head: Cast, targets: Tensor, weights: Tensor | None, denominator: Tensor) -> Tensor:
        """The loss () of x (B, T, D). For bf16 logits of a small vocabulary one kernel makes it and their gradient."""
        fused = torch.is_grad_enabled() and cross_entropy.can_run(self.model.vocab_size)
        if fused and product_dtype(x) == torch.bfloat16:
            logits = F.linear(x, *head).flatten(0, 1)
            flat = None if weights is None else weights.flatten()
            return cross_entropy.find_loss(logits, targets.flatten(), flat, denominator, self.head.bias)[0]
        return self.cross_entropy(x, head, targets, weights, denominator)

    def cross_entropy(
        self, x: Tensor, head: Cast, targets: Tensor, weights: Tensor | None, denominator: Tensor
    ) -> Tensor:
        """`find_loss` by torch's own; compiled, so that float32 logits are never stored."""
        losses = token_cross_entropy(linear(x, self.head, head), targets)
        return (losses if weights is None else losses * weights).sum() / denominator

    def read(
        self, tokens: Tensor, info: TokenInfo | None, top_k: int | None, cache: Cache | None
    ) -> tuple[Tensor, tuple[Routing, ...], Cast]:
        """tokens (B, T) → the last block's output (B, T, D), the routings, and the head's cast."""
        info = self.inform(tokens, info)
        positions, geometry = self.locate(tokens, info, cache)
        casts, rows = self.held_casts or self.make_casts()
        x = embed(tokens, self.embedding, rows)
        if self.model.positions == "sinusoidal":
            x = x + sinusoidal_positions(positions, self.model.d_model).to(x.dtype)
        x = self.drop_embedding(x, info)
        if self.model.residual_dtype == "auto":
            x = x.to(product_dtype(x))
        if info.sums and statistics.sums_come_together(self.model, x):
            infos = [replace(info, sums=False)] * len(self.blocks)
            x, routings = self.run_fast_blocks(x, geometry, infos, top_k, cache, casts)
            samples = statistics.choose_samples(info, self.layer_words, self.gravity)
            sizes = self.layer_words, self.model.num_experts, self.gravity
            return x, statistics.summarize_layers(routings, info, samples, *sizes), casts["head"]
        infos = [info] * len(self.blocks)
        if info.sums and self.layers:
            infos = statistics.inform_layers(info, self.layer_words, self.gravity)
        return *self.run_fast_blocks(x, geometry, infos, top_k, cache, casts), casts["head"]

    def make_casts(self) -> tuple[Casts, Tensor | None]:
        """The casts of all maps, and of the embedding (V, D): its rows are as good as cast rows, where nothing is done
        to them before."""
        plain = self.model.residual_dtype == "auto" and self.model.positions != "sinusoidal" and not self.model.dropout
        with self.computing():
            return cast_maps(self, product_dtype(self.head.weight), self.embedding if plain else None)

    @contextmanager
    def holding(self, casts: tuple[Casts, Tensor | None]) -> Iterator[None]:
        """Within, passes compute by these casts, while the weights stay what they are."""
        self.held_casts = casts
        try:
            yield
        finally:
            self.held_casts = None

    def decode(self, prompt: Tensor, max_new_tokens: int, choose: Chooser) -> Iterator[Tensor]:
        """As `training.generation.decode_plainly`, by a captured step."""
        from some_moe.fast.decode import decode  # which makes use of this class

        return decode(self, prompt, max_new_tokens, choose)

    def run_fast_blocks(
        self,
        x: Tensor,
        geometry: Geometry,
        infos: Sequence[TokenInfo],
        top_k: int | None,
        cache: Cache | None,
        casts: Casts,
    ) -> tuple[Tensor, tuple[Routing, ...]]:
        """As `run_blocks`, each block with its casts, and what it must know about the tokens."""
        routings: list[Routing] = []
        for number, (block, info) in enumerate(zip(self.blocks, infos, strict=True)):
            previous_query = routings[-1].query if routings else None
            arguments = (x, geometry, info, top_k, previous_query, cache, below(casts, f"blocks.{number}"))
            if self.checkpoint_activations and torch.is_grad_enabled():
                x, routing = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x, routing = block(*arguments)
            if routing is not None:
                routings.append(routing)
        if cache is not None:
            cache.length += x.shape[1]
        return x, tuple(routings)

    def locate(self, tokens: Tensor, info: TokenInfo, cache: Cache | None) -> tuple[Tensor, Geometry]:
        """As `SomeLM.locate`; positions without gaps, and their rotary angles, come from a table that is kept."""
        if isinstance(cache, StaticCache) and cache.steps:
            return cache.locate(self.model)
        if info.positions is not None or self.model.positions != "rope" or torch.compiler.is_compiling():
            return super().locate(tokens, info, cache)
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        positions, angles = self.tabulate(1 << (end - 1).bit_length(), tokens.device)
        # Cut in two dimensions, so that the others have the strides of a tensor of this length.
        cos, sin = (part[0, 0, start:end][None, None] for part in angles)
        past = positions[:, :start] if start else None
        here = positions[0, start:end][None]
        return here, make_geometry(self.model, here, past, info.segments, rotation=(cos, sin))

    def tabulate(self, length: int, device: torch.device) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Positions (1, length) from 0 on, and their rotary angles (1, 1, length, W/2); made once."""
        key = length, device
        if key not in self.position_tables:
            # What a CUDA graph makes while it is captured is its own, and is overwritten when it is replayed.
            assert not torch.cuda.is_current_stream_capturing(), "let the model run once before it is captured"
            with torch.inference_mode(False):  # what is made in that mode may be part of no gradient
                positions = torch.arange(length, device=device)[None]
                self.position_tables[key] = positions, rotary_angles(positions, self.model.head_width)
        return self.position_tables[key]

    def gravity_step(self, routings: Sequence[Routing], step: int, total_steps: int | None = None) -> None:
        """As `SomeLM.gravity_step`, for all layers at once."""
        states = [layer.state for layer in self.layers]
        step_layers(states, routings, self.gravity, step, total_steps, self.advance_layers)

    def compile_parts(self, *, dynamic: bool | None, fullgraph: bool) -> None:
        """Compile the block, once for all layers, the loss where no kernel makes it, and gravity."""
        # A block's code is one for all layers; what differs between them is data. Shapes and top_k may vary.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for block in self.blocks:
            block.compile(fullgraph=fullgraph, dynamic=dynamic)
        self.cross_entropy = torch.compile(self.cross_entropy, dynamic=dynamic)  # type: ignore[method-assign]
        self.advance_layers = torch.compile(advance_layers, fullgraph=True, dynamic=False)

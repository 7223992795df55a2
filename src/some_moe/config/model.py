"""What is computed: the transformer, its expert library, and how a token finds its experts."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from some_moe.config.base import Config, NonNegative, OptionalSize, Positive, Seed, Size

MAX_VOCAB_SIZE = 1 << 16  # token ids are stored as unsigned 16-bit integers
OF_QUERIES = ("grounding", "query_residual", "center_queries", "learn_temperature", "entropy_band", "balance_loss")


class ModelConfig(Config):
    """What is computed: the transformer, its expert library, and how a token finds its experts."""

    d_model: Size = 384
    """Width of the residual stream, of the queries and of the keys."""
    num_layers: Annotated[int, Field(ge=1, le=1000)] = 8
    """Number of blocks."""
    num_heads: Size = 8
    """Attention heads; must divide d_model."""
    vocab_size: Annotated[int, Field(ge=2)] = 8192
    """Number of token ids; at most 65,536, for ids are stored in 16 bits."""
    positions: Literal["rope", "alibi", "sinusoidal"] = "rope"
    """How attention knows the order of tokens. None of the three has parameters."""
    embedding_std: Positive = 0.5
    """Standard deviation of the token embedding at the start. No norm stands before the output head, so a small
    one also makes the first logits small and learning slow to begin."""
    norm: Literal["pre", "post"] = "pre"
    """LayerNorm before each sublayer, or after each residual sum."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the embedding's and of each sublayer's output that falls away in training; 0 is off."""

    ffn: Literal["some", "dense", "frozen_dense"] = "some"
    """What stands in the place of the feed-forward layer: a SoME layer, one trained dense FFN, or a frozen one."""
    dense_width: OptionalSize = 0
    """Hidden width of the dense FFN (ffn: dense or frozen_dense); 0 otherwise."""

    num_experts: Size = 64
    """Experts in each layer's library (E)."""
    d_ffn: Size = 1024
    """Hidden width of one expert (f)."""
    top_k: Size = 4
    """Experts that run for each token."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """What stands between the two matrices of experts and of dense networks: GELU, or the gated SwiGLU, whose first
    matrix is twice as high."""
    init_method: Literal["default", "orthogonal", "sparse"] = "default"
    """Expert weights: uniform within ±1/√fan_in; orthogonal; or mostly zeros, rescaled to the same variance."""
    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of zeros in each weight matrix under init_method: sparse; the rest is scaled by 1/√(1−sparsity)."""
    trainability: Literal["frozen", "lora", "full"] = "frozen"
    """Experts stay as they were made, get a trained low-rank update, or are trained whole."""
    lora_rank: Size = 8
    """Rank of the trained update on both matrices of each expert (trainability: lora)."""
    expert_seed: Seed = 0
    """The number all expert weights are computed from."""
    expert_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """How frozen expert weights are stored; auto is what the run computes in. Trained ones are always float32."""
    residual_dtype: Literal["auto", "float32"] = "auto"
    """The sum that runs through the layers: in what the run computes in (bf16 on a GPU), or always in float32."""

    router: Literal["gravity", "learned", "weights", "hash"] = "gravity"
    """Keys moved by knowledge gravity; keys trained by gradient; keys computed from each expert's own weights;
    or no keys: experts chosen by a hash of the token id, with equal gates."""
    query: Literal["linear", "mlp"] = "mlp"
    """The query network: d→d, or d→hidden→d with GELU."""
    query_hidden: OptionalSize = 0
    """Hidden width of the mlp query network; 0 means 2·d_model."""
    score: Literal["dot", "cosine"] = "dot"
    """How a query meets a key: the dot product with the raw query, or their cosine times cosine_scale."""
    cosine_scale: Positive = 10.0
    """Factor on the cosine (score: cosine)."""
    center_queries: bool = False
    """Subtract a running mean from the queries before they meet the keys."""
    grounding: NonNegative = 0.0
    """Share of the previous layer's query that is added to this layer's (study D3 uses 0.1)."""
    temperature: Positive = 1.0
    """Divides the scores before the softmax over the chosen experts (the reports' TRAINING_TEMP)."""
    learn_temperature: bool = False
    """Learn one temperature a layer, starting at `temperature`, within temperature_bounds."""
    temperature_bounds: tuple[Positive, Positive] = (0.1, 10.0)
    """Lowest and highest learned temperature."""
    entropy_band: tuple[NonNegative, NonNegative] | None = None
    """Target band, in nats, for the mean entropy of the softmax over all E scores; null is off."""
    entropy_band_weight: NonNegative = 0.01
    """Weight of the squared distance to entropy_band in the training loss."""
    balance_loss: NonNegative = 0.0
    """Weight of the auxiliary load-balancing loss E·Σ(load share × mean probability); 0 is off."""

    shared_expert: OptionalSize = 0
    """Study: hidden width of a trained expert that runs for every token beside the library; 0 is none."""
    shared_down: bool = False
    """Study: frozen up-projections, one trained down-projection shared by all experts of a layer."""
    query_residual: bool = False
    """Study: the query network's output is added to the layer's output, and so to the residual stream."""
    output_scale: bool = False
    """Study: a learned factor on the library's output, one number a layer."""
    gains: bool = False
    """Study: a trained gain on every hidden unit of every frozen expert."""

    @property
    def head_width(self) -> int:
        return self.d_model // self.num_heads

    @property
    def has_auxiliary_loss(self) -> bool:
        return bool(self.balance_loss) or self.entropy_band is not None

    @property
    def query_width(self) -> int:
        """Hidden width of the mlp query network, resolved."""
        return self.query_hidden or 2 * self.d_model

    def find_problems(self) -> Iterator[str]:
        # Sizes.
        d, heads = self.d_model, self.num_heads
        if d % heads:
            divisors = [h for h in range(1, 65) if d % h == 0 and (d // h) % 2 == 0]
            yield f"num_heads {heads} does not divide d_model {d}; choose one of {divisors}"
        if self.positions == "rope" and self.head_width % 2:
            odd = f"num_heads {heads} gives heads of odd width {self.head_width}"
            yield f"{odd}, which rotary positions cannot pair; choose other heads or positions: alibi"
        if self.positions == "sinusoidal" and d % 2:
            yield f"d_model {d} is odd, but sinusoidal positions need an even width"
        if self.vocab_size > MAX_VOCAB_SIZE:
            yield f"vocab_size {self.vocab_size} does not fit the 16-bit token type; use at most {MAX_VOCAB_SIZE}"
        if self.ffn != "some" and not self.dense_width:
            yield f"dense_width must be set with ffn: {self.ffn}, e.g. {2 * d}"
        if self.ffn == "some" and self.dense_width:
            yield f"dense_width {self.dense_width} has no meaning with ffn: some; leave it 0"
        # Experts.
        full_rank = min(self.d_model, self.d_ffn)
        if self.ffn == "some" and self.top_k > self.num_experts:
            yield f"top_k {self.top_k} is more than num_experts {self.num_experts}; lower top_k"
        if self.query_hidden and self.query == "linear":
            yield f"query_hidden {self.query_hidden} has no meaning with query: linear; leave it 0"
        if self.trainability == "lora" and self.lora_rank > full_rank:
            yield f"lora_rank {self.lora_rank} exceeds the experts' full rank {full_rank}; lower it"
        for study in ("gains", "shared_down"):
            if getattr(self, study) and self.trainability != "frozen":
                yield f"{study} is a study of frozen experts; set trainability: frozen"
        if self.activation == "swiglu" and self.shared_down:
            yield "shared_down mixes activations of GELU alone; set activation: gelu"
        if self.gains and self.shared_down:
            yield "gains and shared_down cannot be combined; choose one of the two studies"
        if self.trainability == "full" and self.expert_dtype == "bfloat16":
            yield f"expert_dtype {self.expert_dtype} is for frozen weights; trained experts are kept in float32"
        # Routing.
        low, high = self.temperature_bounds
        if self.learn_temperature and not low < self.temperature < high:
            yield f"temperature {self.temperature} must lie inside temperature_bounds ({low}, {high}) to be learned"
        if self.entropy_band is not None:
            low, high = self.entropy_band
            reach = math.log(self.num_experts)
            if not low < high:
                yield f"entropy_band ({low}, {high}) is empty; give the lower end first"
            if low > reach:
                most = f"{self.num_experts} experts have at most {reach:.3f} nats"
                yield f"entropy_band ({low}, {high}) cannot be reached: {most}; lower the band"
        if self.ffn != "some" or self.router == "hash":
            without = f"ffn: {self.ffn}" if self.ffn != "some" else "router: hash"
            for name in OF_QUERIES:
                if getattr(self, name) != ModelConfig.model_fields[name].default:
                    yield f"{name} needs queries, and {without} has none; leave it at its default"
        if self.ffn != "some":
            for name in ("shared_expert", "shared_down", "output_scale", "gains"):
                if getattr(self, name):
                    yield f"{name} belongs to a SoME layer, and ffn: {self.ffn} has none; leave it out"

"""Exact parameter counts by formula, without building the model.

Symbols: V vocab_size, d d_model, L num_layers, E num_experts, f d_ffn, h query_width, r lora_rank, w a width.
The keys that gravity moves are a buffer: they count neither as trainable nor in the total.
"""

from dataclasses import dataclass

from some_moe.config import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """How many parameters learn, and how many there are in all."""

    trainable: int
    total: int

    @property
    def trainable_percent(self) -> float:
        return 100 * self.trainable / self.total

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(self.trainable + other.trainable, self.total + other.total)

    def times(self, copies: int) -> "ParameterCount":
        return ParameterCount(copies * self.trainable, copies * self.total)


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the whole model: embedding, blocks, and an untied output head with a bias."""
    V, d = model.vocab_size, model.d_model
    embedding_and_head = _trained(V * d + d * V + V)
    norms_and_attention = _trained(4 * d + 4 * d * d + 4 * d)
    block = norms_and_attention + _count_feed_forward(model)
    return embedding_and_head + block.times(model.num_layers)


def format_millions(count: int) -> str:
    """Print a count as the reports do: millions with two decimals."""
    return f"{count / 1e6:.2f}"


def _trained(count: int) -> ParameterCount:
    return ParameterCount(trainable=count, total=count)


def _frozen(count: int) -> ParameterCount:
    return ParameterCount(trainable=0, total=count)


def _count_dense(d: int, w: int) -> int:
    """A two-layer network d→w→d with biases."""
    return 2 * d * w + w + d


def _count_feed_forward(model: ModelConfig) -> ParameterCount:
    if model.ffn == "dense":
        return _trained(_count_dense(model.d_model, model.dense_width))
    if model.ffn == "frozen_dense":
        return _frozen(_count_dense(model.d_model, model.dense_width))
    return _count_routing(model) + _count_library(model)


def _count_routing(model: ModelConfig) -> ParameterCount:
    """Everything that finds the experts: query network, learned keys, learned temperature."""
    d = model.d_model
    if model.router == "hash":
        return _trained(0)
    query = d * d + d if model.query == "linear" else _count_dense(d, model.query_width)
    keys = model.num_experts * d if model.router == "learned" else 0
    return _trained(query + keys + int(model.learn_temperature))


def _count_library(model: ModelConfig) -> ParameterCount:
    """The experts and what the studies add to them."""
    E, d, f = model.num_experts, model.d_model, model.d_ffn
    if model.shared_down:
        experts = _frozen(E * (d * f + f)) + _trained(f * d + d)
    elif model.trainability == "full":
        experts = _trained(E * _count_dense(d, f))
    else:
        experts = _frozen(E * _count_dense(d, f))
    if model.trainability == "lora":
        experts += _trained(E * 2 * model.lora_rank * (d + f))
    if model.gains:
        experts += _trained(E * f)
    if model.shared_expert:
        experts += _trained(_count_dense(d, model.shared_expert))
    return experts + _trained(int(model.output_scale))

"""Exact parameter counts by formula, without building the model.

Symbols: V vocab_size, d d_model, L num_layers, E num_experts, f d_ffn, w a width.
The keys that gravity moves are a buffer: they count neither as trainable nor in the total.
"""

from typing import NamedTuple

from some_moe.config import ModelConfig


class ParameterCount(NamedTuple):
    """How many parameters learn, and how many there are in all."""

    trainable: int
    total: int

    @property
    def trainable_percent(self) -> float:
        return 100 * self.trainable / self.total


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the whole model: embedding, blocks, and an untied output head with a bias."""
    V, d, L = model.vocab_size, model.d_model, model.num_layers
    embedding_and_head = V * d + d * V + V
    norms_and_attention = 4 * d + 4 * d * d + 4 * d
    trained, frozen = _count_feed_forward(model)
    trainable = embedding_and_head + L * (norms_and_attention + trained)
    return ParameterCount(trainable, trainable + L * frozen)


def format_millions(count: int) -> str:
    """Print a count as the reports do: millions with two decimals."""
    return f"{count / 1e6:.2f}"


def _count_dense(d: int, w: int, activation: str = "gelu") -> int:
    """A two-layer network d→w→d with biases; a gated one has a first matrix of height 2w."""
    return d * w + d + (d + 1) * (2 * w if activation == "swiglu" else w)


def _count_feed_forward(model: ModelConfig) -> tuple[int, int]:
    """One layer's parameters, (trained, frozen)."""
    E, d, f = model.num_experts, model.d_model, model.d_ffn
    if model.ffn != "some":
        dense = _count_dense(d, model.dense_width, model.activation)
        return (dense, 0) if model.ffn == "dense" else (0, dense)
    experts = E * (d * f + f) if model.shared_down else E * _count_dense(d, f, model.activation)
    trained, frozen = (experts, 0) if model.trainability == "full" else (0, experts)
    # What finds the experts: query network, learned keys, learned temperature.
    if model.router != "hash":
        trained += d * d + d if model.query == "linear" else _count_dense(d, model.query_width)
        trained += E * d if model.router == "learned" else 0
        trained += int(model.learn_temperature)
    # What the studies add to them.
    if model.trainability == "lora":
        trained += E * model.lora_rank * (2 * d + (3 if model.activation == "swiglu" else 2) * f)
    if model.shared_down:
        trained += f * d + d
    if model.gains:
        trained += E * f
    if model.shared_expert:
        trained += _count_dense(d, model.shared_expert, model.activation)
    return trained + int(model.output_scale), frozen

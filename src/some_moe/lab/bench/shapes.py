"""What is measured, as arithmetic: layers by name, floating-point operations, and a chip's peak.

Symbols: N tokens, k experts a token, d model width, f hidden width, E experts, L layers, T positions, V vocabulary.
"""

from some_moe.config import ConfigError, ModelConfig, RunConfig
from some_moe.config.parameters import count_parameters
from some_moe.lab.registry.presets import find_preset

DEFAULT_SHAPES = ("A1", "A4", "V3", "B3")
CPU_SHAPES = ("demo", "A1")  # what a laptop trains, and what it can still measure
# Dense bf16 operations a second, by the name that the driver gives. Other builds (PCIe, NVL) have other peaks.
PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}


def find_shape(name: str, trainability: str = "frozen") -> RunConfig:
    """A preset or a registered experiment that has experts, which shall be trained so."""
    config = find_preset(name)
    if (kind := config.model.ffn) != "some":
        raise ConfigError(f"{config.name!r} has no experts to measure (ffn: {kind}); choose another, e.g. A1")
    return config.override({"model.trainability": trainability})


def layer_flops(model: ModelConfig, tokens: int) -> int:
    """Operations of one layer's experts: 8·N·k·d·f forward and backward when frozen, 12 when trained; gated ones take
    half as many more."""
    slots, matrices = tokens * model.top_k, count_matrices(model)
    flops = (6 if model.trainability == "full" else 4) * matrices * slots * model.d_model * model.d_ffn
    if model.trainability == "lora":
        # Each of the two updates is d×r and r×f: forward, input gradient and weight gradient, 2 operations each.
        flops += 6 * slots * 2 * model.lora_rank * (model.d_model + model.d_ffn)
    return flops


def count_matrices(model: ModelConfig) -> int:
    """How many times d·f weights an expert has."""
    return 1 if model.shared_down else 3 if model.activation == "swiglu" else 2


def step_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Operations of a training step for each token, matrix products alone.

    6·(trained parameters that every token uses, the embedding left out) + the experts in use + 6·L·T·d of causal
    attention + 4·E·d·L of key scores. Experts cost 8·k·d·f·L while frozen and 12·k·d·f·L when trained.
    """
    L, d, f, k = model.num_layers, model.d_model, model.d_ffn, model.top_k
    trained = count_parameters(model).trainable
    flops = 6 * L * seq_len * d
    if model.ffn == "some":
        # What grows with E belongs to single experts, of which a token uses k: it is counted below instead.
        more = model.model_copy(update={"num_experts": model.num_experts + 1})
        trained -= model.num_experts * (count_parameters(more).trainable - trained)
        matrices = count_matrices(model)
        passes = 6 if model.trainability == "full" else 4
        flops += matrices * passes * k * d * f * L
        if model.trainability == "lora":
            flops += 6 * k * 2 * model.lora_rank * (d + f) * L
        if model.router != "hash":
            flops += (6 if model.router == "learned" else 4) * model.num_experts * d * L
    elif model.ffn == "frozen_dense":
        flops += 4 * count_matrices(model) * d * model.dense_width * L
    return flops + 6 * (trained - model.vocab_size * d)

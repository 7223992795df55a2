"""What is measured, as arithmetic: sizes of a layer, floating-point operations, bytes, and a chip's peaks.

Symbols: N tokens, k experts a token, d model width, f hidden width, E experts, L layers, T positions, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

from some_moe.config import ConfigError, ModelConfig
from some_moe.config.parameters import count_parameters
from some_moe.lab.registry import find_experiment
from some_moe.lab.registry.presets import PRESETS

SIZES = ("d_model", "d_ffn", "num_experts", "top_k")
DEFAULT_SHAPES = ("A1", "A4", "V3", "B3")
CPU_SHAPES = ("demo", "A1")  # what a laptop trains, and what it can still measure
# Floating-point operations, in units of N·k·d·f: two matrices, a multiplication and an addition each.
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = 4, 4, 4


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of one layer's experts."""

    name: str
    d_model: int
    d_ffn: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is out of range; use 1 or more")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k {self.top_k} is more than num_experts {self.num_experts}; lower top_k")

    def resize(self, **sizes: int | None) -> "LayerShape":
        """The same shape with some sizes changed (None leaves one as it is), named after its sizes."""
        changed = {name: size for name, size in sizes.items() if size is not None and size != getattr(self, name)}
        if not changed:
            return self
        new = replace(self, **cast(dict[str, Any], changed))
        return replace(new, name=f"d{new.d_model}-f{new.d_ffn}-E{new.num_experts}-k{new.top_k}")


def find_shape(name: str) -> LayerShape:
    """The experts of a preset or of a registered experiment."""
    config = PRESETS[name]() if name in PRESETS else find_experiment(name).config
    model = config.model
    if model.ffn != "some":
        raise ConfigError(f"{config.name!r} has no experts to measure (ffn: {model.ffn}); choose another, e.g. A1")
    return LayerShape(name=config.name, **{name: getattr(model, name) for name in SIZES})


@dataclass(frozen=True)
class Chip:
    """What a chip can do at best, by its maker: dense bf16 operations and bytes of memory a second."""

    flops: float
    bandwidth: float


# By the name that the driver gives. Other builds (PCIe, NVL) have other peaks and are left out.
CHIPS = {
    "NVIDIA H200": Chip(989e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": Chip(989e12, 3.35e12),
}


def find_chip(device_name: str) -> Chip | None:
    return CHIPS.get(device_name)


def layer_flops(shape: LayerShape, tokens: int, which: str, trainability: str = "frozen", lora_rank: int = 0) -> int:
    """Operations of one layer's experts: 8·N·k·d·f forward and backward when frozen, 12 when trained."""
    does_forward, does_backward = which != "backward", which != "forward"
    slots = tokens * shape.top_k
    gradients = INPUT_GRADIENT + (WEIGHT_GRADIENT if trainability == "full" else 0)
    matrices = does_forward * FORWARD + does_backward * gradients
    flops = matrices * slots * shape.d_model * shape.d_ffn
    if trainability == "lora":
        # Each of the two updates is d×r and r×f: forward, input gradient and weight gradient, 2 operations each.
        passes = 2 * does_forward + 4 * does_backward
        flops += passes * slots * 2 * lora_rank * (shape.d_model + shape.d_ffn)
    return flops


def layer_bytes(shape: LayerShape, tokens: int, which: str, trainability: str, used_experts: int, width: int) -> int:
    """The fewest bytes through memory, at `width` bytes a number.

    A pass reads the weights of the experts in use once; forward reads x and writes y, and writes the
    pre-activations where a backward pass follows; backward reads them and dy, and writes dx. Weights that are
    trained get a gradient, written once.
    """
    d, f = shape.d_model, shape.d_ffn
    weights = used_experts * (2 * d * f + f + d)
    ends, hidden = 2 * tokens * d, tokens * shape.top_k * f
    numbers = 0
    if which != "backward":
        numbers += weights + ends + (hidden if which == "both" else 0)
    if which != "forward":
        numbers += weights + ends + hidden
        if trainability == "full":
            numbers += weights + tokens * d  # dW is written, x is read again
    return width * numbers


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
        matrices = 1 if model.shared_down else 2
        passes = 6 if model.trainability == "full" else 4
        flops += matrices * passes * k * d * f * L
        if model.trainability == "lora":
            flops += 6 * k * 2 * model.lora_rank * (d + f) * L
        if model.router != "hash":
            flops += (6 if model.router == "learned" else 4) * model.num_experts * d * L
    elif model.ffn == "frozen_dense":
        flops += 8 * d * model.dense_width * L
    return flops + 6 * (trained - model.vocab_size * d)

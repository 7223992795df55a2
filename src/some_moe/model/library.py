"""The expert library: E small feed-forward networks, made from a number, that a layer's tokens share."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from some_moe.config import ConfigError, ModelConfig
from some_moe.experts import ExpertWeights, LoraWeights, MixExperts, choose_kernel
from some_moe.model.expert_weights import MATRICES, checksum, fill_experts, fill_orthogonal
from some_moe.model.linear import Linear
from some_moe.precision import full_precision, product_dtype


class ExpertLibrary(nn.Module):
    """E experts d → f → d. Frozen weights are buffers that no checkpoint needs: they are a seed.

    Variants, each in its own small class below: `LoraLibrary` adds a trained low-rank update,
    `GainLibrary` a trained gain per hidden unit, `SharedDownLibrary` one trained down-projection.
    """

    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        kernel: str = "auto",
        experts: range | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """experts: those that are made here, where other processes have the others; None is all."""
        super().__init__()
        self.experts = experts or range(config.num_experts)
        self.layer = layer
        self.seed = config.expert_seed
        self.init_method = config.init_method
        self.sparsity = config.sparsity
        self.trained = config.trainability == "full"
        self.kernel = kernel
        self.mix: MixExperts = choose_kernel(kernel)
        here, width, d = len(self.experts), config.d_ffn, config.d_model
        high = 2 * width if config.activation == "swiglu" else width
        shapes = {"up": (here, high, d), "up_bias": (here, high), "down": (here, d, width), "down_bias": (here, d)}
        self.fan_in = {"up": d, "down": width}
        dtype = torch.bfloat16 if config.expert_dtype == "bfloat16" else torch.float32
        for name in self.matrices():
            stack = torch.empty(shapes[name], dtype=dtype, device=device)
            if self.trained:
                self.register_parameter(name, nn.Parameter(stack))
            else:
                # Orthogonal weights cannot be promised to the bit elsewhere, so they are saved.
                self.register_buffer(name, stack, persistent=self.init_method == "orthogonal")
        self.generate()

    def matrices(self) -> tuple[str, ...]:
        """Names of the weight stacks that this library has."""
        return tuple(MATRICES)

    @torch.no_grad()
    def generate(self) -> None:
        """Compute all weights from the seed (nothing to do on the meta device)."""
        if self.up.is_meta:
            return
        for name in self.matrices():
            stack = getattr(self, name)
            bound = 1 / math.sqrt(self.fan_in[name.removesuffix("_bias")])
            is_matrix = name in self.fan_in
            whose: dict[str, Any] = {"seed": self.seed, "layer": self.layer, "experts": self.experts}
            if self.init_method == "orthogonal" and is_matrix:
                fill_orthogonal(stack, name, **whose)
            else:
                sparsity = self.sparsity if self.init_method == "sparse" and is_matrix else 0.0
                fill_experts(stack, name, bound=bound, sparsity=sparsity, **whose)

    def stacks(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.matrices()]

    def describe(self) -> dict[str, Any]:
        """What a checkpoint keeps instead of the weights."""
        return {
            "layer": self.layer,
            "seed": self.seed,
            "init_method": self.init_method,
            "dtype": str(self.up.dtype).removeprefix("torch."),
            "checksum": self.checksum(),
        }

    def checksum(self) -> str:
        return checksum(self.stacks(), self.experts.start)

    def verify(self, description: dict[str, Any]) -> None:
        """Refuse a description that these weights do not match."""
        found = self.describe()
        for name, expected in description.items():
            if found.get(name) != expected:
                raise ConfigError(
                    f"the experts of layer {self.layer} have {name} {found.get(name)!r}, but the saved model was "
                    f"made with {expected!r}; use the config that was saved with it"
                )

    def weights(self) -> ExpertWeights:
        return ExpertWeights(**{name: getattr(self, name) for name in self.matrices()})

    def forward(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """x (N, D), experts (N, K) int64, gates (N, K) → the gated sum (N, D) of the experts' outputs."""
        # Experts compute in one type throughout, that of a product of x.
        x = x.to(product_dtype(x))
        with full_precision(x):
            return self.mix(x, experts, gates, self.weights())


class LoraLibrary(ExpertLibrary):
    """Frozen experts with a trained update of rank r on both matrices; it starts at zero."""

    def __init__(self, config: ModelConfig, layer: int, **options: Any) -> None:
        super().__init__(config, layer, **options)
        (experts, high, d), width = self.up.shape, config.d_ffn
        rank, device = config.lora_rank, self.up.device
        self.up_in = nn.Parameter(torch.empty(experts, rank, d, device=device))
        self.up_out = nn.Parameter(torch.zeros(experts, high, rank, device=device))
        self.down_in = nn.Parameter(torch.empty(experts, rank, width, device=device))
        self.down_out = nn.Parameter(torch.zeros(experts, d, rank, device=device))

    def weights(self) -> ExpertWeights:
        lora = LoraWeights(up_in=self.up_in, up_out=self.up_out, down_in=self.down_in, down_out=self.down_out)
        return replace(super().weights(), lora=lora)


class GainLibrary(ExpertLibrary):
    """Frozen experts with a trained gain on every hidden unit; all gains start at one."""

    def __init__(self, config: ModelConfig, layer: int, **options: Any) -> None:
        super().__init__(config, layer, **options)
        self.gain = nn.Parameter(torch.ones(len(self.experts), config.d_ffn, device=self.up.device))

    def weights(self) -> ExpertWeights:
        return replace(super().weights(), gain=self.gain)


class SharedDownLibrary(ExpertLibrary):
    """Frozen up-projections; their mixed activations pass one trained down-projection."""

    def __init__(self, config: ModelConfig, layer: int, **options: Any) -> None:
        super().__init__(config, layer, **options)
        self.shared = Linear(config.d_ffn, config.d_model, device=self.up.device)

    def matrices(self) -> tuple[str, ...]:
        return ("up", "up_bias")

    def forward(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        y: Tensor = self.shared(super().forward(x, experts, gates))
        return y


def make_library(config: ModelConfig, layer: int, **options: Any) -> ExpertLibrary:
    """Return the library that the config asks for."""
    kind = LoraLibrary if config.trainability == "lora" else GainLibrary if config.gains else ExpertLibrary
    return (SharedDownLibrary if config.shared_down else kind)(config, layer, **options)

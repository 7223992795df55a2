"""The input of a layer benchmark: weights, tokens, and a routing as even or as uneven as asked.

Shapes: N tokens, K experts each, D model width, F hidden width, E experts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from some_moe.experts import ExpertWeights, LoraWeights
from some_moe.lab.bench.shapes import LayerShape
from some_moe.metrics.usage import gini

STACKS = ("up", "up_bias", "down", "down_bias")
SKEWED_GINI = 0.9
TUNING_TOKENS = 2048


def make_weights(
    shape: LayerShape, device: torch.device, dtype: torch.dtype, trainability: str = "frozen", lora_rank: int = 8
) -> ExpertWeights:
    """Random experts, made once on the device; every variant computes with this one copy."""
    source = torch.Generator(device).manual_seed(0)

    def draw(*size: int, fan_in: int, trained: bool) -> Tensor:
        stack = torch.empty(size, device=device, dtype=dtype).normal_(0, 1 / math.sqrt(fan_in), generator=source)
        return nn.Parameter(stack, requires_grad=trained)

    E, F, D, R = shape.num_experts, shape.d_ffn, shape.d_model, lora_rank
    full = trainability == "full"
    lora = None
    if trainability == "lora":
        lora = LoraWeights(
            up_in=draw(E, R, D, fan_in=D, trained=True),
            up_out=draw(E, F, R, fan_in=R, trained=True),
            down_in=draw(E, R, F, fan_in=F, trained=True),
            down_out=draw(E, D, R, fan_in=R, trained=True),
        )
    return ExpertWeights(
        up=draw(E, F, D, fan_in=D, trained=full),
        up_bias=draw(E, F, fan_in=D, trained=full),
        down=draw(E, D, F, fan_in=F, trained=full),
        down_bias=draw(E, D, fan_in=F, trained=full),
        lora=lora,
    )


def trained_tensors(weights: ExpertWeights) -> dict[str, Tensor]:
    """The weights that want a gradient, by name."""
    found = {name: getattr(weights, name) for name in STACKS}
    if weights.lora is not None:
        found |= vars(weights.lora)
    return {name: stack for name, stack in found.items() if stack.requires_grad}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One layer's input and the gradient of its output."""

    x: Tensor  # (N, D), wants a gradient
    experts: Tensor  # (N, K) int64, distinct in each row
    gates: Tensor  # (N, K), each row adds up to 1; wants a gradient
    grad_y: Tensor  # (N, D)


def make_problem(
    shape: LayerShape,
    tokens: int,
    routing: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    load_multiple: int = 1,
) -> Problem:
    """A problem drawn from the seed; every expert's load is a multiple of `load_multiple`, as `tokens` must be too."""
    source = torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=source)

    x = draw(tokens, shape.d_model).to(dtype).requires_grad_()
    experts = draw_experts(shape.num_experts, shape.top_k, tokens, routing, source)
    if load_multiple > 1:
        loads = torch.bincount(experts.flatten(), minlength=shape.num_experts)
        experts = deal_experts(round_loads(loads, load_multiple), tokens, source)
    return Problem(
        x=x,
        experts=experts,
        # In the type of x, as a careful user would pass them: float32 gates would promote the peers' outputs.
        gates=draw(tokens, shape.top_k).softmax(-1).to(dtype).requires_grad_(),
        grad_y=draw(tokens, shape.d_model).to(dtype),
    )


def draw_experts(num_experts: int, top_k: int, tokens: int, routing: str, source: torch.Generator) -> Tensor:
    """Choose K distinct experts for each token, each in proportion to its popularity: (N, K) int64.

    Adding Gumbel noise to the logarithms of the popularities and taking the K largest does just that.
    """
    exponent = 0.0 if routing == "balanced" else skewing_exponent(num_experts, top_k)
    score = log_popularity(num_experts, exponent).to(source.device)
    # Popular experts lie anywhere in the stack, not side by side at its start.
    score = score[torch.randperm(num_experts, device=source.device, generator=source)]
    return (score + gumbel((tokens, num_experts), source)).topk(top_k).indices


def round_loads(loads: Tensor, multiple: int) -> Tensor:
    """Round loads (E,) to multiples with the same sum, which must be one: up where the least is missing, else down."""
    rest = loads % multiple
    rounded = loads - rest
    rounded[rest.argsort(descending=True, stable=True)[: int(rest.sum()) // multiple]] += multiple
    return rounded


def deal_experts(loads: Tensor, tokens: int, source: torch.Generator) -> Tensor:
    """Give every token K = Σ loads / N distinct experts such that the loads (E,), none above N, are met: (N, K) int64.

    The tokens sit in a circle in random order, and expert after expert is dealt to the next ones in it.
    """
    dealt = torch.arange(len(loads), device=loads.device).repeat_interleave(loads).view(-1, tokens)
    return dealt[:, torch.randperm(tokens, device=source.device, generator=source)].T.contiguous()


def gumbel(size: tuple[int, ...], source: torch.Generator) -> Tensor:
    return -torch.empty(size, device=source.device).exponential_(generator=source).log()


def log_popularity(num_experts: int, exponent: float) -> Tensor:
    """Logarithms of a power law over ranks: the expert of rank r is chosen in proportion to r^−exponent."""
    return -exponent * torch.arange(1, num_experts + 1, dtype=torch.float32).log()


def reachable_gini(num_experts: int, top_k: int) -> float:
    """The gini to aim at: with K experts a token it cannot pass 1 − K/E, and is kept a little below that."""
    return min(SKEWED_GINI, 0.96 * (1 - top_k / num_experts))


@cache
def skewing_exponent(num_experts: int, top_k: int) -> float:
    """The power law whose routing has the gini of `reachable_gini`, found by halving on a sample of tokens."""
    noise = gumbel((TUNING_TOKENS, num_experts), torch.Generator().manual_seed(0))

    def is_too_even(exponent: float) -> bool:
        experts = (log_popularity(num_experts, exponent) + noise).topk(top_k).indices
        return gini(torch.bincount(experts.flatten(), minlength=num_experts)) < reachable_gini(num_experts, top_k)

    return sum(halve(is_too_even, 0.0, 64.0, times=24)) / 2


def halve(is_too_low: Callable[[float], bool], low: float, high: float, *, times: int) -> tuple[float, float]:
    """Narrow an interval down around the least number that is not too low."""
    for _ in range(times):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_low(middle) else (low, middle)
    return low, high

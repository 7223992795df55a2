"""The input of a layer benchmark: weights, tokens, a routing as even or as uneven as asked; and its right answer.

Shapes: N tokens, K experts each, D model width, F hidden width, E experts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from some_moe.config import ModelConfig
from some_moe.experts import ExpertWeights, LoraWeights, reference
from some_moe.metrics.usage import gini

SKEWED_GINI = 0.9
TUNING_TOKENS = 2048
SAMPLED_TOKENS = 256
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
# The peers add up the gradients of biases in bf16, over all of an expert's tokens: coarse, but not another function.
BIAS_TOLERANCE = {torch.bfloat16: 1e-1, torch.float32: 1e-4}


def make_weights(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> ExpertWeights:
    """Random experts, made once on the device; every variant computes with this one copy."""
    source = torch.Generator(device).manual_seed(0)
    E, F, D, R = model.num_experts, model.d_ffn, model.d_model, model.lora_rank

    def draw(trained: bool, **sizes: tuple[int, ...]) -> dict[str, nn.Parameter]:
        """Stacks with deviations of 1/√ of the last size, which is the fan-in of a matrix."""
        stacks = {name: torch.empty(size, device=device, dtype=dtype) for name, size in sizes.items()}
        for stack in stacks.values():
            stack.normal_(0, stack.shape[-1] ** -0.5, generator=source)
        return {name: nn.Parameter(stack, requires_grad=trained) for name, stack in stacks.items()}

    lora, high = None, 2 * F if model.activation == "swiglu" else F
    if model.trainability == "lora":
        lora = LoraWeights(**draw(True, up_in=(E, R, D), up_out=(E, high, R), down_in=(E, R, F), down_out=(E, D, R)))
    stacks = draw(model.trainability == "full", up=(E, high, D), up_bias=(E, high), down=(E, D, F), down_bias=(E, D))
    return ExpertWeights(**stacks, lora=lora)


def name_stacks(weights: ExpertWeights) -> dict[str, Tensor]:
    """All of a layer's weights, and its low-rank updates where it has some, by name."""
    stacks = vars(weights) | (vars(weights.lora) if weights.lora else {})
    return {name: stack for name, stack in stacks.items() if isinstance(stack, Tensor)}


def trained_tensors(weights: ExpertWeights) -> dict[str, Tensor]:
    """The weights that want a gradient, by name."""
    return {name: stack for name, stack in name_stacks(weights).items() if stack.requires_grad}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One layer's input and the gradient of its output."""

    x: Tensor  # (N, D), wants a gradient
    experts: Tensor  # (N, K) int64, distinct in each row
    gates: Tensor  # (N, K), each row adds up to 1; wants a gradient
    grad_y: Tensor  # (N, D)


def make_problem(model: ModelConfig, like: Tensor, tokens: int, routing: str, alike: int = 1) -> Problem:
    """A random problem, of the type and on the device of `like`.

    alike: so many tokens at a time choose the same experts, which makes every load a multiple of it.
    """
    source = torch.Generator(like.device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=like.device, generator=source)

    x = draw(tokens, model.d_model).to(like.dtype).requires_grad_()
    experts = draw_experts(model.num_experts, model.top_k, tokens // alike, routing, source).repeat(alike, 1)
    # The gates in the type of x, as a careful user would pass them: float32 ones would promote the peers' outputs.
    gates = draw(tokens, model.top_k).softmax(-1).to(like.dtype).requires_grad_()
    return Problem(x=x, experts=experts, gates=gates, grad_y=draw(tokens, model.d_model).to(like.dtype))


def draw_experts(num_experts: int, top_k: int, tokens: int, routing: str, source: torch.Generator) -> Tensor:
    """Choose K distinct experts for each token, each in proportion to its popularity: (N, K) int64.

    Adding Gumbel noise to the logarithms of the popularities and taking the K largest does just that.
    """
    exponent = 0.0 if routing == "balanced" else skewing_exponent(num_experts, top_k)
    score = log_popularity(num_experts, exponent).to(source.device)
    # Popular experts lie anywhere in the stack, not side by side at its start.
    score = score[torch.randperm(num_experts, device=source.device, generator=source)]
    return (score + gumbel((tokens, num_experts), source)).topk(top_k).indices


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


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64; infinite where something is not a number."""
    expected = expected.detach().double()
    error = float((found.detach().double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")


class Judge:
    """Knows the right output and gradients of one problem, for a sample of its tokens and experts, in float64.

    A token's output and gradients depend on no other token, so a sample of the tokens checks the very call that is
    timed; an expert's gradients depend on its own tokens alone, so a few experts check the trained weights.
    """

    def __init__(self, problem: Problem, weights: ExpertWeights) -> None:
        self.dtype = problem.x.dtype
        source = torch.Generator(problem.x.device).manual_seed(0)
        tokens = torch.randperm(len(problem.x), device=problem.x.device, generator=source)[:SAMPLED_TOKENS]
        x, gates = (part.detach()[tokens].double().requires_grad_() for part in (problem.x, problem.gates))
        y = reference.mix_experts(x, problem.experts[tokens], gates, weights)
        grad_x, grad_gates = torch.autograd.grad(y, [x, gates], problem.grad_y[tokens].double())
        # By name, and by the tokens or the expert that are looked at. Detached, so that the autograd graph ends here:
        # no recording survives one that is kept.
        self.expected: list[tuple[str, Tensor | int, Tensor]] = [
            ("y", tokens, y.detach()), ("grad_x", tokens, grad_x), ("grad_gates", tokens, grad_gates),
        ]  # fmt: skip
        trained = trained_tensors(weights)
        counts = torch.bincount(problem.experts.flatten(), minlength=weights.num_experts)
        used = counts.nonzero().flatten()
        # The busiest expert, and the least busy one in use.
        for expert in {int(counts.argmax()), int(used[counts[used].argmin()])} if trained else ():
            token, slot = (problem.experts == expert).nonzero(as_tuple=True)
            rows, gate = problem.x.detach()[token].double(), problem.gates.detach()[token, slot, None].double()
            own = gate * reference.run_expert(rows, weights, expert)
            grads = torch.autograd.grad(own, list(trained.values()), problem.grad_y[token].double())
            for name, grad in zip(trained, grads, strict=True):
                self.expected.append((f"grad_{name}", expert, grad[expert].clone()))

    def compare(self, found: Mapping[str, Tensor]) -> tuple[dict[str, float], str]:
        """Norm-wise relative errors of the output and the gradients, by name; and what is wrong, where something is."""
        errors: dict[str, float] = {}
        for name, place, expected in self.expected:
            errors[name] = max(relative_error(found[name][place], expected), errors.get(name, 0.0))
        limits = {name: (BIAS_TOLERANCE if name.endswith("_bias") else TOLERANCE)[self.dtype] for name in errors}
        worst = max(errors, key=lambda name: errors[name] / limits[name])
        if errors[worst] <= limits[worst]:
            return errors, ""
        return errors, f"relative error {errors[worst]:.1e} of {worst}, more than {limits[worst]:.0e}"

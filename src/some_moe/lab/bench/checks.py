"""Nobody is timed who computes something else: outputs and gradients against the float64 reference.

A token's output and gradients depend on no other token, so a sample of the tokens checks the very call that is timed;
an expert's gradients depend on its own tokens alone, so a few experts check the trained weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from some_moe.experts import ExpertWeights, choose_kernel
from some_moe.lab.bench.problem import STACKS, Problem, trained_tensors

SAMPLED_TOKENS = 256
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
# The peers add up the gradients of biases in bf16, over all of an expert's tokens: coarse, but not another function.
BIAS_TOLERANCE = {torch.bfloat16: 1e-1, torch.float32: 1e-4}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64; infinite where something is not a number."""
    expected = expected.detach().double()
    error = float((found.detach().double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")


class Judge:
    """Knows the right answer of one problem, for a sample of its tokens and experts."""

    def __init__(self, problem: Problem, weights: ExpertWeights, *, with_gradients: bool = True) -> None:
        self.dtype, self.with_gradients = problem.x.dtype, with_gradients
        source = torch.Generator(problem.x.device).manual_seed(0)
        order = torch.randperm(len(problem.x), device=problem.x.device, generator=source)
        self.tokens = order[:SAMPLED_TOKENS]
        sample = _take(problem, self.tokens)
        self.y, (self.grad_x, self.grad_gates) = _solve(sample, weights, [sample.x, sample.gates])
        self.weight_gradients: dict[tuple[str, int], Tensor] = {}
        if with_gradients and trained_tensors(weights):
            counts = torch.bincount(problem.experts.flatten(), minlength=weights.num_experts)
            used = counts.nonzero().flatten()
            # The busiest expert, and the least busy one in use.
            for expert in sorted({int(counts.argmax()), int(used[counts[used].argmin()])}):
                self._expect_weight_gradients(problem, weights, expert)

    def _expect_weight_gradients(self, problem: Problem, weights: ExpertWeights, expert: int) -> None:
        token, slot = (problem.experts == expert).nonzero(as_tuple=True)
        own = _take(problem, token)
        own = replace(own, experts=torch.zeros_like(token)[:, None], gates=own.gates.gather(1, slot[:, None]))
        alone = _slice_expert(weights, expert)
        trained = trained_tensors(alone)
        _, found = _solve(own, alone, list(trained.values()))
        self.weight_gradients |= {(name, expert): grad[0] for name, grad in zip(trained, found, strict=True)}

    def errors(self, y: Tensor, grads: Mapping[str, Tensor]) -> dict[str, float]:
        """Norm-wise relative errors. grads: of x, gates and each trained stack, by name, where there is a backward."""
        found = {"y": relative_error(y[self.tokens], self.y)}
        if self.with_gradients:
            found["grad_x"] = relative_error(grads["x"][self.tokens], self.grad_x)
            found["grad_gates"] = relative_error(grads["gates"][self.tokens], self.grad_gates)
        for (name, expert), expected in self.weight_gradients.items():
            error = relative_error(grads[name][expert], expected)
            found[f"grad_{name}"] = max(error, found.get(f"grad_{name}", 0.0))
        return found

    def complain(self, errors: Mapping[str, float]) -> str:
        """What is wrong with such errors; nothing where they are as small as they must be."""
        limits = {name: (BIAS_TOLERANCE if name.endswith("_bias") else TOLERANCE)[self.dtype] for name in errors}
        worst = max(errors, key=lambda name: errors[name] / limits[name])
        if errors[worst] <= limits[worst]:
            return ""
        return f"relative error {errors[worst]:.1e} of {worst}, more than {limits[worst]:.0e}"


def _solve(problem: Problem, weights: ExpertWeights, wanted: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reference's output, and the gradients of `wanted` for the problem's grad_y."""
    y = choose_kernel("reference")(problem.x, problem.experts, problem.gates, weights)
    # Detached, so that the autograd graph ends here: no recording survives one that is kept.
    return y.detach(), torch.autograd.grad(y, wanted, problem.grad_y)


def _take(problem: Problem, tokens: Tensor) -> Problem:
    """Some tokens of a problem, in float64."""
    x, gates, grad_y = (part.detach()[tokens].double() for part in (problem.x, problem.gates, problem.grad_y))
    return Problem(x=x.requires_grad_(), experts=problem.experts[tokens], gates=gates.requires_grad_(), grad_y=grad_y)


def _slice_expert(weights: ExpertWeights, expert: int) -> ExpertWeights:
    """One expert alone, in float64, with gradients where the whole stack has them."""

    def cut(stack: Tensor) -> Tensor:
        return stack.detach()[expert : expert + 1].double().requires_grad_(stack.requires_grad)

    lora = weights.lora
    if lora is not None:
        lora = replace(lora, **{field.name: cut(getattr(lora, field.name)) for field in fields(lora)})
    return ExpertWeights(**{name: cut(getattr(weights, name)) for name in STACKS}, lora=lora)

"""Nobody is timed who computes something else: outputs and gradients against the float64 reference.

A token's output and gradients depend on no other token, so a sample of the tokens checks the very call that is timed;
an expert's gradients depend on its own tokens alone, so a few experts check the trained weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from some_moe.experts import ExpertWeights, choose_kernel
from some_moe.lab.bench.problem import Problem, trained_tensors

SAMPLED_TOKENS = 256
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
# The peers add up the gradients of biases in bf16, over all of an expert's tokens: coarse, but not another function.
BIAS_TOLERANCE = {torch.bfloat16: 1e-1, torch.float32: 1e-4}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64; infinite where something is not a number."""
    expected = expected.detach().double()
    error = float((found.detach().double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")


def gradients(mix: object, problem: Problem, wanted: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Output and the gradients of `wanted` for the problem's grad_y."""
    assert callable(mix)
    y: Tensor = mix(problem.x, problem.experts, problem.gates)
    # Detached, so that the autograd graph ends here: no recording survives one that is kept.
    return y.detach(), list(torch.autograd.grad(y, wanted, problem.grad_y))


class Judge:
    """Knows the right answer of one problem, for a sample of its tokens and experts."""

    def __init__(self, problem: Problem, weights: ExpertWeights, *, with_gradients: bool = True) -> None:
        self.problem, self.weights, self.with_gradients = problem, weights, with_gradients
        device = problem.x.device
        source = torch.Generator(device).manual_seed(0)
        order = torch.randperm(len(problem.x), device=device, generator=source)
        self.tokens = order[:SAMPLED_TOKENS]
        sample = _to_float64(_take(problem, self.tokens))
        self.y, (self.grad_x, self.grad_gates) = _reference(sample, weights, [sample.x, sample.gates])
        self.weight_gradients: dict[tuple[str, int], Tensor] = {}
        if with_gradients and trained_tensors(weights):
            for expert in self._sample_experts():
                self._expect_weight_gradients(expert)

    def _sample_experts(self) -> list[int]:
        """The busiest expert, and the least busy one in use."""
        counts = torch.bincount(self.problem.experts.flatten(), minlength=self.weights.num_experts)
        used = counts.nonzero().flatten()
        return sorted({int(counts.argmax()), int(used[counts[used].argmin()])})

    def _expect_weight_gradients(self, expert: int) -> None:
        token, slot = (self.problem.experts == expert).nonzero(as_tuple=True)
        own = _to_float64(_take(self.problem, token))
        own = replace(own, experts=torch.zeros_like(token)[:, None], gates=own.gates.gather(1, slot[:, None]))
        alone = _slice_expert(self.weights, expert)
        trained = trained_tensors(alone)
        _, found = _reference(own, alone, list(trained.values()))
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
        dtype = self.problem.x.dtype
        limits = {name: (BIAS_TOLERANCE if name.endswith("_bias") else TOLERANCE)[dtype] for name in errors}
        worst = max(errors, key=lambda name: errors[name] / limits[name])
        if errors[worst] <= limits[worst]:
            return ""
        return f"relative error {errors[worst]:.1e} of {worst}, more than {limits[worst]:.0e}"


def _reference(problem: Problem, weights: ExpertWeights, wanted: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    kernel = choose_kernel("reference")
    return gradients(lambda x, experts, gates: kernel(x, experts, gates, weights), problem, wanted)


def _take(problem: Problem, tokens: Tensor) -> Problem:
    return Problem(**{field.name: getattr(problem, field.name).detach()[tokens] for field in fields(Problem)})


def _to_float64(problem: Problem) -> Problem:
    return Problem(
        x=problem.x.double().requires_grad_(),
        experts=problem.experts,
        gates=problem.gates.double().requires_grad_(),
        grad_y=problem.grad_y.double(),
    )


def _slice_expert(weights: ExpertWeights, expert: int) -> ExpertWeights:
    """One expert alone, in float64, with gradients where the whole stack has them."""

    def cut(stack: Tensor) -> Tensor:
        return stack.detach()[expert : expert + 1].double().requires_grad_(stack.requires_grad)

    lora = weights.lora
    if lora is not None:
        lora = replace(lora, **{field.name: cut(getattr(lora, field.name)) for field in fields(lora)})
    stacks = {name: cut(getattr(weights, name)) for name in ("up", "up_bias", "down", "down_bias")}
    return ExpertWeights(**stacks, lora=lora)

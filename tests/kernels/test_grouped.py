"""The grouped path equals the reference: output, dX, gate and weight gradients, in float32 on the CPU."""

import pytest
import torch
from torch import Tensor

from some_moe.kernels import ExpertWeights, LoraWeights, choose_kernel
from some_moe.kernels.grouped import MixRows
from some_moe.kernels.tables import sort_slots

from .test_parity import KINDS, make_weights, run, trained_tensors

TOLERANCE = 1e-5


def as_float32(weights: ExpertWeights) -> ExpertWeights:
    def cast(stack: Tensor | None) -> Tensor | None:
        return None if stack is None else stack.detach().float().requires_grad_(stack.requires_grad)

    lora = weights.lora
    stacks = {name: cast(getattr(weights, name)) for name in ("up", "up_bias", "down", "down_bias", "gain")}
    if lora is not None:
        names = ("up_in", "up_out", "down_in", "down_out")
        lora = LoraWeights(**{name: cast(getattr(lora, name)) for name in names})
    return ExpertWeights(**stacks, lora=lora)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "e", "k"), [(13, 5, 2), (7, 4, 4), (9, 6, 1)])
def test_grouped_equals_the_reference(kind: str, n: int, e: int, k: int) -> None:
    torch.manual_seed(n)
    weights = make_weights(kind, e, 16, 24)
    x, gates = torch.randn(n, 16, dtype=torch.float64), torch.rand(n, k, dtype=torch.float64)
    experts = torch.rand(n, e - 1 if k < e else e).topk(k).indices  # the last expert is empty where it may be
    expected = run(choose_kernel("reference"), x, experts, gates, weights)
    found = run(choose_kernel("grouped"), x.float(), experts, gates.float(), as_float32(weights))
    assert len(found) == 3 + len(trained_tensors(weights))
    for left, right in zip(found, expected, strict=True):
        assert (left.double() - right).norm() <= TOLERANCE * right.norm()


def test_float32_gates_weigh_bfloat16_rows_unrounded() -> None:
    torch.manual_seed(0)
    slots = sort_slots(torch.rand(20, 5).topk(3).indices, 5)
    rows, grad = torch.randn(60, 16).bfloat16().requires_grad_(), torch.randn(20, 16).bfloat16()
    gates = torch.rand(20, 3, requires_grad=True)
    y = MixRows.apply(rows, gates, slots.order, slots.order.argsort())  # type: ignore[no-untyped-call]
    grad_rows, grad_gates = torch.autograd.grad(y, (rows, gates), grad)
    token, gate = slots.order // 3, gates.detach().flatten()[slots.order][:, None]
    back = grad[token].float()
    exact = torch.zeros(20, 16).index_add_(0, token, gate * rows.detach().float())
    assert torch.allclose(y.float(), exact, rtol=2**-8, atol=1e-6)
    assert torch.equal(grad_rows, (gate * back).bfloat16())
    assert torch.allclose(grad_gates.flatten()[slots.order], (rows.detach().float() * back).sum(1), atol=1e-5)


def test_slots_are_sorted_stably_and_ends_count_them() -> None:
    experts = torch.tensor([[2, 0], [0, 2], [3, 2]])
    slots = sort_slots(experts, 5)
    assert slots.order.tolist() == [1, 2, 0, 3, 5, 4]
    assert slots.ends.tolist() == [2, 2, 5, 6, 6]


@pytest.mark.parametrize("num_experts", [3, 300, 40_000])
def test_slots_of_any_number_of_experts(num_experts: int) -> None:
    experts = torch.randint(num_experts, (50, 2))
    slots = sort_slots(experts, num_experts)
    assert torch.equal(slots.expert.long(), experts.flatten().sort().values)
    counts = experts.flatten().bincount(minlength=num_experts)
    assert torch.equal(slots.ends.long(), counts.cumsum(0))

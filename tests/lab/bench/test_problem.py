"""Routing as even or as uneven as asked."""

from typing import Any

import pytest
import torch

from some_moe.config import ModelConfig
from some_moe.lab.bench.problem import (
    draw_experts,
    make_problem,
    make_weights,
    reachable_gini,
    relative_error,
    trained_tensors,
)
from some_moe.metrics.usage import gini

CPU = torch.device("cpu")
LIKE = torch.zeros(1)


def tiny(**sizes: Any) -> ModelConfig:
    return ModelConfig(**{"d_model": 8, "num_heads": 2, "d_ffn": 16, "num_experts": 4, "top_k": 2} | sizes)


@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 4), (256, 8), (16, 2)])
def test_skewed_routing_has_the_wanted_gini(num_experts: int, top_k: int) -> None:
    experts = draw_experts(num_experts, top_k, 4096, "skewed", torch.Generator().manual_seed(3))
    counts = torch.bincount(experts.flatten(), minlength=num_experts)
    assert gini(counts) == pytest.approx(reachable_gini(num_experts, top_k), abs=0.01)


def test_the_published_shapes_reach_a_gini_of_nine_tenths() -> None:
    assert reachable_gini(64, 4) == pytest.approx(0.9)
    assert reachable_gini(512, 4) == 0.9
    assert reachable_gini(4, 4) == 0


def test_balanced_routing_is_even_but_for_chance() -> None:
    experts = draw_experts(64, 4, 8192, "balanced", torch.Generator().manual_seed(0))
    assert gini(torch.bincount(experts.flatten(), minlength=64)) < 0.04


@pytest.mark.parametrize("routing", ["balanced", "skewed"])
def test_a_token_has_distinct_experts_and_gates_that_add_up(routing: str) -> None:
    problem = make_problem(tiny(num_experts=6, top_k=3), LIKE, 200, routing)
    ordered = problem.experts.sort(-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    assert torch.allclose(problem.gates.sum(-1), torch.ones(200))
    assert problem.experts.dtype == torch.int64


@pytest.mark.parametrize("routing", ["balanced", "skewed"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 4), (7, 7), (5, 1), (512, 8)])
def test_tokens_that_choose_alike_make_loads_multiples(num_experts: int, top_k: int, routing: str) -> None:
    model = tiny(num_experts=num_experts, top_k=top_k)
    aligned, again = (make_problem(model, LIKE, 2048, routing, alike=8).experts for _ in range(2))
    loads = aligned.flatten().bincount(minlength=num_experts)
    assert (loads % 8 == 0).all()
    assert aligned.shape == (2048, top_k)
    ordered = aligned.sort(-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    assert torch.equal(aligned, again)
    if routing == "skewed":
        assert gini(loads) == pytest.approx(reachable_gini(num_experts, top_k), abs=0.05)


def test_weights_want_gradients_only_where_they_are_trained() -> None:
    frozen = make_weights(tiny(), CPU, torch.float32)
    assert trained_tensors(frozen) == {}
    assert frozen.is_frozen
    full = trained_tensors(make_weights(tiny(trainability="full"), CPU, torch.float32))
    assert set(full) == {"up", "up_bias", "down", "down_bias"}
    lora = trained_tensors(make_weights(tiny(trainability="lora", lora_rank=2), CPU, torch.float32))
    assert {name: tuple(stack.shape) for name, stack in lora.items()} == {
        "up_in": (4, 2, 8), "up_out": (4, 16, 2), "down_in": (4, 2, 16), "down_out": (4, 8, 2),
    }  # fmt: skip


def test_weights_are_as_large_as_their_fan_in_asks() -> None:
    model = tiny(d_model=64, d_ffn=256, num_experts=16)
    weights = make_weights(model, CPU, torch.float32)
    for stack, fan_in in ((weights.up, 64), (weights.down, 256)):
        assert stack is not None
        assert float(stack.detach().std()) == pytest.approx(fan_in**-0.5, rel=0.1)


def test_relative_error_is_of_norms() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")

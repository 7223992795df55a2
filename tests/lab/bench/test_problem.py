"""Routing as even or as uneven as asked."""

import pytest
import torch

from some_moe.lab.bench.problem import (
    deal_experts,
    draw_experts,
    make_problem,
    make_weights,
    reachable_gini,
    round_loads,
    trained_tensors,
)
from some_moe.lab.bench.shapes import LayerShape
from some_moe.metrics.usage import gini

CPU = torch.device("cpu")


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
    shape = LayerShape(name="tiny", d_model=8, d_ffn=16, num_experts=6, top_k=3)
    problem = make_problem(shape, 200, routing, CPU, torch.float32)
    ordered = problem.experts.sort(-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    assert torch.allclose(problem.gates.sum(-1), torch.ones(200))
    assert problem.experts.dtype == torch.int64


def test_loads_are_rounded_to_multiples_with_the_same_sum() -> None:
    assert round_loads(torch.tensor([7, 9, 0, 16, 5, 3]), 8).tolist() == [8, 8, 0, 16, 8, 0]


def test_experts_are_dealt_to_meet_the_loads_exactly() -> None:
    loads = torch.tensor([16, 0, 5, 11, 16])  # two of them chosen by all
    experts = deal_experts(loads, 16, torch.Generator().manual_seed(0))
    assert experts.shape == (16, 3)
    assert torch.equal(experts.flatten().bincount(minlength=5), loads)
    assert all(len(set(row)) == 3 for row in experts.tolist())


@pytest.mark.parametrize("routing", ["balanced", "skewed"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 4), (7, 7), (5, 1), (512, 8)])
def test_a_problem_of_aligned_loads_is_as_even_as_the_plain_one(num_experts: int, top_k: int, routing: str) -> None:
    shape = LayerShape(name="tiny", d_model=8, d_ffn=16, num_experts=num_experts, top_k=top_k)
    plain, aligned, again = (
        make_problem(shape, 2048, routing, CPU, torch.float32, load_multiple=multiple).experts for multiple in (1, 8, 8)
    )
    before, after = (experts.flatten().bincount(minlength=num_experts) for experts in (plain, aligned))
    assert (after % 8 == 0).all()
    assert int((after - before).abs().max()) < 8
    ordered = aligned.sort(-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    assert torch.equal(aligned, again)


def test_weights_want_gradients_only_where_they_are_trained() -> None:
    shape = LayerShape(name="tiny", d_model=8, d_ffn=16, num_experts=4, top_k=2)
    assert trained_tensors(make_weights(shape, CPU, torch.float32)) == {}
    assert make_weights(shape, CPU, torch.float32).is_frozen
    full = trained_tensors(make_weights(shape, CPU, torch.float32, "full"))
    assert set(full) == {"up", "up_bias", "down", "down_bias"}
    lora = trained_tensors(make_weights(shape, CPU, torch.float32, "lora", lora_rank=2))
    assert {name: tuple(stack.shape) for name, stack in lora.items()} == {
        "up_in": (4, 2, 8), "up_out": (4, 16, 2), "down_in": (4, 2, 16), "down_out": (4, 8, 2),
    }  # fmt: skip

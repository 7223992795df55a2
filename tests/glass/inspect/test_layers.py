"""The numbers of a layer, checked against counting by hand."""

import numpy as np
import pytest

from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.communities import count_pairs
from some_moe.glass.inspect.layers import (
    measure_breadth,
    measure_layers,
    order_by_company,
    share_company,
    strongest_pairs,
)

EXPERTS = np.array([[0, 1], [0, 1], [0, 2], [3, 0], [0, 1]])  # 0 always, 1 thrice, 2 and 3 once


def make_collection(experts: np.ndarray, gates: np.ndarray, num_experts: int, **arrays: np.ndarray) -> Collection:
    num_tokens = experts.shape[0]
    values = {
        "tokens": np.arange(num_tokens, dtype=np.int32) % 3,
        "keys": np.eye(num_experts, 8, dtype=np.float32)[None],
        "queries": np.eye(4, 8, dtype=np.float32)[None],
        "respawns": np.zeros((1, num_experts), np.int64),
    } | arrays
    return Collection(
        meta={"num_experts": num_experts, "top_k": experts.shape[1], "depths": [2], "notes": []},
        targets=values["tokens"],
        story=np.zeros(num_tokens, np.int32),
        position=np.arange(num_tokens, dtype=np.int32),
        loss=np.ones(num_tokens, np.float32),
        experts=experts[None].astype(np.int16),
        gates=gates[None].astype(np.float32),
        usage=np.ones((1, num_experts), np.float32),
        **values,
    )


def test_figures_of_a_layer_by_hand() -> None:
    found = measure_layers(make_collection(EXPERTS, np.full((5, 2), 0.5), 5))[0]
    assert found.layer == 2
    assert found.counts == [5, 3, 1, 1, 0]
    assert found.loads == [2.5, 1.5, 0.5, 0.5, 0.0]
    # Sorted 0 1 1 3 5, weighted by −4 −2 0 2 4, over 5 experts times 10 selections.
    assert found.gini == pytest.approx((-2 * 1 + 0 * 1 + 2 * 3 + 4 * 5) / 50)
    shares = np.array([0.5, 0.3, 0.1, 0.1])
    assert found.entropy_bits == pytest.approx(-(shares * np.log2(shares)).sum())
    assert found.experts_used == 4
    assert found.max_load == 2.5
    assert found.gate_entropy_nats == pytest.approx(np.log(2))
    assert found.max_gate_entropy_nats == pytest.approx(np.log(2))
    assert found.generalists == []
    assert found.under_used == [4]


def test_generalists_have_three_fair_shares_and_come_busiest_first() -> None:
    experts = np.repeat([[0], [1], [2]], [50, 40, 10], axis=0)
    found = measure_layers(make_collection(experts, np.ones((100, 1)), 10))[0]
    assert found.loads[:3] == [5.0, 4.0, 1.0]
    assert found.generalists == [0, 1]
    assert found.under_used == [3, 4, 5, 6, 7, 8, 9]


def test_respawned_experts_are_named_and_counted() -> None:
    respawns = np.array([[0, 2, 0, 1, 0]])
    found = measure_layers(make_collection(EXPERTS, np.full((5, 2), 0.5), 5, respawns=respawns))[0]
    assert found.respawned == [1, 3]
    assert found.respawns == 3


def test_query_figures_of_known_directions() -> None:
    crossing = measure_layers(make_collection(EXPERTS, np.full((5, 2), 0.5), 5))[0]
    assert crossing.query_effective_rank == pytest.approx(4)
    assert crossing.query_mean_cosine == pytest.approx(0, abs=1e-12)
    assert crossing.query_collinearity == pytest.approx(0.5)  # four axes, a quarter of each
    alike = np.tile(np.array([3.0, 4, 0, 0], np.float32), (1, 6, 1))
    one_way = measure_layers(make_collection(EXPERTS, np.full((5, 2), 0.5), 5, queries=alike))[0]
    assert one_way.query_effective_rank == pytest.approx(1)
    assert one_way.query_mean_cosine == pytest.approx(1)
    assert one_way.query_collinearity == pytest.approx(1)


def test_without_keys_there_are_no_figures_of_directions() -> None:
    nothing = {"keys": np.zeros((1, 5, 0), np.float32), "queries": np.zeros((1, 4, 0), np.float32)}
    found = measure_layers(make_collection(EXPERTS, np.full((5, 2), 0.5), 5, **nothing))[0]
    assert found.query_collinearity is None
    assert found.key_effective_rank is None


def test_breadth_is_the_share_of_different_words() -> None:
    breadth = measure_breadth(EXPERTS, np.array([7, 7, 8, 9, 9]), 5)
    np.testing.assert_allclose(breadth, [1, 2 / 3, 1 / 3, 1 / 3, 0])


def test_company_by_hand() -> None:
    company = share_company(count_pairs(EXPERTS, 5))
    assert company[0].tolist() == [0, 0.6, 0.2, 0.2, 0]
    assert company[1].tolist() == [1, 0, 0, 0, 0]
    assert company[4].tolist() == [0, 0, 0, 0, 0]


def test_lift_is_one_for_independent_choices() -> None:
    # Expert 0 or 1, and independently 2 or 3, each half of the time.
    experts = np.array([[0, 2], [0, 3], [1, 2], [1, 3]])
    found = strongest_pairs(count_pairs(experts, 4), num_tokens=4)
    assert [one["lift"] for one in found] == [1.0] * 4
    assert {tuple(one["experts"]) for one in found} == {(0, 2), (0, 3), (1, 2), (1, 3)}
    together = strongest_pairs(count_pairs(np.array([[0, 1], [0, 1], [2, 3], [2, 3]]), 4), num_tokens=4)
    assert [(one["experts"], one["tokens"], one["lift"]) for one in together] == [([0, 1], 2, 2.0), ([2, 3], 2, 2.0)]


def test_experts_that_work_together_stand_together() -> None:
    teams = np.array([[0, 4], [0, 4], [4, 0], [1, 3], [3, 1], [1, 3], [0, 3]])
    order = order_by_company(count_pairs(teams, 6)).tolist()
    assert abs(order.index(0) - order.index(4)) == 1
    assert abs(order.index(1) - order.index(3)) == 1
    assert sorted(order) == list(range(6))
    assert set(order[4:]) == {2, 5}  # never chosen

"""Usage metrics at their known values, and over real tokens or all positions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from some_moe.metrics.usage import (
    count_selections,
    entropy_bits,
    experts_used,
    gate_entropy_nats,
    gini,
    hash_counts,
    max_load,
    summarize_usage,
)


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_even_use_has_gini_zero_and_full_entropy() -> None:
    even = torch.full((64,), 7)
    assert gini(even) == 0.0
    assert entropy_bits(even) == pytest.approx(6.0)
    assert max_load(even) == 1.0


def test_one_expert_for_everything_is_the_other_end() -> None:
    alone = counts(0, 0, 9, 0)
    assert gini(alone) == pytest.approx(3 / 4)
    assert entropy_bits(alone) == 0.0
    assert max_load(alone) == 4.0


def test_hand_computed_values() -> None:
    # Sorted 1, 3, 4: G = (−2·1 + 0·3 + 2·4)/(3·8) = 1/4
    assert gini(counts(4, 1, 3)) == pytest.approx(0.25)
    assert entropy_bits(counts(1, 1, 2)) == pytest.approx(1.5)


def test_nothing_selected_is_no_error() -> None:
    summary = summarize_usage(counts(0, 0, 0, 0))
    assert summary["gini"] == summary["entropy_bits"] == summary["max_load"] == summary["experts_used"] == 0


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40).filter(any), st.integers(1, 50))
def test_gini_and_entropy_ignore_order_and_scale_and_stay_in_bounds(values: list[int], factor: int) -> None:
    original = torch.tensor(values)
    changed = torch.tensor(values[::-1]) * factor
    assert gini(original) == pytest.approx(gini(changed), abs=1e-9)
    assert entropy_bits(original) == pytest.approx(entropy_bits(changed), abs=1e-9)
    assert -1e-12 <= gini(original) <= 1 - 1 / len(values) + 1e-12
    assert 0 <= entropy_bits(original) <= math.log2(len(values)) + 1e-9


def test_a_mask_leaves_padding_out() -> None:
    experts = torch.tensor([[[0, 1], [0, 2], [3, 3]]])
    real = torch.tensor([[True, True, False]])
    assert count_selections(experts, 4, real).tolist() == [2, 1, 1, 0]
    assert count_selections(experts, 4).tolist() == [2, 1, 1, 2]
    assert experts_used(count_selections(experts, 4, real)) == 3


def test_gate_entropy_is_ln_k_for_equal_gates() -> None:
    gates = torch.tensor([[[0.25] * 4, [1.0, 0, 0, 0]]])
    assert gate_entropy_nats(gates, torch.tensor([[True, False]])) == pytest.approx(math.log(4))
    assert gate_entropy_nats(gates) == pytest.approx(math.log(4) / 2)
    assert gate_entropy_nats(torch.tensor([[0.2], [0.7]])) == 0  # one expert, whose gate is its share of all


def test_hash_usage_follows_the_frequency_of_tokens() -> None:
    ids = torch.tensor([[1] * 90 + list(range(2, 12))])
    found = hash_counts(ids, num_experts=8, top_k=2)
    assert int(found.sum()) == 2 * 100
    assert sorted(found.tolist())[-2:] >= [90, 90]
    even = hash_counts(torch.arange(4096), num_experts=8, top_k=2)
    assert gini(found) > 0.5 > 0.1 > gini(even)
    masked = hash_counts(ids, 8, 2, mask=ids > 1)
    assert int(masked.sum()) == 20

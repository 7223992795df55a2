"""Key and query metrics at their known values."""

import pytest
import torch

from some_moe.config import ModelConfig
from some_moe.metrics.keys import (
    collinearity,
    count_respawns,
    effective_rank,
    mean_pairwise_cosine,
    query_collinearity,
)
from some_moe.model.layer import SomeLayer


def test_cosine_of_known_stores() -> None:
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    together = torch.tensor([[2.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
    assert mean_pairwise_cosine(opposite) == pytest.approx(-1.0)
    assert mean_pairwise_cosine(together) == pytest.approx(1.0)
    assert mean_pairwise_cosine(torch.eye(5)) == pytest.approx(0.0)


def test_effective_rank_counts_directions() -> None:
    assert effective_rank(torch.eye(8)) == pytest.approx(8.0)
    assert effective_rank(torch.ones(5, 8)) == pytest.approx(1.0, abs=1e-6)
    assert effective_rank(torch.zeros(5, 8)) == 0.0
    masked = effective_rank(torch.eye(8)[None], mask=torch.arange(8)[None] < 3)
    assert masked == pytest.approx(3.0)


def test_collinearity_from_queries_and_from_sums_agree() -> None:
    assert query_collinearity(torch.ones(4, 3)) == pytest.approx(1.0)
    assert query_collinearity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) == pytest.approx(0.0)
    layer = SomeLayer(ModelConfig(d_model=12, num_heads=2, num_experts=4, d_ffn=8, top_k=2, vocab_size=9))
    _, routing = layer(torch.randn(2, 7, 12))
    assert routing.query is not None
    queries = routing.query.detach().flatten(0, 1)
    from_sums = collinearity(queries.sum(0), queries.norm(dim=-1).sum())
    assert from_sums == pytest.approx(query_collinearity(routing.query.detach()), rel=1e-5)


def test_respawns_are_counted_in_all_and_by_expert() -> None:
    assert count_respawns(torch.tensor([0, 2, 0, 1])) == (3, 2)

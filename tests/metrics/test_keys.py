"""Key and query metrics at their known values."""

import pytest
import torch

from some_moe.metrics.keys import effective_rank, mean_pairwise_cosine, query_collinearity


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


def test_collinearity_of_known_queries() -> None:
    assert query_collinearity(torch.ones(4, 3)) == pytest.approx(1.0)
    assert query_collinearity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) == pytest.approx(0.0)
    assert query_collinearity(torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])) == pytest.approx(5 / 7)
    assert query_collinearity(torch.zeros(2, 3)) == 0.0

"""The learning rate and the number of experts over a run, at their known values."""

import pytest

from some_moe.config import TrainConfig
from some_moe.training.schedule import rate_at, top_k_at


def test_rate_rises_in_a_line_and_falls_along_a_half_cosine() -> None:
    config = TrainConfig(learning_rate=1.0, warmup=0.1, min_rate_share=0.2)
    shares = [rate_at(step, 101, config) for step in range(101)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == pytest.approx(1.0)
    assert shares[10] == pytest.approx(1.0)
    assert shares[55] == pytest.approx(0.6)
    assert shares[100] == pytest.approx(0.2)
    assert shares[10:] == sorted(shares[10:], reverse=True)


def test_no_warmup_starts_at_the_top() -> None:
    assert rate_at(0, 100, TrainConfig(warmup=0)) == TrainConfig().learning_rate
    assert rate_at(0, 1, TrainConfig(warmup=0)) == TrainConfig().learning_rate


def test_experts_a_token_start_at_one_and_climb_to_top_k() -> None:
    config = TrainConfig(top_k_warmup=0.2, top_k_ramp=0.3)
    path = [top_k_at(step, 100, 4, config) for step in range(100)]
    assert path[:20] == [1] * 20
    assert path[50:] == [4] * 50
    assert path == sorted(path)
    assert {*path} == {1, 2, 3, 4}
    assert top_k_at(0, 100, 4, TrainConfig()) == 4

"""Rotary angles turn by relative position: what attention sees depends on distance alone."""

import pytest
import torch

from some_moe.model.attention import rotary_angles, rotate


@pytest.mark.parametrize("width", [12, 48, 64])
@pytest.mark.parametrize("shift", [1, 17, 700])
def test_scores_depend_on_distance_alone(width: int, shift: int) -> None:
    q, k = torch.randn(2, 1, 1, 9, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = []
    for start in (0, shift):
        angles = rotary_angles(torch.arange(start, start + 9)[None], width)
        rotation = (angles[0].double(), angles[1].double())
        scores.append(rotate(q, rotation) @ rotate(k, rotation).mT)
    assert torch.allclose(*scores, atol=1e-3)


def test_position_zero_is_left_as_it_is() -> None:
    x = torch.randn(1, 2, 1, 8)
    assert torch.equal(rotate(x, rotary_angles(torch.zeros(1, 1), 8)), x)

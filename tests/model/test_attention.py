"""Positions and rotary angles from the table are those made anew."""

import pytest
import torch

from some_moe.model.attention import plain_positions, rotary_angles

CPU = torch.device("cpu")


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 5), (0, 64), (0, 768), (3, 4), (17, 900), (511, 513)])
@pytest.mark.parametrize("width", [12, 48, 64])
def test_the_table_gives_the_bits_and_strides_of_what_is_made_anew(start: int, end: int, width: int) -> None:
    expected = torch.arange(start, end)[None]
    positions, rotation = plain_positions(start, end, width, CPU)
    for found, wanted in zip((positions, *rotation), (expected, *rotary_angles(expected, width)), strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()


def test_a_table_made_for_inference_serves_training_too() -> None:
    with torch.inference_mode():
        plain_positions(0, 1025, 6, CPU)
    _, (cos, _) = plain_positions(0, 1030, 6, CPU)
    assert not cos.is_inference()

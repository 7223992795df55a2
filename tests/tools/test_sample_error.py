"""Standard errors over stories, by hand."""

import math

import numpy as np
import pytest

from tools.sample_error import find_errors


def test_errors_equal_hand_arithmetic() -> None:
    # Stories of 1 and 3 tokens that cost 2 and 4 nats: the loss is 6/4 = 1.5.
    by_length, by_loss, honest = find_errors(np.array([2.0, 4.0]), np.array([1.0, 3.0]))
    assert by_length == pytest.approx(math.sqrt(2) / math.sqrt(2) / 2)  # deviation √2, of two stories, mean 2
    assert by_loss == pytest.approx(math.sqrt(2) / math.sqrt(2) / 3)
    # What is left of each: 2 − 1.5·1 = 0.5 and 4 − 1.5·3 = −0.5.
    assert honest == pytest.approx(math.sqrt((0.25 + 0.25) * 2) / 4)


def test_stories_that_cost_alike_per_token_leave_no_error_of_the_honest_loss() -> None:
    by_length, by_loss, honest = find_errors(np.array([2.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0]))
    assert honest == 0
    assert by_length == pytest.approx(by_loss)

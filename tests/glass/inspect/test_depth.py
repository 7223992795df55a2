"""Depth: slopes and peaks by hand, and a verdict that asks for a sure and significant change."""

import numpy as np
import pytest

from some_moe.glass.inspect.association import bootstrap_weights, entropy_bits, mutual_information
from some_moe.glass.inspect.depth import Depth, bootstrap_depth, judge_depth, peak_weights, slope_weights
from some_moe.glass.inspect.evidence import Measured, Words
from some_moe.glass.inspect.labels import PLACE, Family

SURE = np.full(3, 0.001)


def make_depth(family: str, found: list[float], spread: float = 0.001) -> Depth:
    random = np.random.default_rng(0)
    return Depth(family, np.array(found), np.array(found) + spread * random.normal(size=(400, len(found))))


def published_order() -> list[Depth]:
    return [
        make_depth("identity", [0.5, 0.3, 0.1]),
        make_depth("part of speech", [0.1, 0.2, 0.1]),
        make_depth("plot part", [0.0, 0.1, 0.2]),
    ]


def test_slope_and_peak_by_hand() -> None:
    assert np.array([0.1, 0.3, 0.5]) @ slope_weights(3) == pytest.approx(0.4)
    assert np.array([1.0, 1.0, 4.0, 4.0]) @ slope_weights(4) == pytest.approx(3.6)
    assert peak_weights(5).tolist() == [-0.5, 0, 1, 0, -0.5]


def test_the_published_order_is_recognised() -> None:
    found = judge_depth(published_order(), [SURE] * 3, level=0.01)
    assert found["statement"].startswith("Specialisation follows the published order")
    assert [slope["holds"] for slope in found["slopes"]] == [True, True, True]
    assert [slope["name"] for slope in found["slopes"]] == ["Lexicon", "Mind's Eye", "Storyteller"]


def test_the_statement_says_that_training_seeds_are_left_out() -> None:
    assert "training seeds" in judge_depth(published_order(), [SURE] * 3, level=0.01)["statement"]


def test_other_text_is_judged_by_the_place_in_its_story() -> None:
    depths = [*published_order()[:2], published_order()[2]._replace(family=PLACE)]
    assert "follows the published order" in judge_depth(depths, [SURE] * 3, level=0.01)["statement"]


def test_the_reverse_order_is_refused() -> None:
    depths = [Depth(one.family, one.found[::-1] - one.found.min(), one.draws[:, ::-1]) for one in published_order()]
    found = judge_depth(depths, [SURE] * 3, level=0.01)
    assert "does not follow" in found["statement"]
    assert not found["slopes"][0]["holds"]
    assert not found["slopes"][2]["holds"]


def test_a_rise_of_something_that_is_not_there_is_no_storyteller() -> None:
    found = judge_depth(published_order(), [SURE, SURE, np.array([0.9, 0.9, 0.9])], level=0.01)
    assert [slope["holds"] for slope in found["slopes"]] == [True, True, False]
    assert "no more of it than chance" in found["statement"]


def test_what_lies_below_chance_does_not_rise() -> None:
    depths = [*published_order()[:2], make_depth("plot part", [-0.2, -0.1, -0.02], 0.001)]
    slope = judge_depth(depths, [SURE] * 3, level=0.01)["slopes"][2]
    assert slope["slope"] == 0
    assert not slope["holds"]


def test_an_uncertain_rise_is_open() -> None:
    depths = [*published_order()[:2], make_depth("plot part", [0.1, 0.1, 0.11], 0.05)]
    assert "Storyteller is open" in judge_depth(depths, [SURE] * 3, level=0.01)["statement"]


def test_bootstrap_of_stories_gives_the_information_and_draws_around_it() -> None:
    random = np.random.default_rng(1)
    labels, story = random.integers(0, 3, 900), np.repeat(np.arange(30), 30)
    experts = np.stack(
        [np.where(random.random(900) < share, labels, random.integers(0, 4, 900)) for share in (0.8, 0.2)]
    )
    family = Family(name="role", classes=("a", "b", "c"), labels=labels)
    words = Words([family], np.arange(900), story, experts[:, :, None], 4)
    measured = Measured(words, family, words.experts, 1)
    measured.null_mean = np.array([0.01, 0.02])
    depth = bootstrap_depth(words, measured, bootstrap_weights(30, 200, random))
    expected = (mutual_information(measured.table) - measured.null_mean) / entropy_bits(measured.table.sum(1))
    assert depth.found == pytest.approx(expected, rel=1e-5)
    for layer in range(2):
        _, low, high = depth.interval(np.eye(2)[layer], 0.01)
        assert low < high < low + 0.3
        assert low - 0.05 < expected[layer] < high + 0.05

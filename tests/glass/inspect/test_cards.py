"""Cards: a verdict needs every test to pass, and its reason names the first that does not."""

from typing import Any

import pytest

from some_moe.glass.inspect.cards import Card, count_passed, judge

SHARE = 0.003
KNOCKOUT = {
    "class_change": 0.5,
    "other_change": 0.05,
    "random_class_change": 0.1,
    "random_other_change": 0.1,
    "p_adjusted": 0.001,
    "interval": [0.2, 0.6],
}


def make_card(**changes: Any) -> Card:
    keys = {"p_adjusted": 0.001, "own_bits": 0.3, "random_bits": [0.1, 0.12]} | changes.pop("random_keys", {})
    card = {"layer": 2, "family": "role", "class": "hero", "p_association": 0.002, "knockout": KNOCKOUT}
    return card | {"random_keys": keys} | changes


def test_a_case_that_passes_every_test_is_supported() -> None:
    found = judge(make_card(), SHARE)
    assert found["verdict"] == "supported"
    assert "0.500 nats" in found["reason"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"p_association": 0.004}, "Shuffled labels may share as much"),
        ({"random_keys": {"p_adjusted": 0.2}}, "Random keys may do as well"),
        ({"random_keys": {"p_adjusted": None, "own_bits": None}}, "The router has no keys"),
        ({"knockout": None}, "cannot be knocked out"),
        ({"knockout": KNOCKOUT | {"p_adjusted": 0.01}}, "Beyond what it costs"),
        ({"knockout": KNOCKOUT | {"class_change": 0.04}}, "Without its experts"),
        ({"knockout": KNOCKOUT | {"class_change": 0.09}}, "Without its experts"),
        ({"knockout": KNOCKOUT | {"class_change": -0.1, "other_change": -0.2, "random_class_change": -0.2}}, "Without"),
        ({"knockout": KNOCKOUT | {"interval": [-0.01, 0.6]}}, "effect is not sure"),
    ],
)
def test_one_failure_is_enough_and_is_named(changes: dict[str, Any], reason: str) -> None:
    found = judge(make_card(**changes), SHARE)
    assert found["verdict"] == "not supported"
    assert reason in found["reason"]
    assert found["reason"].endswith(".")


def test_the_count_follows_the_order_of_the_tests() -> None:
    no_better = make_card(random_keys={"p_adjusted": 0.5})
    cards = [make_card(), make_card(p_association=0.5), no_better, make_card(knockout=None)]
    assert count_passed(cards, SHARE) == {"enrichment": 4, "association": 3, "random_keys": 2, "knockout": 1}

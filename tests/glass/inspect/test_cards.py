"""Cards: a verdict needs every test to pass, and its reason names the first that does not."""

from typing import Any

import numpy as np
import pytest

from some_moe.glass.inspect.cards import Case, count_passed
from some_moe.glass.inspect.labels import Family

SHARE = 0.003
KNOCKOUT = {
    "class_change": 0.5,
    "other_change": 0.05,
    "random_class_change": 0.1,
    "random_other_change": 0.1,
    "p_adjusted": 0.001,
    "interval": [0.2, 0.6],
}


def make_case(knockout: dict[str, Any] | None = KNOCKOUT, **changes: Any) -> Case:
    family = Family(name="role", classes=("place", "hero"), labels=np.array([0, 1]))
    known: dict[str, Any] = {"p_association": 0.002, "p_keys": 0.001, "own_bits": 0.3, "random_bits": [0.1, 0.12]}
    known |= {"layer": 2, "experts": (4, 9), "npmi": 0.4, "q_value": 0.002}
    return Case(family=family, label=1, knockout=knockout, **(known | changes))


def test_a_case_that_passes_every_test_is_supported() -> None:
    verdict, reason = make_case().judge(SHARE)
    assert verdict == "supported"
    assert "0.500 nats" in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"p_association": 0.004}, "Shuffled labels may share as much"),
        ({"p_keys": 0.2}, "Random keys may do as well"),
        ({"p_keys": None, "own_bits": None}, "The router has no keys"),
        ({"knockout": None}, "cannot be knocked out"),
        ({"knockout": KNOCKOUT | {"p_adjusted": 0.01}}, "Random sets of equally used experts"),
        ({"knockout": KNOCKOUT | {"class_change": 0.04}}, "Without its experts"),
        ({"knockout": KNOCKOUT | {"class_change": 0.09}}, "Without its experts"),
        ({"knockout": KNOCKOUT | {"class_change": -0.1, "other_change": -0.2, "random_class_change": -0.2}}, "Without"),
        ({"knockout": KNOCKOUT | {"interval": [-0.01, 0.6]}}, "effect is not sure"),
    ],
)
def test_one_failure_is_enough_and_is_named(changes: dict[str, Any], reason: str) -> None:
    verdict, found = make_case(**changes).judge(SHARE)
    assert verdict == "not supported"
    assert reason in found
    assert found.endswith(".")


def test_the_count_follows_the_order_of_the_tests() -> None:
    cases = [make_case(), make_case(p_association=0.5), make_case(p_keys=0.5), make_case(knockout=None)]
    assert count_passed(cases, SHARE) == {"enrichment": 4, "association": 3, "random_keys": 2, "knockout": 1}

"""What does not fit its form is refused by the name of the place; what fits is given, and nothing more."""

import json
from typing import Any

import pytest

from some_moe.system.forms import MisfitError, fields, fit, matches, parse

FORM = fields(count="step", number="loss gini?", texts="notes?") | {"layers?": [fields(counts="experts")]}


def test_what_fits_is_given_without_what_nobody_asked_for() -> None:
    value = {"step": 1, "loss": 2, "gini": None, "layers": [{"experts": [0, 3]}], "evil": "x"}
    assert fit(value, FORM) == {"step": 1, "loss": 2, "gini": None, "layers": [{"experts": [0, 3]}]}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"step": True}, "step"),
        ({"step": -1}, "step"),
        ({"step": 2**53}, "step"),
        ({"step": None}, "step"),
        ({"loss": float("nan")}, "loss"),
        ({"loss": 10**400}, "loss"),
        ({"loss": "1"}, "loss"),
        ({"notes": ["a", 1]}, "notes.1"),
        ({"notes": ["a" * 30_000]}, "notes.0"),
        ({"layers": {}}, "layers"),
        ({"layers": [{"experts": [0]}, {"experts": None}]}, "layers.1.experts"),
        ({"layers": [[]]}, "layers.0"),
    ],
)
def test_what_does_not_fit_is_named_by_its_place(change: dict[str, Any], place: str) -> None:
    with pytest.raises(MisfitError, match=f"does not fit at '{place}'"):
        fit({"step": 1, "loss": 0.5} | change, FORM)


def test_a_pattern_holds_for_the_whole_text() -> None:
    assert matches("[a-z]+")("abc")
    assert not any(map(matches("[a-z]+"), ("../a", "a\n", "", None, 3)))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"step": ' + "1" * 5_000 + "}", "[]"])
def test_what_is_no_json_is_refused_too(text: str) -> None:
    with pytest.raises(MisfitError):
        parse(text, FORM)


def test_text_is_given_printable() -> None:
    assert parse(json.dumps({"step": 1, "loss": 1, "notes": ["a\x1b[2J"]}), FORM)["notes"] == ["a\ufffd[2J"]

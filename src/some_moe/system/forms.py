"""Forms that what was read from a stranger's JSON must have, before anybody computes with it. Imports no torch.

A form is a dict for an object (a name that ends in ? may be missing or null; what has no name in it is dropped), a list
of one form for a list, or a function that says whether a value is right.
"""

import re
from collections.abc import Callable
from typing import Any, TypeAlias

from some_moe.errors import ConfigError
from some_moe.system.reading import clean, parse_json

Form: TypeAlias = "dict[str, Form] | list[Form] | Callable[[Any], bool]"
LARGEST = 2**53  # JSON's numbers are exact up to here
LONGEST = 20_000  # characters of a text


class MisfitError(ConfigError):
    """What was read has not the form that it must have. Its message names the place."""


def is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST


def is_switch(value: Any) -> bool:
    return type(value) is bool


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST  # which nan is not, either


def are_bounds(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


def matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


KINDS: dict[str, Form] = {
    "text": is_text, "texts": [is_text], "count": is_count, "counts": [is_count], "number": is_number,
    "numbers": [is_number], "rows": [[is_number]], "bounds": are_bounds, "switch": is_switch,
}  # fmt: skip


def fields(**names: str) -> dict[str, Form]:
    """The form of an object from the names of its fields, by their kind: fields(count="step", number="loss gini?")."""
    return {name: KINDS[kind] for kind, several in names.items() for name in several.split()}


def fit(value: Any, form: Form, place: str = "") -> Any:
    """What the form describes of a value."""
    if isinstance(form, dict) and isinstance(value, dict):
        fitted = {}
        for key, inner in form.items():
            name = key.rstrip("?")
            if name == key or value.get(name) is not None:
                fitted[name] = fit(value.get(name), inner, f"{place}.{name}".lstrip("."))
            elif name in value:
                fitted[name] = None
        return fitted
    if isinstance(form, list) and isinstance(value, list):
        return [fit(one, form[0], f"{place}.{at}") for at, one in enumerate(value)]
    if isinstance(form, dict | list) or not form(value):
        raise MisfitError(f"does not fit at {place!r}" if place else "does not fit")
    return value


def parse(text: str, form: Form) -> Any:
    """`fit` for JSON, with all its text printable."""
    try:
        found = clean(parse_json(text))
    except (ValueError, RecursionError):
        raise MisfitError("holds no JSON") from None
    return fit(found, form)

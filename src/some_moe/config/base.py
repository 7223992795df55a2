"""The base of every config: frozen data, one-sentence errors, dotted overrides, YAML round trip."""

import ast
import difflib
import inspect
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, ClassVar, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from some_moe.errors import ConfigError
from some_moe.system.files import write_whole
from some_moe.system.reading import clean, parse_yaml, read_text, refuse_unprintable

LARGEST_FILE = 1 << 16  # bytes of a config.yaml: a saved one has a few thousand, and YAML is slow to read
LARGEST_SIZE = 1 << 20  # of a model's width, or a number of experts: products of a few of them stay within 64 bits

Count = Annotated[int, Field(ge=1, lt=2**63)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
OptionalSize = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what every generator can hold
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]

SHORT = Repr()  # a value from a file may be without end
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 3, 80, 80


def did_you_mean(word: str, choices: list[str]) -> str:
    """Return a hint such as "; did you mean 'top_k'?", or "" when nothing is near."""
    start = word.lstrip("-")[:1]  # which is seldom mistyped
    likely = [choice for choice in choices if choice.lstrip("-")[:1] == start or word in choice]
    near = difflib.get_close_matches(word, likely, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


class Config(BaseModel):
    """Frozen settings. Construction validates; a bad value raises `ConfigError`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=False,  # `field_docs` reads them when they are asked for: every command would wait
        # A field called model_... would be refused otherwise; RunConfig.model is the contract's name.
        protected_namespaces=(),
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_sentence(type(self), error)) from None

    any_text: ClassVar[tuple[str, ...]] = ()  # fields whose text may hold control characters

    def find_problems(self) -> Iterator[str]:
        """What does not fit together, a sentence each; the rooms say it of their own fields."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_problems(self) -> Self:
        for name, value in vars(self).items():
            if isinstance(value, str) and name not in self.any_text:
                refuse_unprintable(value, name)
        for problem in self.find_problems():
            raise ConfigError(problem)
        return self

    def override(self, changes: Mapping[str, Any]) -> Self:
        """Return a validated copy with dotted names replaced, e.g. {"model.top_k": 2}."""
        values = dict(vars(self))  # rooms that stay as they are need no second look
        for name, value in changes.items():
            room, _, field = name.partition(".")
            inner = values.get(room)
            known = inner.model_dump() if isinstance(inner, Config) else inner if isinstance(inner, dict) else {}
            if room not in values or (field and field not in known):
                raise ConfigError(f"{name} is not a field{did_you_mean(name, self.field_names())}")
            values[room] = known | {field: value} if field else value
        return type(self)(**values)

    @classmethod
    def field_names(cls) -> list[str]:
        """Every dotted field name, in the order of declaration."""
        names = []
        for name, field in cls.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, Config):
                names += [f"{name}.{inner_name}" for inner_name in inner.field_names()]
            else:
                names.append(name)
        return names

    def flatten(self) -> dict[str, Any]:
        """Return {dotted name: value}, with tuples as lists (as YAML and JSON see them)."""
        values = self.model_dump(mode="json")
        return {name: reduce(getitem, name.split("."), values) for name in self.field_names()}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        try:
            values = parse_yaml(text)
        except ValueError as error:
            raise ConfigError(f"the config is not valid YAML ({error}); compare it with a saved config.yaml") from None
        if values is None:
            values = {}
        rooms = [values, *values.values()] if isinstance(values, dict) else [{None: values}]
        if not all(isinstance(name, str) for room in rooms if isinstance(room, dict) for name in room):
            raise ConfigError("the config must be a mapping of fields, such as 'model: {d_model: 384}'")
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            text = read_text(path, LARGEST_FILE)
        except OSError as error:
            raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror or error}") from None
        return cls.from_yaml(text)

    def save(self, path: str | Path) -> None:
        write_whole(Path(path), self.to_yaml())


def field_docs(config: type[Config]) -> dict[str, str]:
    """The text under each field of a config class, on one line, read from its source: {name: meaning}."""
    (node,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(node, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return docs


def _sentence(config: type[Config], error: ValidationError) -> str:
    """Turn pydantic's first complaint into one sentence that names the field and the value."""
    first = error.errors()[0]
    path = [" ".join(clean(str(part)).split()) for part in first["loc"]]
    name = ".".join(path)
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        # A nested config has already named its own field; only the room's name is missing.
        return f"{name}.{message}" if name and isinstance(first["ctx"]["error"], ConfigError) else message
    if first["type"] == "extra_forbidden":
        return f"{name} is not a field{did_you_mean(path[-1], list(config.model_fields))}"
    if first["type"] == "missing":
        return f"{name} is missing; say it, as in `{name}: …`"
    complaint, value = first["msg"].removeprefix("Input should be "), first["input"]
    shown = "a number of many digits" if isinstance(value, int) and abs(value) > 10**80 else SHORT.repr(value)
    return f"{name} must be {complaint}, but it is {shown}"

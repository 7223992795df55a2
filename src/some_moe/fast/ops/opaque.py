"""Custom ops, opaque to torch.compile, that are plain functions where nothing is compiled.

torch's dispatch of a custom op loads its compiler, which takes seconds, and costs microseconds a call.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


class Op(Protocol):
    """A function of tensors, and how compiled code learns the shapes of what it returns."""

    def __call__(self, *arguments: Any) -> Any: ...

    def register_fake(self, fake: Function) -> Function: ...


def opaque(name: str) -> Callable[[Callable[..., Any]], Op]:
    """Make a function of tensors, which changes none of them and gets no gradient, an op for compiled code too."""

    def decorate(function: Callable[..., Any]) -> Op:
        op = torch.library.custom_op(name, mutates_args=())(function)

        @wraps(function)
        def call(*arguments: Any) -> Any:
            return op(*arguments) if torch.compiler.is_compiling() else function(*arguments)

        call.register_fake = op.register_fake  # type: ignore[attr-defined]
        return cast(Op, call)

    return decorate

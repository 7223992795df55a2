"""How requests are read and answered: sentences for what is refused, and text that comes in pieces."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from some_moe.config import ConfigError
from some_moe.errors import explain
from some_moe.live.desk import BusyError
from some_moe.system.forms import Form, MisfitError, fit
from some_moe.system.reading import clean, parse_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
MOST_SECONDS = 120.0  # that one text may take


class AskedError(Exception):
    """A request that is answered with a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def answer_json(value: Any, status: int = 200) -> "Response":
    from starlette.responses import Response

    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(text, status, media_type="application/json")


def answer_error(_: "Request", error: Exception) -> "Response":
    """Every error as one sentence; what is a fault of this program goes on, to the terminal."""
    status, sentence = 400, str(error)
    if isinstance(error, AskedError):
        status = error.status
    elif isinstance(error, BusyError):
        status, sentence = 429, "another question is being answered; ask again when it is"
    else:
        known = explain(error)
        if known is None:
            raise error
        status, sentence = (400 if isinstance(known, ConfigError) else 500), str(known)
    about = {"message": clean(sentence), "type": "invalid_request_error" if status < 500 else "server_error"}
    return answer_json({"error": about | {"code": status}}, status)


async def read_body(request: "Request", form: "Form | None" = None) -> Any:
    """The JSON of a request, with the form that it must have."""
    try:
        found = parse_json(await request.body())
        return found if form is None else fit(found, form)
    except MisfitError as error:
        raise AskedError(400, f"the request {error}; reload the page") from None
    except (ValueError, RecursionError):
        raise AskedError(400, "the request holds no JSON; send some") from None


def ask_number(request: "Request", name: str, default: int = 0) -> int:
    text = request.query_params.get(name, "")
    if text and not (text.isdecimal() and len(text) < 19):
        raise AskedError(400, f"{name} is no number; give one")
    return int(text) if text else default


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.to_thread(function, *arguments)


async def pump(request: "Request", pieces: Iterator[T], release: Callable[[], None]) -> AsyncIterator[T]:
    """Draw pieces in a thread, until nobody listens any more or it takes too long; then give the desk back."""
    end, nothing, closing = time.monotonic() + MOST_SECONDS, object(), request.scope["some_moe.closing"]
    try:
        while time.monotonic() < end and not closing() and not await request.is_disconnected():
            piece: Any = await in_thread(next, pieces, nothing)
            if piece is nothing:
                return
            yield piece
    finally:
        try:
            pieces.close()  # type: ignore[attr-defined]
        finally:
            release()

"""How requests are read and answered: sentences for what is refused, and text that comes in pieces."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from some_moe.config import ConfigError
from some_moe.errors import explain
from some_moe.live.desk import BusyError, Desk
from some_moe.system.forms import Form, MisfitError, fit
from some_moe.system.reading import clean, parse_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
MOST_SECONDS = 120.0  # that one text may take
WAIT_SECONDS, MOST_WAITING = 30.0, 16  # so long, and so many at most, wait for their turn where clients expect to


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
    from starlette.requests import ClientDisconnect

    try:
        found = parse_json(await request.body())
        return found if form is None else fit(found, form)
    except MisfitError as error:
        raise AskedError(400, f"the request {error}; reload the page") from None
    except ClientDisconnect:
        raise AskedError(400, "the request broke off") from None
    except (ValueError, RecursionError):
        raise AskedError(400, "the request holds no JSON; send some") from None


def ask_number(request: "Request", name: str, default: int = 0) -> int:
    text = request.query_params.get(name, "")
    if text and not (text.isdecimal() and len(text) < 19):
        raise AskedError(400, f"{name} is no number; give one")
    return int(text) if text else default


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.to_thread(function, *arguments)


async def wait_turn(request: "Request", desk: Desk) -> None:
    """Take the desk, as soon as it is free: within a while, and unless many wait already."""
    end, desk.waiting = time.monotonic() + WAIT_SECONDS, desk.waiting + 1
    try:
        while True:  # no thread waits: those are for who is being answered
            try:
                return desk.take()
            except BusyError:
                if desk.waiting > MOST_WAITING or time.monotonic() > end or request.scope["some_moe.closing"]():
                    raise
            await asyncio.sleep(0.03)
            if await request.is_disconnected():
                raise BusyError
    finally:
        desk.waiting -= 1


def stream(
    request: "Request", pieces: Generator[str, None, None], release: Callable[[], None], media_type: str
) -> "Response":
    """An answer in pieces, drawn by a thread of its own until nobody listens or it takes too long.

    release: gives the desk back. The thread does so when it is done: no model is at work that counts as free.
    """
    from starlette.responses import StreamingResponse

    loop, end, closing = asyncio.get_running_loop(), time.monotonic() + MOST_SECONDS, request.scope["some_moe.closing"]
    drawn: asyncio.Queue[str | BaseException | None] = asyncio.Queue()
    left = threading.Event()

    def tell(piece: str | BaseException | None) -> None:
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(drawn.put_nowait, piece)

    def work() -> None:
        try:
            for piece in pieces:
                tell(piece)
                if left.is_set() or closing() or time.monotonic() > end:
                    break
        except BaseException as error:
            tell(error)
        finally:
            pieces.close()
            release()
            tell(None)

    async def read() -> AsyncIterator[str]:
        while (piece := await drawn.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    class Answer(StreamingResponse):
        async def __call__(self, *given: Any) -> None:
            try:
                await super().__call__(*given)
            finally:
                left.set()  # also where nothing was read

    loop.run_in_executor(None, work)
    return Answer(read(), media_type=media_type)


async def unless_left(request: "Request", function: Callable[[Callable[[], bool]], T]) -> T:
    """What a thread finds; function: is given what tells it whether to go on."""
    end, left = time.monotonic() + MOST_SECONDS, threading.Event()
    work = asyncio.ensure_future(in_thread(function, lambda: time.monotonic() < end and not left.is_set()))
    while not (await asyncio.wait({work}, timeout=0.25))[0]:
        if await request.is_disconnected():
            left.set()
    return work.result()

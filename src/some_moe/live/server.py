"""The servers behind `some watch` and `some serve`: guarded, on this machine alone unless others are let in."""

import asyncio
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from some_moe.config import ConfigError
from some_moe.errors import SomeError
from some_moe.live.answers import (
    AskedError,
    answer_error,
    answer_json,
    in_thread,
    read_body,
    stream,
    unless_left,
    wait_turn,
)  # fmt: skip
from some_moe.live.completions import Completion, UnknownModelError, list_models
from some_moe.live.desk import BusyError, Desk
from some_moe.live.guard import Guard, is_loopback
from some_moe.live.page import Page
from some_moe.live.watched import Watch
from some_moe.system.reading import clean

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Say = Callable[[str], None]
HOST, PORT = "127.0.0.1", 8421
NEEDED = "the live page needs starlette and uvicorn, which are not installed; run pip install 'some-moe[live]'"


def refuse_absent() -> None:
    """Say what to install, before anything is opened."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ConfigError(NEEDED)


def make_page(watch: Watch, *, host: str = HOST, port: int = PORT, token: str | None, device: str = "cpu") -> Guard:
    """The application of `some watch`."""
    return wrap(Page(watch, device).routes(), host, port, token, ("/", "/favicon.ico", "/static/*"))


# --- the API ----------------------------------------------------------------------------------------------------


def make_api(path: str | Path, *, host: str, port: int, token: str | None, **options: Any) -> Guard:
    """The application of `some serve`; options: checkpoint, device, base and favour, as `some_moe.load` takes them."""
    from starlette.routing import Route

    from some_moe.training.runs import load

    run, desk = load(path, **options), Desk()
    run.model  # noqa: B018 - what is wrong with it is said before anybody asks
    name = clean(run.config.name)

    async def models(_: "Request") -> "Response":
        return answer_json(list_models(run, name))

    async def complete(request: "Request") -> "Response":
        body = await read_body(request)
        try:
            asked = await in_thread(Completion, run, name, body)
        except UnknownModelError as error:
            raise AskedError(404, str(error)) from None
        await wait_turn(request, desk)
        if asked.streams:
            return stream(request, asked.stream(), desk.busy.release, "text/event-stream")
        try:
            return answer_json(await unless_left(request, asked.whole))
        finally:
            desk.busy.release()

    async def chat(_: "Request") -> "Response":
        raise AskedError(404, "this model continues text and holds no conversation; use /v1/completions")

    routes = [Route("/v1/models", models), Route("/v1/completions", complete, methods=["POST"])]
    return wrap([*routes, Route("/v1/chat/completions", chat, methods=["POST"])], host, port, token)


# --- running ------------------------------------------------------------------------------------------------------


def wrap(routes: list[Any], host: str, port: int, token: str | None, opening: tuple[str, ...] = ()) -> Guard:
    """An application with its guard before it."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException

    async def missing(request: "Request", error: Exception) -> "Response":
        status = getattr(error, "status_code", 404)
        return answer_error(request, AskedError(status, "there is no such place" if status == 404 else str(error)))

    handlers: Any = dict.fromkeys((AskedError, BusyError, SomeError, OSError, MemoryError), answer_error)
    app: Starlette = Starlette(routes=routes, exception_handlers=handlers | {HTTPException: missing})
    app.router.redirect_slashes = False
    return Guard(app, host=host, port=port, token=token, opening=opening)


def bind(host: str, port: int | None) -> socket.socket:
    """A socket at a port that is free: the one that is asked for, or the usual one, or any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (port,) if port is not None else (PORT, 0):
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen(128)  # whoever reads the address may come at once
        except (OSError, OverflowError) as error:
            found.close()
            reason = getattr(error, "strerror", None) or error
        else:
            return found
    raise ConfigError(f"port {port} of {host} cannot be used ({reason}); choose another with --port")


def address(host: str, port: int) -> str:
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"


def warn(host: str, say: Say) -> None:
    if not is_loopback(host):
        say(
            f"warning: --host {host} lets other machines in, over a connection that anybody on the way can read; "
            "whoever has the token can read these runs and use their models"
        )


def make_server(app: Guard) -> Any:
    """A uvicorn server that says nothing, and lets open streams end before it does."""
    import uvicorn

    config = uvicorn.Config(
        app, log_level="error", access_log=False, server_header=False, date_header=False, proxy_headers=False,
        lifespan="off", limit_concurrency=256, timeout_keep_alive=30, timeout_graceful_shutdown=3, http="h11",
        ws="none", loop="asyncio",
    )  # fmt: skip
    server = uvicorn.Server(config)
    app.closing = lambda: server.should_exit
    return server


def run_app(app: Guard, sockets: Sequence[socket.socket], started: Callable[[], Any] | None = None) -> None:
    """Answer until Ctrl-C."""

    async def serve() -> None:
        if started is not None:
            asyncio.get_running_loop().call_later(0.2, started)
        await make_server(app).serve(list(sockets))

    with suppress(KeyboardInterrupt):  # the usual way to end it
        asyncio.run(serve())


def watch(
    runs: Sequence[str | Path], *, host: str = HOST, port: int | None = None, browser: bool = True, device: str = "cpu",
    say: Say = print, warning: Say = print,
) -> None:  # fmt: skip
    """Show runs, or all runs below folders, as a page that follows them; say: is told its address."""
    refuse_absent()
    watched = Watch(runs)
    with bind(host, port) as listening:
        number, token = listening.getsockname()[1], secrets.token_urlsafe(24)
        warn(host, warning)
        page = f"{address(host, number)}/#{token}"  # behind '#': never sent, never logged
        say(page)
        opens = partial(webbrowser.open, page) if browser else None
        run_app(make_page(watched, host=host, port=number, token=token, device=device), [listening], opens)


def serve(
    run: str | Path, *, host: str = HOST, port: int | None = None, key: str | None = None, say: Say = print,
    warning: Say = print, **options: Any,
) -> None:  # fmt: skip
    """Answer OpenAI's completions API with a run's model. key: what clients must show; other machines always must."""
    refuse_absent()
    with bind(host, port) as listening:
        number = listening.getsockname()[1]
        if key is None and not is_loopback(host):
            key = secrets.token_urlsafe(24)
            warning(f"clients need this key: {key}")
        warn(host, warning)
        app = make_api(run, host=host, port=number, token=key, **options)
        say(f"{address(host, number)}/v1")
        run_app(app, [listening])

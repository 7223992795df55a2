"""Who may ask, and for what: all else is refused before anything of a run is looked at.

A page of another site can make a browser send requests here, and can even have its own name resolve to this machine.
So the name it was asked by, the origin and the kind of request are checked, and a token that no other page knows.
"""

import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BYTES = 1 << 16  # of a request's body
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Refusal:
    status: int
    sentence: str


class Guard:
    """Wraps the application. token: what must be shown; None lets everybody in who may ask at all."""

    def __init__(self, app: App, *, host: str, port: int, token: str | None, opening: tuple[str, ...] = ()) -> None:
        """opening: paths, and beginnings of paths with a * behind, for which no token is asked."""
        self.app, self.port, self.token, self.opening = app, port, token, opening
        self.closing: Callable[[], bool] = lambda: False  # whether the server is about to end: streams then do, too
        self.names = {*LOOPBACK}
        self.any_address = not is_loopback(host)  # an address cannot be made to mean another machine: a name can
        if self.any_address:
            self.names |= {host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        refusal = self.refuse(scope)
        if refusal is not None:
            await answer(send, refusal.status, refusal.sentence)
            return
        scope["some_moe.closing"] = self.closing
        started = False

        async def guarded(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                own = {name for name, _ in message["headers"]}
                more = ((name.encode(), value.encode()) for name, value in HEADERS.items())
                message["headers"] = [*message["headers"], *(pair for pair in more if pair[0] not in own)]
            await send(message)

        try:
            await self.app(scope, receive, guarded)
        except Exception:
            if not started:
                await answer(send, 500, "the server failed; its terminal says how")
            raise

    def refuse(self, scope: Scope) -> Refusal | None:
        """Why a request is not answered; None where it is."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        if [self.knows(host) for host in headers.get(b"host", [])] != [True]:
            return Refusal(403, "this server does not go by that name; use the address that it printed")
        for origin in headers.get(b"origin", []):
            if not origin.startswith(b"http://") or not self.knows(origin.removeprefix(b"http://")):
                return Refusal(403, "another site may not ask this server")
        for site in headers.get(b"sec-fetch-site", []):
            if site not in (b"none", b"same-origin"):
                return Refusal(403, "another site may not ask this server")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return Refusal(405, "only GET and POST are answered")
        if scope["method"] == "POST":
            return self.refuse_body(headers) or self.refuse_stranger(scope, headers)
        return self.refuse_stranger(scope, headers)

    def refuse_body(self, headers: dict[bytes, list[bytes]]) -> Refusal | None:
        """A form of another site cannot send JSON, and nobody sends much."""
        kinds = [kind.split(b";")[0].strip().lower() for kind in headers.get(b"content-type", [])]
        if kinds != [b"application/json"]:
            return Refusal(415, "send JSON, as application/json")
        sizes = headers.get(b"content-length", [])
        if len(sizes) != 1 or not sizes[0].isdigit():
            return Refusal(411, "say how long the request is (content-length)")
        if len(sizes[0]) > 9 or int(sizes[0]) > MOST_BYTES:
            return Refusal(413, f"the request is longer than the {MOST_BYTES:,} bytes that are read; send less")
        return None

    def refuse_stranger(self, scope: Scope, headers: dict[bytes, list[bytes]]) -> Refusal | None:
        path = scope["path"]
        if self.token is None or any(path.startswith(p[:-1]) if p[-1] == "*" else path == p for p in self.opening):
            return None
        shown = [*headers.get(b"x-some-token", [])]
        shown += [key.partition(b" ")[2] for key in headers.get(b"authorization", []) if key[:7].lower() == b"bearer "]
        if any(hmac.compare_digest(one, self.token.encode()) for one in shown):
            return None
        return Refusal(401, "the token is missing or not of this server; open the address that it printed")

    def knows(self, host: bytes) -> bool:
        """Whether "name:port" is this server."""
        name, _, port = host.decode("latin-1").lower().rpartition(":")
        if port != str(self.port):
            return False
        name = name.removeprefix("[").removesuffix("]")
        return name in self.names or (self.any_address and is_address(name))


async def answer(send: Send, status: int, sentence: str) -> None:
    """A refusal, as every client of ours reads it, and OpenAI's too."""
    body = json.dumps({"error": {"message": sentence, "type": "invalid_request_error", "code": status}}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **HEADERS}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or (is_address(host) and ipaddress.ip_address(host).is_loopback)

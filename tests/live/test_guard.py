"""Who may ask: every door, tried by requests of every wrong kind."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from some_moe.live.guard import HEADERS, MOST_BYTES, Guard
from tests.live.folders import Served, make_run, watching

pytest.importorskip("starlette", reason="needs the extra live")
NASTY = "<script>alert(1)<script>"
TEXT = {"text": "a cat"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "secret.txt").write_text("not for you", encoding="utf-8")
    with watching(make_run(folder / "run", name=NASTY)) as found:
        yield found


def test_the_page_itself_is_let_in(served: Served) -> None:
    status, found = served.ask("/runs")
    assert status == 200
    assert [run["name"] for run in found["runs"]] == [NASTY]
    assert served.ask("/", x_some_token=None)[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example:{port}"}, 403),
        ({"host": "127.0.0.1:1"}, 403),
        ({"host": "127.0.0.1"}, 403),
        ({"host": "localhost.evil.example:{port}"}, 403),
        ({"host": "10.0.0.1:{port}"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "https://127.0.0.1:{port}"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"x_some_token": None}, 401),
        ({"x_some_token": "another"}, 401),
        ({"x_some_token": ""}, 401),
        ({"x_some_token": "é"}, 401),
        ({"x_some_token": None, "authorization": "Bearer another"}, 401),
        ({"host": "localhost:{port}", "origin": "http://localhost:{port}", "sec_fetch_site": "same-origin"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/runs", "/events?run=99", "/runs/0/curve", "/nowhere"])
def test_wrong_names_origins_and_tokens_are_refused(
    served: Served, path: str, headers: dict[str, str | None], status: int
) -> None:
    filled = {name: value and value.format(port=served.port) for name, value in headers.items()}
    found = served.ask(path, **filled)[0]
    allowed = {"/runs": 200, "/events?run=99": 404, "/runs/0/curve": 200, "/nowhere": 404}[path]
    assert found == (allowed if status == 200 else status)


def test_a_wrong_host_does_not_even_get_the_page(served: Served) -> None:
    assert served.ask("/", host="evil.example:80")[0] == 403
    assert served.ask("/static/app.js", host="evil.example:80")[0] == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_other_methods_are_refused(served: Served, method: str) -> None:
    assert served.ask("/runs", method=method)[0] == 405


def test_a_method_that_a_place_does_not_know_is_refused(served: Served) -> None:
    assert served.ask("/runs", {}, method="POST")[0] == 405
    assert served.ask("/runs/0/trace")[0] == 405


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None])
def test_what_a_form_can_send_is_refused(served: Served, kind: str | None) -> None:
    assert served.ask("/runs/0/trace", TEXT, content_type=kind)[0] == 415


def test_what_is_too_long_is_refused_before_it_is_read(served: Served) -> None:
    assert served.ask("/runs/0/trace", raw=b" " * 10, content_length=str(MOST_BYTES + 1))[0] == 413
    assert served.ask("/runs/0/trace", raw=b"{}", content_length="1" * 30)[0] in (400, 413)
    assert served.ask("/runs/0/trace", {"text": "a" * 8_001})[0] == 413
    assert served.ask("/runs/0/trace", {"text": "a" * 30_000})[0] == 400


def test_a_body_of_unknown_length_is_refused(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        lines = ["POST /runs/0/trace HTTP/1.1", f"Host: 127.0.0.1:{served.port}", "Content-Type: application/json",
                 "Transfer-Encoding: chunked", "", "2", "{}", "0", "", ""]  # fmt: skip
        client.sendall("\r\n".join(lines).encode())
        assert client.recv(100).startswith(b"HTTP/1.1 411")


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt", "/static/../guard.py", "/static/..%2fguard.py", "/static/%2e%2e/guard.py",
        "/static//etc/passwd", "/static/%2fetc%2fpasswd", "/runs/../secret.txt", "/runs/..%2fsecret.txt/curve",
        "/runs/run/curve", "/runs/1/curve", "/runs/-1/curve", "/runs/0/../0/curve", "/runs/%00/curve", "/static/",
        "/static/index.html%00.js", "/runs/0/keys/../../secret.txt", "/static/guard.py", "//runs",
    ],
)  # fmt: skip
def test_nothing_is_found_but_by_its_whole_name(served: Served, path: str) -> None:
    status, found = served.ask(path)
    assert status in (400, 404)
    assert b"not for you" not in (found if isinstance(found, bytes) else str(found).encode())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("trace", {}),
        ("trace", []),
        ("trace", {"text": 7}),
        ("trace", {"text": "a", "favour": "nan"}),
        ("trace", {"text": "a", "forbid": [[0]]}),
        ("trace", {"text": "a", "forbid": [[0, -1]]}),
        ("trace", {"text": "a", "forbid": "all"}),
        ("trace", {"text": "a", "checkpoint": "../../etc"}),
        ("generate", {"prompt": "a", "temperature": -1}),
        ("generate", {"prompt": "a", "temperature": 11}),
        ("generate", {"prompt": "a", "top_p": 0}),
        ("generate", {"prompt": "a", "top_p": True}),
        ("generate", {"prompt": "a", "max_tokens": 0}),
        ("generate", {"prompt": "a", "max_tokens": 10**9}),
        ("generate", {"prompt": "a", "max_tokens": 1.5}),
        ("generate", {"prompt": "a", "seed": -3}),
    ],
)
def test_requests_of_another_form_are_refused_with_a_sentence(served: Served, path: str, body: Any) -> None:
    status, found = served.ask(f"/runs/0/{path}", body)
    assert status == 400
    assert found["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9007199254740993"])
@pytest.mark.parametrize("path", ["trace", "generate"])
def test_what_is_no_number_is_refused(served: Served, path: str, number: str) -> None:
    field = {"trace": "favour", "generate": "temperature"}[path]
    body = f'{{"text": "a", "prompt": "a", "{field}": {number}}}'.encode()
    assert served.ask(f"/runs/0/{path}", raw=body)[0] == 400


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 5_000, b'{"text": "\xed\xa0\x80"}', b"null"])
def test_what_is_no_json_is_refused(served: Served, body: bytes) -> None:
    assert served.ask("/runs/0/trace", raw=body)[0] == 400


@pytest.mark.parametrize("query", ["step=x", "step=-1", "step=" + "9" * 30, "step=7", "fit=11", "step=1e3"])
def test_snapshots_that_there_are_not_are_refused(served: Served, query: str) -> None:
    assert served.ask(f"/runs/0/keys?{query}")[0] in (400, 404)


@pytest.mark.parametrize("query", ["layer=2&expert=0", "layer=0&expert=6", "layer=-1", "expert=" + "9" * 40])
def test_experts_that_there_are_not_are_refused(served: Served, query: str) -> None:
    assert served.ask(f"/runs/0/expert?{query}")[0] in (400, 404)


def test_every_answer_carries_the_headers(served: Served) -> None:
    import urllib.error
    import urllib.request

    for path in ("/", "/static/app.js", "/favicon.ico", "/runs"):
        try:
            with urllib.request.urlopen(f"{served.address}{path}") as answer:
                headers = answer.headers
        except urllib.error.HTTPError as error:
            headers = error.headers
            error.close()
        assert {name: headers[name] for name in HEADERS} == HEADERS
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["server"] is None


def test_other_machines_are_let_in_by_address_and_known_names_alone() -> None:
    guard = Guard(None, host="0.0.0.0", port=80, token="t")  # type: ignore[arg-type]
    assert guard.knows(b"10.1.2.3:80")
    assert guard.knows(b"[fe80::1]:80")
    assert guard.knows(socket.gethostname().encode() + b":80")
    assert not guard.knows(b"evil.example:80")
    assert not guard.knows(b"10.1.2.3:81")
    assert not Guard(None, host="127.0.0.1", port=80, token="t").knows(b"10.1.2.3:80")  # type: ignore[arg-type]

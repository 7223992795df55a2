"""The page in a real browser: it must open and leave without a complaint, and ask nobody but its own server."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.live.folders import Served, share


@contextmanager
def opened(
    browser: Any, served: Served, place: str = "", *, width: int = 1280, scheme: str = "light", touch: bool = False,
    script: str = "", allowed: tuple[str, ...] = (),
) -> Iterator[Any]:  # fmt: skip
    """The page at a place such as "#/run/0". allowed: beginnings of complaints that are expected."""
    complaints: list[str] = []
    requests: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, has_touch=touch)
    context.set_default_timeout(share(10_000))
    page = context.new_page()
    if script:
        page.add_init_script(script)
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(served.page)
    page.locator(".link.on").wait_for()
    assert page.evaluate("location.hash") == "#/"  # the token does not stay in sight
    if place:
        page.evaluate(f"location.hash = {place!r}")
    yield page
    context.close()
    assert [one for one in complaints if not one.startswith(allowed or ("\0",))] == []
    assert [url for url in requests if not url.startswith((served.address, "data:", "blob:"))] == []


def until(page: Any, expression: str, timeout: int = 10_000) -> None:
    """Wait until something holds in the page; its policy lets no string be run as code, but for the tester's own."""
    end = time.monotonic() + share(timeout / 1000)
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"it did not come to be within {timeout} ms: {expression}"
        page.wait_for_timeout(25)

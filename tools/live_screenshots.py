"""Makes the screenshots of the live page in docs/figures/: python -m tools.live_screenshots RUNS OUT

RUNS is a folder of runs, the first of which has checkpoints and key snapshots; OUT takes live-NAME-WIDTH-SCHEME.png.
Needs a Chromium browser, playwright and the extra live.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from some_moe.system.processes import python_command, python_environment

SIZES = {1280: 860, 360: 740}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WEBGL = ("--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")  # without a graphics card
LONG = 60_000  # milliseconds: the first question loads the model


@contextmanager
def watch(runs: Path) -> Iterator[str]:
    """The address of a page that shows these runs."""
    words = python_command("-m", "some_moe", "watch", str(runs), "--no-browser", "--port", "0")
    with subprocess.Popen(words, env=python_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def see_galaxy(page: Any) -> None:
    button, classes = page.get_by_role("button", name="See experts at work"), page.locator("option[value=class]")
    button.or_(classes).first.wait_for(state="attached")
    if button.count():  # nobody has asked yet
        button.click()
    classes.wait_for(state="attached", timeout=LONG)
    page.get_by_label("colour by").select_option("community")
    page.locator(".stars").focus()
    for _ in range(40):  # the first expert that has something to show
        page.keyboard.press("]")
        page.wait_for_timeout(250)
        if page.locator("aside .quote").count() > 2:
            break


def ask_model(page: Any) -> None:
    page.get_by_role("button", name="Read it").click()
    page.locator(".token").nth(6).click(timeout=LONG)
    page.locator(".path .chip").first.click()
    page.get_by_role("button", name="Forbid it", exact=True).click()
    page.locator(".sum").nth(1).wait_for(timeout=LONG)


def wait_shortly(page: Any) -> None:
    page.wait_for_timeout(1_200)


VIEWS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "runs": ("#/", wait_shortly),
    "curves": ("#/run/0", wait_shortly),
    "galaxy": ("#/run/0/galaxy", see_galaxy),
    "ask": ("#/run/0/ask", ask_model),
}


def main(runs: Path, out: Path) -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    out.mkdir(parents=True, exist_ok=True)
    place = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with watch(runs) as address, sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=place, args=list(WEBGL))
        for name, (hash_, prepare) in VIEWS.items():
            for width, height in SIZES.items():
                for scheme in SCHEMES:
                    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                    page.goto(address)
                    page.locator(".link.on").wait_for()
                    page.evaluate(f"location.hash = {hash_!r}")
                    page.locator("main h1").wait_for()
                    prepare(page)
                    page.evaluate("window.scrollTo(0, document.querySelector('.tabs')?.offsetTop - 60 || 0)")
                    page.wait_for_timeout(700)
                    file = out / f"live-{name}-{width}-{scheme}.png"
                    page.screenshot(path=file)
                    page.close()
                    Image.open(file).convert("RGB").save(file, optimize=True)
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tools.live_screenshots RUNS OUT")
    main(Path(sys.argv[1]), Path(sys.argv[2]))

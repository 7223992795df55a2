"""The animation as a reader meets it: it plays, stops, follows an expert, and fits a phone by day and by night."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from some_moe.glass.inspect.movement import LayerMovement
from some_moe.glass.page.render import describe_movement, render_movement

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")

STILL_LAYER = 1


def make_movement(layer: int) -> LayerMovement:
    paths = np.random.default_rng(layer).standard_normal((6, 5, 2)).cumsum(0)
    if layer == STILL_LAYER:
        paths[:] = paths[0]
    return LayerMovement(
        layer=layer,
        steps=np.arange(6) * 100,
        paths=paths,
        variance=np.array([0.6, 0.3]),
        usage=np.ones((6, 5), np.float32),
        distance=np.linalg.norm(paths - paths[0], axis=-1),
        speed=np.linalg.norm(np.diff(paths, axis=0), axis=-1) / 100,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("movement") / "movement.html"
    colours = {layer: ["#440154", "#31688e", "#35b779", "#fde725", "#21918c"] for layer in (0, STILL_LAYER)}
    data = describe_movement([make_movement(0), make_movement(STILL_LAYER)], colours)
    text = render_movement("a <b>run</b>", data)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(params=[(360, "light"), (360, "dark"), (1200, "light")], ids=["phone", "phone-by-night", "desk"])
def page(browser: "playwright.Browser", place: Path, request: pytest.FixtureRequest) -> "Iterator[playwright.Page]":
    """The open page, which must neither complain nor ask anybody for anything."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 760}, color_scheme=scheme)
    opened, complaints = context.new_page(), []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda sent: None if sent.url.startswith(("file:", "data:")) else complaints.append(sent.url))
    opened.goto(place.as_uri())
    yield opened
    assert complaints == []
    context.close()


def test_the_page_fits_and_shows_the_whole_way_at_rest(page: "playwright.Page") -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.inner_text(".kicker") == "a <b>run</b>, step 0 to 500"
    assert page.inner_text("#step") == "step 500"
    assert page.locator(".expert").count() == 5
    assert len(page.get_attribute(".way", "points").split()) == 7  # six snapshots and the key itself


def test_play_runs_on_and_pause_stops(page: "playwright.Page") -> None:
    page.click("#play")
    assert page.inner_text("#play") == "Pause"
    # wait_for_function would evaluate a string again and again, which the page's own policy forbids.
    page.locator("#step:not(:text-is('step 0'))").wait_for()
    page.click("#play")
    assert page.inner_text("#play") == "Play"
    stopped = page.inner_text("#step")
    assert 0 < int(stopped.split()[1]) < 500
    page.evaluate("new Promise(requestAnimationFrame)")
    assert page.inner_text("#step") == stopped


def test_the_slider_goes_to_a_snapshot(page: "playwright.Page") -> None:
    page.locator("#time").press("Home")
    assert page.inner_text("#step") == "step 0"
    page.locator("#time").press("ArrowRight")
    assert page.inner_text("#step") == "step 100"
    assert page.get_attribute("#time", "aria-valuetext") == "step 100"


def test_an_expert_can_be_followed_and_let_go(page: "playwright.Page") -> None:
    page.locator(".reach").nth(2).click(force=True)
    chosen = page.locator(".expert.chosen")
    assert chosen.count() == 1
    assert page.inner_text("#about").startswith("Expert ")
    chosen.locator(".reach").click(force=True)
    assert page.locator(".expert.chosen").count() == 0


def test_another_layer_is_another_picture(page: "playwright.Page") -> None:
    before = page.get_attribute(".way", "points")
    page.select_option("#layer", str(STILL_LAYER))
    assert page.get_attribute(".way", "points") != before
    assert page.inner_text("#about") == "No key of this layer moved."
    page.uncheck("#trails")
    assert page.get_attribute(".way", "points") == ""

"""The pages as a reader meets them: in a browser, on a phone and on a desk, by day and by night."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from some_moe.cli import main

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")

NASTY = "<script>alert(1)</script>"
NAME = "<script>alert(1)<script>"
TEXT = f"Once upon a time there was a cat. {NASTY} The cat\nsaid: no & yes."
PAGES = ("report", "trace", "comparison")


@pytest.fixture(scope="session")
def pages(analysed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("written")
    run, twin = folder / "run", folder / "twin"
    shutil.copytree(analysed, run)
    shutil.copytree(analysed, twin)
    assert main(["report", str(run)]) == 0
    assert main(["trace", str(run), TEXT]) == 0
    assert main(["report", str(run), str(twin), "--out", str(folder / "comparison.html")]) == 0
    return {"report": run / "report.html", "trace": run / "trace.html", "comparison": folder / "comparison.html"}


@contextmanager
def opened(
    browser: "playwright.Browser", path: Path, *, width: int = 1280, scheme: str = "light", touch: bool = False
) -> Iterator["playwright.Page"]:
    """The page, which must load and leave without an error, a dialog or a request to anywhere."""
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, has_touch=touch)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    requests: list[str] = []
    page.goto(path.as_uri())
    yield page
    context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_and_show_their_figures(
    browser: "playwright.Browser", pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    with opened(browser, pages[name], width=width, scheme=scheme) as page:
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.evaluate("window.scrollTo(500, 0)")
        assert page.evaluate("window.scrollX") == 0
        figures = page.evaluate(
            "[...document.images].map(image => [image.naturalWidth, image.getBoundingClientRect().left,"
            " image.clientWidth, image.clientHeight])"
        )
        assert len(figures) >= {"report": 9, "trace": 0, "comparison": 2}[name]
        for natural, left, shown, height in figures:
            assert natural > 0
            assert left >= 0
            assert 250 <= shown <= width - left
            assert height > 100
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(part => part < 60)")
        assert dark == (scheme == "dark")


@pytest.mark.parametrize("name", PAGES)
def test_no_part_of_a_page_covers_or_leaves_the_column(
    browser: "playwright.Browser", pages: dict[str, Path], name: str
) -> None:
    with opened(browser, pages[name], width=360) as page:
        # What is wider than a phone must lie in something that scrolls on its own.
        outside = page.evaluate(
            "[...document.querySelectorAll('main *, header *')]"
            ".filter(part => part.getBoundingClientRect().right > 361 && !part.closest('.scroll, pre'))"
            ".map(part => part.outerHTML.slice(0, 80))"
        )
        assert outside == []


def test_names_and_stories_stay_text(browser: "playwright.Browser", pages: dict[str, Path]) -> None:
    with opened(browser, pages["report"]) as page:
        assert page.inner_text("h1") == NAME
        assert page.title().startswith(NAME)
        assert f"Once {NASTY} upon a time." in page.inner_text("#samples")
        assert page.locator(".card mark").first.inner_text() == NASTY
        assert page.locator(".words").first.inner_text().startswith(NASTY)
    with opened(browser, pages["trace"]) as page:
        assert NASTY in page.inner_text(".trace-text")
        assert "no & yes" in page.inner_text(".trace-text")


def test_guild_cards_carry_their_verdict_and_statistics(browser: "playwright.Browser", pages: dict[str, Path]) -> None:
    with opened(browser, pages["report"]) as page:
        cards = page.locator(".card")
        assert cards.locator(".verdict").all_inner_texts() == ["supported", "not supported"]
        row = cards.first.locator("tr", has_text="Bits about its words")
        assert row.locator("td").all_inner_texts() == ["Bits about its words", "0.1294", "0.0200", "0.002"]


def test_the_keys_move_within_the_report(browser: "playwright.Browser", pages: dict[str, Path]) -> None:
    with opened(browser, pages["report"]) as page:
        page.locator("iframe").scroll_into_view_if_needed()
        frame = page.frame_locator("iframe")
        frame.locator("circle.key").first.wait_for()
        assert frame.locator("circle.key").count() == 6


# --- the trace ----------------------------------------------------------------------------------------------


def read_tokens(page: "playwright.Page") -> list[dict[str, object]]:
    found = json.loads(page.locator("[data-trace] script").text_content() or "")
    return list(found["tokens"])


@pytest.mark.parametrize("name", ["report", "trace"])
def test_pointing_at_a_token_shows_its_path(browser: "playwright.Browser", pages: dict[str, Path], name: str) -> None:
    with opened(browser, pages[name]) as page:
        tokens = read_tokens(page)
        page.locator(".token").nth(4).hover()
        assert page.inner_text(".trace-path h4") == str(tokens[4]["text"]).strip()
        rows = page.locator(".trace-path li")
        assert rows.count() == 2
        for layer, (experts, gates) in enumerate(zip(tokens[4]["experts"], tokens[4]["gates"], strict=True)):  # type: ignore[call-overload]
            shown = rows.nth(layer).locator("button")
            expected = [f"{expert}\n{gate:.2f}" for expert, gate in zip(experts, gates, strict=True)]
            assert shown.all_inner_texts() == expected


def test_the_keyboard_walks_along_the_tokens(browser: "playwright.Browser", pages: dict[str, Path]) -> None:
    with opened(browser, pages["trace"]) as page:
        tokens = read_tokens(page)
        page.locator(".token").nth(1).focus()
        for place in (2, 3):
            page.keyboard.press("ArrowRight")
            assert page.inner_text(".trace-path h4") == str(tokens[place]["text"]).strip()
            assert page.evaluate("document.activeElement.className").startswith("token")
        page.keyboard.press("End")
        assert "The text ends here." in page.inner_text(".trace-path")
        assert page.locator(".token[tabindex='0']").count() == 1


def test_clicking_an_expert_marks_its_tokens_at_that_layer(
    browser: "playwright.Browser", pages: dict[str, Path]
) -> None:
    with opened(browser, pages["trace"]) as page:
        tokens = read_tokens(page)
        page.locator(".token").nth(2).click()
        page.locator(".trace-path li").nth(0).locator("button").first.click()
        expert = tokens[2]["experts"][0][0]  # type: ignore[index]
        using = [place for place, token in enumerate(tokens) if expert in token["experts"][0]]  # type: ignore[index]
        marked = page.evaluate(
            "[...document.querySelectorAll('.token')].flatMap((t, i) => t.classList.contains('marked') ? [i] : [])"
        )
        assert marked == using
        assert page.locator(".token.dimmed").count() == len(tokens) - len(using)
        assert f"runs for {len(using)} of {len(tokens)} tokens" in page.inner_text(".trace-status")
        assert page.locator(".trace-layers input").nth(0).is_checked()
        page.keyboard.press("Escape")
        assert page.locator(".token.marked, .token.dimmed").count() == 0


def test_the_layer_switch_colours_by_another_layer(browser: "playwright.Browser", pages: dict[str, Path]) -> None:
    with opened(browser, pages["trace"]) as page:
        hues = []
        for layer in (0, 1):
            page.locator(".trace-layers label").nth(layer).click()
            hues.append(
                page.evaluate("[...document.querySelectorAll('.token')].map(t => t.style.getPropertyValue('--hue'))")
            )
            assert f"Layer {layer}:" in page.inner_text(".trace-status")
        assert hues[0] != hues[1]


def test_a_tap_shows_the_path_within_the_screen(browser: "playwright.Browser", pages: dict[str, Path]) -> None:
    with opened(browser, pages["trace"], width=360, touch=True) as page:
        tokens = read_tokens(page)
        page.locator(".token").nth(5).tap()
        assert page.inner_text(".trace-path h4") == str(tokens[5]["text"]).strip()
        box = page.locator(".trace-path h4").bounding_box()
        assert box is not None
        assert 0 <= box["y"] <= 800

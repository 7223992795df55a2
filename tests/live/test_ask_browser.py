"""Asking a model in the browser: paths, experts taken away and put to work, text that lights experts up, branches."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.browsing import opened, until
from tests.live.folders import Served, watching

pytest.importorskip("starlette", reason="needs the extra live")
pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytestmark = [pytest.mark.browser, pytest.mark.slow]
LONG = 30_000  # the first question loads torch and the model
SENTENCE = "Once upon a time there was a cat."


@pytest.fixture(scope="module")
def grown(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny run, a twin of another seed, and what was grown on it."""
    import some_moe
    from some_moe.cli import main

    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("grown")
    patch.setenv("SOME_CACHE", str(folder / "cache"))
    shutil.copytree(trained, folder / "tiny")
    texts = [json.dumps({"text": f"The court finds that clause {n} applies. Notice in writing."}) for n in range(40)]
    (folder / "law.jsonl").write_text("\n".join(texts), encoding="utf-8")
    some_moe.grow(folder / "tiny", data=folder / "law.jsonl", out=folder / "law", steps=2, experts=4)
    some_moe.merge([folder / "law"], out=folder / "merged")
    twin = ["train", "--preset", "smoke", "--name", "twin", "--out", str(folder / "twin"), "--train.seed", "7"]
    twin += ["--data.train-subset-size", "16", "--data.val-subset-size", "6", "--train.epochs", "1"]
    assert main([*twin, "--model.vocab-size", "400"]) == 0
    patch.undo()
    return folder


@pytest.fixture(scope="module")
def served(grown: Path) -> Iterator[Served]:
    with watching(grown) as found:
        yield found


def key_of(served: Served, name: str) -> str:
    return str(next(run["id"] for run in served.ask("/runs")[1]["runs"] if run["name"] == name))


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    with opened(browser, served, f"#/run/{key_of(served, 'tiny')}/ask") as found:
        found.get_by_label("Text for the model").fill(SENTENCE)
        found.get_by_role("button", name="Read it").click()
        found.locator(".token").nth(3).wait_for(timeout=LONG)
        yield found


def says(page: Any, selector: str, text: str, timeout: int = LONG) -> None:
    until(page, f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})", timeout)


def test_each_token_has_its_path(page: Any, served: Served) -> None:
    own = served.ask(f"/runs/{key_of(served, 'tiny')}/trace", {"text": SENTENCE})[1]["trace"]
    tokens = page.locator(".token")
    assert tokens.count() == len(own["tokens"])
    tokens.nth(4).click()
    rows = page.locator(".path li")
    assert rows.count() == 2
    names = [[chip.get_attribute("aria-label") for chip in row.locator(".chip").all()] for row in rows.all()]
    shown = [[int(name.split()[1]) for name in row] for row in names]
    assert shown == own["tokens"][4]["experts"]
    assert f"{own['tokens'][3]['next_nats']:.4f} nats" in page.locator("aside").inner_text()
    says(page, ".sum", f"{own['loss']:.4f}")
    ways = page.locator(".token > i")  # under each token a bar a layer
    assert ways.count() == len(own["tokens"])
    assert ways.nth(4).evaluate("part => part.style.background.match(/rgb/g).length") >= 2
    page.get_by_label("colour by").select_option("loss")
    assert page.locator(".token > small").nth(4).inner_text() == f"{own['tokens'][3]['next_nats']:.2f}"


def test_the_keyboard_walks_along_tokens_and_an_expert_marks_its_own(page: Any, served: Served) -> None:
    own = served.ask(f"/runs/{key_of(served, 'tiny')}/trace", {"text": SENTENCE})[1]["trace"]["tokens"]
    page.locator(".token").nth(2).click()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.ariaSelected") == "true"
    page.keyboard.press("Home")
    says(page, "aside h2", "start")
    page.keyboard.press("End")
    page.locator(".token").nth(3).click()
    expert = own[3]["experts"][1][0]
    page.locator(".path li").nth(1).locator(".chip").first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.ariaLabel").startswith(f"Expert {expert} of layer 1")  # as it was
    using = [place for place, token in enumerate(own) if expert in token["experts"][1]]
    marked = page.evaluate(
        "[...document.querySelectorAll('.token')].flatMap((t, i) => t.matches('.marked') ? [i] : [])"
    )
    assert marked == using
    says(page, "aside", f"runs for {len(using)} of {len(own)} tokens")
    page.locator(".token").nth(3).focus()
    page.keyboard.press("Escape")
    assert page.locator(".token.marked").count() == 0


def test_experts_and_guilds_are_forbidden_forced_and_let_go(page: Any) -> None:
    page.locator(".token").nth(3).click()
    page.locator(".path li").first.locator(".chip").first.click()
    page.get_by_role("button", name="Forbid it").click()
    says(page, "main", "forbidden ✕")
    until(page, "document.querySelectorAll('.sum').length === 2")
    assert page.locator(".chip.new").count() >= 1
    assert page.get_by_label("colour by").input_value() == "change"
    changes = page.locator(".token > small").all_inner_texts()[1:]
    assert all(text == "·" or text[0] in "+−" for text in changes)
    assert set(changes) != {"·"}
    page.get_by_role("button", name="Force it").click()
    says(page, "main", "forced ✕")
    assert page.get_by_role("button", name="Take back").count() == 1  # instead: it cannot be both
    page.get_by_role("button", name="Take back").click()
    until(page, "document.querySelectorAll('.sum').length === 1")
    page.get_by_role("button", name="Find its guild").click()
    page.get_by_role("button", name="Force its guild").wait_for(timeout=LONG)
    page.get_by_role("button", name="Forbid its guild").click()
    until(page, "/guild of|a token needs/.test(document.querySelector('main').innerText)", LONG)


def test_two_checkpoints_and_two_runs_are_compared(page: Any) -> None:
    choice = page.get_by_label("compare with")
    first = next(text for text in choice.locator("option").all_inner_texts() if "tiny, step" in text)
    choice.select_option(label=first)
    until(page, "document.querySelectorAll('.sum').length === 2", LONG)
    assert page.get_by_label("colour by").input_value() == "beside"
    says(page, "aside", "tiny, step ")
    page.locator(".path .chip").first.click()
    page.get_by_role("button", name="Forbid it").click()  # both at once: which is meant is chosen
    until(page, "document.querySelectorAll('.sum').length === 3", LONG)
    ways = page.get_by_label("colour by").locator("option").evaluate_all("all => all.map((one) => one.value)")
    assert ways == ["expert", "loss", "change", "beside"]
    page.get_by_label("colour by").select_option("change")
    says(page, "aside", " Now ")
    page.get_by_role("button", name="Take back").click()
    until(page, "document.querySelectorAll('.sum').length === 2", LONG)
    choice.select_option(label="twin, best")
    says(page, "main", "it cuts words otherwise")
    assert page.locator(".tokens").count() == 2
    choice.select_option(label="nothing")
    until(page, "document.querySelectorAll('.sum').length === 1")


def test_text_is_written_while_experts_light_up(page: Any) -> None:
    page.get_by_label("tokens", exact=True).fill("40")
    page.get_by_role("button", name="Continue it").click()
    says(page, ".story", SENTENCE)
    until(page, "/^\\d+ tokens, seed \\d+$/.test(document.querySelector('section small.note').innerText)")
    until(page, "document.querySelector('.story').getAttribute('aria-busy') === 'false'", LONG)
    assert page.locator(".library canvas").count() == 2
    assert "experts have worked" in page.locator(".library canvas").first.get_attribute("aria-label")
    assert len(page.locator(".story").inner_text()) > len(SENTENCE)


def test_the_focus_stays_where_the_keyboard_left_it(page: Any) -> None:
    focus = "document.activeElement.innerText"
    page.get_by_role("button", name="Read it").press("Enter")
    until(page, f"{focus} === 'Read it' && !document.activeElement.disabled", LONG)
    page.get_by_label("tokens", exact=True).fill("300")
    page.get_by_role("button", name="Continue it").press("Enter")
    until(page, f"{focus} === 'Stop'", LONG)
    page.keyboard.press("Enter")
    until(page, f"{focus} === 'Continue it'", LONG)


def test_writing_can_be_stopped(page: Any) -> None:
    page.get_by_label("tokens", exact=True).fill("1000")
    page.get_by_label("temperature").fill("3")
    page.get_by_role("button", name="Continue it").click()
    until(page, "document.querySelector('section small.note')?.innerText.includes('tokens')")
    page.get_by_role("button", name="Stop").click()
    until(page, "document.querySelector('.story').getAttribute('aria-busy') === 'false'")
    page.wait_for_timeout(300)
    page.get_by_role("button", name="Read it").click()
    until(page, "!document.querySelector('.first').disabled")


def test_what_is_refused_is_said(browser: Any, served: Served) -> None:
    place = f"#/run/{key_of(served, 'tiny')}/ask"
    with opened(browser, served, place, allowed=("error: Failed to load resource",)) as page:
        page.get_by_label("Text for the model").fill("   ")
        page.get_by_role("button", name="Read it").click()
        says(page, ".note.bad", "empty")


def test_the_galaxy_is_coloured_by_what_experts_do(browser: Any, served: Served) -> None:
    with opened(browser, served, f"#/run/{key_of(served, 'tiny')}/galaxy") as page:
        page.get_by_role("button", name="See experts at work").click()
        page.get_by_label("colour by").locator("option[value=class]").wait_for(state="attached", timeout=LONG)
        says(page, ".legend", "community 1")
        page.get_by_label("colour by").select_option("class")
        until(page, "/noun|verb|other|determiner|adjective/.test(document.querySelector('.legend').innerText)")
        page.locator(".stars").focus()
        for _ in range(12):
            page.keyboard.press("]")
            page.wait_for_timeout(250)
            if page.locator("aside .words").count():
                break
        assert page.locator("aside .quote mark").count() > 0


def test_branches_share_a_text_and_the_favour_moves_it(browser: Any, served: Served) -> None:
    with opened(browser, served, f"#/run/{key_of(served, 'law')}/branches") as page:
        says(page, ".lead", "law (4 experts a layer)")
        page.get_by_label("Text to share out").fill(
            "Mia and her dog went to the pond. The court finds that the clause applies."
        )
        page.get_by_role("button", name="Share it out").click()
        says(page, ".legend", "base")
        before = page.locator(".shares").get_attribute("aria-label")
        share = "parseFloat(document.querySelector('.shares').ariaLabel.split('law ')[1])"
        own = page.evaluate(share)
        assert 10 < own < 90
        page.get_by_label("favour", exact=True).fill("6")
        until(page, f"{share} > {own} + 5", LONG)
        page.get_by_label("favour", exact=True).fill("-30")
        until(page, f"{share} < {own} - 5", LONG)
        page.get_by_role("button", name="Back to the run's own").click()
        until(page, f"document.querySelector('.shares').ariaLabel === {json.dumps(before)}", LONG)
        page.evaluate("location.hash = location.hash.replace('branches', 'galaxy')")
        page.get_by_label("colour by").select_option("branch")
        says(page, ".legend", "law (8)")


def test_a_merged_run_opens_with_its_branches(browser: Any, served: Served) -> None:
    with opened(browser, served, f"#/run/{key_of(served, 'merged')}") as page:
        says(page, ".lead", "Merged on step")
        assert page.locator(".tabs a").all_inner_texts() == ["Galaxy", "Ask the model", "Branches", "Settings"]
        page.get_by_role("button", name="Share it out").click()
        says(page, ".legend", "law")
        page.get_by_label("favour", exact=True).fill("6")
        says(page, ".sum", "beside the run's own favour")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_asking_fits_its_screen(browser: Any, served: Served, width: int, scheme: str) -> None:
    for name, tab, button in (("tiny", "ask", "Read it"), ("law", "branches", "Share it out")):
        with opened(browser, served, f"#/run/{key_of(served, name)}/{tab}", width=width, scheme=scheme) as page:
            page.get_by_role("button", name=button).click()
            page.locator(".token").nth(2).wait_for(timeout=LONG)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            nameless = page.evaluate(
                "[...document.querySelectorAll('button, a, input, select, textarea, [role=img]')]"
                ".filter(part => part.checkVisibility() && !(part.ariaLabel || part.innerText?.trim() ||"
                " part.labels?.[0]?.innerText.trim())).map(part => part.outerHTML.slice(0, 90))"
            )
            assert nameless == []

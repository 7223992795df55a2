"""The page as a reader meets it: runs that grow, end, are cut back and vanish while somebody looks."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.live.browsing import opened, until
from tests.live.folders import Served, append, evaluation_line, make_run, share, step_line, watching, write_keys

pytest.importorskip("starlette", reason="needs the extra live")
pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytestmark = pytest.mark.browser
NASTY = "<script>alert(1)<script>"
SOON = 2_000  # milliseconds in which a page must show what was written
STEP = ".figure >> nth=0 >> dd"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four runs, each in another state, one with a name that tries to be a script."""
    runs = tmp_path / "runs"
    make_run(runs / "alpha", name=NASTY, layers=3, **{"gravity.respawn_below": 0.1})
    done = make_run(runs / "beta", name="beta", experiment="A1", **{"train.learning_rate": 0.123})
    result = {"status": "finished", "steps": 20, "val_loss": 4.4, "test_loss": 4.3}
    (done / "result.json").write_text(json.dumps(result), encoding="utf-8")
    append(done, "metrics.jsonl", evaluation_line(21, 2, 4.4))
    dead = make_run(runs / "gamma", name="gamma")
    for file in ("config.yaml", "metrics.jsonl"):
        os.utime(dead / file, (1, 1))
    (runs / "queue.json").write_text(
        json.dumps(
            {"jobs": [{"name": "alpha", "state": "running"}, {"name": "delta", "state": "failed", "reason": NASTY}]}
        )
    )
    append(runs / "alpha", "samples.jsonl", json.dumps({"step": 20, "text": f"Once {NASTY} upon\na time."}) + "\n")
    return runs


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with watching(folder) as found:
        yield found


def expect(page: Any, selector: str, text: str, timeout: int = SOON) -> None:
    """Wait until the first such element says something."""
    until(page, f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})", timeout)


def test_the_page_follows_a_run(browser: Any, served: Served, folder: Path) -> None:
    path = folder / "alpha"
    with opened(browser, served, "#/run/0") as page:
        expect(page, "h1", NASTY)
        assert page.title().startswith(NASTY)
        expect(page, ".figure dd", "20")
        append(path, "metrics.jsonl", step_line(21))
        expect(page, ".figure dd", "21")
        append(path, "metrics.jsonl", step_line(22)[:40])  # half a line waits
        append(path, "metrics.jsonl", step_line(22)[40:] + evaluation_line(22, 3, 3.3333))
        expect(page, "dl", "3.3333")
        until(page, "document.querySelector('.wide canvas').ariaLabel.includes('validation 3.3333')", SOON)
        (path / "metrics.jsonl").write_text("".join(map(step_line, range(1, 8))), encoding="utf-8")  # cut back
        expect(page, ".figure dd", "7")
        until(page, "!document.querySelector('.wide canvas').ariaLabel.includes('validation')", SOON)
        (path / "result.json").write_text(json.dumps({"status": "finished", "steps": 7}), encoding="utf-8")
        expect(page, ".badge", "finished")
        shutil.move(path, path.with_name("moved"))
        expect(page, ".badge", "gone")
        expect(page, "main", "the folder is gone")


@pytest.mark.slow
def test_a_run_that_dies_is_shown_dead(browser: Any, served: Served, folder: Path) -> None:
    with opened(browser, served, "#/run/0") as page:
        expect(page, ".badge", "training")
        for file in ("config.yaml", "metrics.jsonl"):
            os.utime(folder / "alpha" / file, (1, 1))
        expect(page, ".badge", "killed")


@pytest.mark.slow
def test_runs_are_listed_searched_filtered_and_drawn_together(browser: Any, served: Served, folder: Path) -> None:
    with opened(browser, served) as page:
        rows = page.locator(".run")
        rows.nth(2).wait_for()
        assert rows.locator(".badge").all_inner_texts() == ["training", "finished", "killed"]
        assert rows.nth(0).locator("a").inner_text() == NASTY
        expect(page, ".lead", "3 watched: 1 training, 1 finished, 1 killed.")
        expect(page, ".panel .legend", "1 running")
        expect(page, ".panel .legend", "of 2 jobs")
        assert NASTY in page.locator(".note.bad").inner_text()
        chart = page.get_by_role("img", name="Loss")
        until(page, "document.querySelector('.chart canvas').ariaLabel.includes('gamma')")
        names = page.locator(".keys li")
        assert names.count() == 3
        page.get_by_label("Show gamma on the chart").uncheck()
        until(page, "document.querySelectorAll('.keys li').length == 2")
        page.get_by_role("button", name="training", exact=True).first.click()
        until(page, "document.querySelector('.chart canvas').ariaLabel.includes('4.8')")
        assert chart.count() == 1
        append(folder / "alpha", "metrics.jsonl", step_line(21, loss=3.25))
        until(page, "document.querySelector('.chart canvas').ariaLabel.includes('3.25')", SOON)
        append(folder / "alpha", "metrics.jsonl", step_line(22, loss=3.125))  # also what comes just after
        until(page, "document.querySelector('.chart canvas').ariaLabel.includes('3.125')", SOON)
        page.get_by_label("Search runs").fill("BETA")
        assert rows.count() == 1
        page.get_by_label("Search runs").fill("")
        page.get_by_role("group", name="Show runs that are").get_by_role("button", name="killed").click()
        assert rows.locator("a").all_inner_texts() == ["gamma"]
        page.get_by_label("Search runs").fill("nothing like it")
        expect(page, ".empty", "No run is like that.")
        page.get_by_role("group", name="Show runs that are").get_by_role("button", name="all").click()
        page.get_by_label("Search runs").fill("")
        make_run(folder / "epsilon", name="epsilon")
        page.locator(".run", has_text="epsilon").wait_for(timeout=share(SOON + 1_000))
        page.get_by_role("link", name="beta").click()
        expect(page, "h1", "beta")


@pytest.mark.slow
def test_a_sweep_shows_how_far_it_is_and_its_best_trial(browser: Any, tmp_path: Path) -> None:
    for trial in range(2):
        make_run(tmp_path / "lr" / f"trial-000{trial}", name=f"trial-000{trial}")
    best = {"name": "trial-0000", "state": "done", "value": 4.4321, "settings": {"train.learning_rate": NASTY}}
    told = {"metric": "best_val_loss", "trials": [best], "best": best}
    (tmp_path / "lr" / "space.json").write_text(json.dumps({"sweep": {"trials": 5}}), encoding="utf-8")
    with watching(tmp_path / "lr") as served, opened(browser, served) as page:
        expect(page, ".panel .legend", "of 5 trials")
        (tmp_path / "lr" / "sweep.json").write_text(json.dumps(told), encoding="utf-8")
        expect(page, ".panel .legend", "1 done")
        expect(page, ".panel .legend", "4 waiting")
        assert page.locator(".queue i.done").evaluate("part => part.style.width") == "20%"
        expect(page, "section .note", f"trial-0000, best val loss 4.4321 with train.learning_rate {NASTY}")
        page.locator("section").get_by_role("link", name="trial-0000").click()
        expect(page, "h1", "trial-0000")


@pytest.mark.slow
def test_what_trains_comes_first_and_is_seen_although_it_was_never_measured(
    browser: Any, served: Served, folder: Path
) -> None:
    fresh = make_run(folder / "zeta", name="zeta")
    (fresh / "metrics.jsonl").write_text("".join(map(step_line, range(1, 9))), encoding="utf-8")
    (folder / "alpha" / "result.json").write_text(json.dumps({"status": "finished", "steps": 20}), encoding="utf-8")
    with opened(browser, served) as page:
        page.locator(".run", has_text="zeta").wait_for()
        until(page, "document.querySelector('.run a').innerText === 'zeta'")
        until(page, "document.querySelector('.chart canvas').ariaLabel.includes('zeta 4.92')")
        page.get_by_role("button", name="validation").click()
        until(page, "!document.querySelector('.chart canvas').ariaLabel.includes('zeta')")


@pytest.mark.slow
def test_charts_are_read_zoomed_and_thinned_by_keyboard_and_pointer(browser: Any, served: Served) -> None:
    with opened(browser, served, "#/run/1") as page:
        expect(page, "h1", "beta")
        canvas = page.locator(".wide canvas")
        until(page, "document.querySelector('.wide canvas').ariaLabel.includes('training')")
        assert "published" in canvas.get_attribute("aria-label")  # beta repeats A1
        canvas.focus()
        page.keyboard.press("Home")
        expect(page, ".wide .at", "step 1")
        page.keyboard.press("ArrowRight")
        expect(page, ".wide .at", "step 2")
        assert "step 2: training 4.98" in page.locator(".wide .hush[aria-live]").text_content()
        page.keyboard.press("+")
        page.keyboard.press("End")
        page.keyboard.press("Escape")
        box = canvas.bounding_box()
        page.mouse.move(box["x"] + 300, box["y"] + 80)
        page.mouse.down()
        page.mouse.move(box["x"] + 600, box["y"] + 80)
        page.mouse.up()
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
        expect(page, ".wide .at", "zoomed")
        canvas.dblclick()
        page.mouse.move(0, 0)
        until(page, "!document.querySelector('.wide .at').innerText.includes('zoomed')")
        page.locator(".wide .keys button").first.click()
        until(page, "!document.querySelector('.wide canvas').ariaLabel.includes('training')")
        page.locator(".wide button", has_text="log").click()
        assert page.locator(".wide button", has_text="log").get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_samples_and_settings(browser: Any, served: Served, folder: Path) -> None:
    with opened(browser, served, "#/run/0/samples") as page:
        expect(page, ".samples", f"Once {NASTY} upon")
        append(folder / "alpha", "samples.jsonl", json.dumps({"step": 40, "text": "The newest."}) + "\n")
        expect(page, ".samples li", "The newest.")
        page.evaluate("location.hash = '#/run/0/settings'")
        page.get_by_label("compare with").select_option(label="beta")
        page.locator("tr.differs", has_text="train.learning_rate").wait_for()
        assert "0.123" in page.locator("tr.differs", has_text="train.learning_rate").inner_text()
        page.get_by_label("only what differs").check()
        differing = page.locator("tbody tr").count()
        assert 2 <= differing <= 8
        page.get_by_label("Search settings").fill("learning")
        assert page.locator("tbody tr").count() == 1


def test_a_tab_without_the_token_is_told_so(browser: Any, served: Served) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(served.address)
    expect(page, "main", "This tab has no access", 5_000)
    context.close()


# --- the galaxy ---------------------------------------------------------------------------------------------------

VIEW = "document.querySelector('.galaxy').view"


def picture(page: Any) -> bytes:
    until(page, f"{VIEW}.t >= 1 && !{VIEW}.waiting")
    return bytes(page.locator(".stars").screenshot())


def colours(image: bytes) -> int:
    import io

    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"), np.int64)
    return len(np.unique(pixels @ (1, 256, 65_536)))


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True], ids=["webgl", "without webgl"])
def test_keys_move_and_are_pointed_at(browser: Any, served: Served, flat: bool) -> None:
    without = (
        "const old = HTMLCanvasElement.prototype.getContext; HTMLCanvasElement.prototype.getContext ="
        " function (kind, ...rest) { return kind === 'webgl2' ? null : old.call(this, kind, ...rest); }"
    )
    with opened(browser, served, "#/run/0/galaxy", script=without if flat else "") as page:
        until(page, f"document.querySelector('.galaxy') && {VIEW}.stars.after")
        assert page.evaluate(f"!!{VIEW}.stars.gl") != flat
        last = picture(page)
        assert colours(last) > 20
        expect(page, "output", "step 20")
        slider = page.get_by_label("Snapshot")
        slider.fill("0")
        expect(page, "output", "step 0")
        assert picture(page) != last
        assert not page.get_by_label("newest").is_checked()
        slider.fill("2")
        until(page, f"({VIEW}.stars.segments || 0) === {0 if flat else 2}")  # tails as long as there are snapshots
        with_tails = picture(page)
        page.evaluate(f"{VIEW}.stars.trace([]); {VIEW}.draw()")
        assert (picture(page) == with_tails) == flat
        slider.fill("0")
        expect(page, "output", "step 0")
        place = page.evaluate(f"{VIEW}.where(1, 4)")
        box = page.locator(".stars").bounding_box()
        page.mouse.move(box["x"] + place[0], box["y"] + place[1])
        expect(page, "aside h2", "Expert 4, layer 1")
        expect(page, "aside", "Nearest keys")
        expect(page, "aside", "a fair share of the load at step 0")  # of the snapshot that is shown
        assert "Load over time" in page.locator("aside").inner_text()
        page.mouse.click(box["x"] + place[0], box["y"] + place[1])
        page.mouse.move(box["x"] + 2, box["y"] + 2)
        expect(page, "aside h2", "Expert 4, layer 1")  # pinned
        slider.fill("1")
        expect(page, "aside", "a fair share of the load at step 10")
        page.locator("aside .chip").first.click()
        until(page, "!document.querySelector('aside h2').innerText.includes('Expert 4,')")
        page.get_by_role("button", name="let go").click()
        expect(page, "aside h2", "Point at a key")


@pytest.mark.slow
def test_the_galaxy_by_keyboard_wheel_and_hand(browser: Any, served: Served) -> None:
    with opened(browser, served, "#/run/0/galaxy") as page:
        until(page, f"document.querySelector('.galaxy') && {VIEW}.stars.after")
        stars = page.locator(".stars")
        stars.focus()
        page.keyboard.press("]")
        expect(page, "aside h2", "Expert 0, layer 0")
        page.keyboard.press("[")
        expect(page, "aside h2", "Expert 5, layer 2")
        assert "expert 5 of layer 2" in stars.get_attribute("aria-label")
        page.keyboard.press("Escape")
        expect(page, "aside h2", "Point at a key")
        page.keyboard.press("+")
        page.keyboard.press("ArrowLeft")
        assert page.evaluate(f"[{VIEW}.zoom, {VIEW}.pan[0] > 0]") == [1.25, True]
        page.keyboard.press("0")
        assert page.evaluate(f"[{VIEW}.zoom, {VIEW}.pan]") == [1, [0, 0]]
        box = stars.bounding_box()
        page.mouse.move(box["x"] + 100, box["y"] + 100)
        page.mouse.wheel(0, -120)
        until(page, f"{VIEW}.zoom > 1.2")
        page.mouse.down()
        page.mouse.move(box["x"] + 150, box["y"] + 120)
        page.mouse.up()
        stars.dblclick(position={"x": 5, "y": 5})
        assert page.evaluate(f"{VIEW}.zoom") == 1
        page.keyboard.press(",")
        expect(page, "output", "step 10")
        page.keyboard.press(".")
        expect(page, "output", "step 20")
        page.keyboard.press(" ")
        expect(page, "output", "step 0")
        until(page, "document.querySelector('.time button').innerText === 'Play'", 8_000)
        expect(page, "output", "step 20")
        page.get_by_label("layer", exact=True).select_option("1")
        assert page.evaluate(f"{VIEW}.cells().length") == 1
        page.get_by_label("colour by").select_option("layer")
        expect(page, ".legend", "layer 2")
        page.get_by_role("button", name="Fit the map to now").click()


@pytest.mark.slow
def test_new_snapshots_are_followed_and_respawns_flash(browser: Any, served: Served, folder: Path) -> None:
    with opened(browser, served, "#/run/0/galaxy", allowed=("error: Failed to load resource",)) as page:
        until(page, f"document.querySelector('.galaxy') && {VIEW}.stars.after")
        expect(page, ".legend", "respawned")
        write_keys(folder / "alpha", 30, 3, 6, 8, shift=0.2)
        expect(page, "output", "step 30")
        assert page.evaluate(f"{VIEW}.stars.after.filter((_, i) => i % 4 === 3).reduce((a, b) => a + b)") == 0
        from safetensors.numpy import load_file, save_file

        keys = load_file(folder / "alpha" / "keys" / "step-30.safetensors")
        keys["1.keys"][2] *= -1
        save_file(keys, folder / "alpha" / "keys" / "step-40.safetensors")
        expect(page, "output", "step 40")
        until(page, f"{VIEW}.stars.after[4 * (6 + 2) + 3] === 1")
        (folder / "alpha" / "keys" / "step-50.safetensors").write_bytes(b"damaged")
        expect(page, ".galaxy .note", "damaged, or gone")


@pytest.mark.slow
def test_many_keys_are_drawn_smoothly(browser: Any, tmp_path: Path) -> None:
    """32,768 points: a frame a tenth of a second even without a graphics card."""
    run = make_run(tmp_path / "run", layers=8, experts=4096, width=16, snapshots=(0, 10))
    with watching(run) as served, opened(browser, served, "#/run/0/galaxy") as page:
        until(page, f"document.querySelector('.galaxy') && {VIEW}.stars.after", 20_000)
        assert page.evaluate(f"{VIEW}.stars.after.length") == 4 * 32_768
        milliseconds = page.evaluate(  # reading a pixel waits for the drawing; the quickest counts, as cores are shared
            f"(() => {{ const view = {VIEW}, gl = view.stars.gl, spent = [];"
            " for (let i = 0; i < 30; i++) { const begin = performance.now(); view.zoom = 1 + i / 100; view.render();"
            " view.find(100, 100); gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4));"
            " spent.push(performance.now() - begin); } return Math.min(...spent); })()"
        )
        assert milliseconds < share(100)


# --- what holds everywhere ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_view_fits_its_screen(browser: Any, served: Served, width: int, scheme: str) -> None:
    with opened(browser, served, width=width, scheme=scheme, touch=width == 360) as page:
        for place in ("#/", "#/run/0", "#/run/0/galaxy", "#/run/0/samples", "#/run/0/settings"):
            page.evaluate(f"location.hash = {place!r}")
            page.locator("main h1").wait_for()
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, place
            outside = page.evaluate(
                "[...document.querySelectorAll('main *')]"
                ".filter(part => part.checkVisibility() && !part.closest('.scroll, .tabs, .hush')"
                f" && part.getBoundingClientRect().right > {width} + 1).map(part => part.outerHTML.slice(0, 90))"
            )
            assert outside == [], place
            is_dark = page.evaluate(
                "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(part => part < 60)"
            )
            assert is_dark == (scheme == "dark")


@pytest.mark.slow
def test_everything_that_can_be_used_has_a_name_and_can_be_reached_by_keys(browser: Any, served: Served) -> None:
    with opened(browser, served) as page:
        for place in ("#/", "#/run/0", "#/run/0/galaxy", "#/run/0/settings"):
            page.evaluate(f"location.hash = {place!r}")
            page.locator("main h1").wait_for()
            page.wait_for_timeout(300)
            nameless = page.evaluate(
                "[...document.querySelectorAll('button, a, input, select, textarea, canvas[tabindex], [role=img]')]"
                ".filter(part => part.checkVisibility() && !(part.ariaLabel || part.innerText?.trim() ||"
                " part.labels?.[0]?.innerText.trim() || part.getAttribute('aria-hidden')))"
                ".map(part => part.outerHTML.slice(0, 90))"
            )
            assert nameless == [], place
            reached = set()
            for _ in range(60):
                page.keyboard.press("Tab")
                reached.add(page.evaluate("document.activeElement.tagName"))
            assert {"A", "CANVAS"} <= reached or place == "#/run/0/settings", place
        page.get_by_role("link", name="Galaxy").focus()
        page.keyboard.press("Enter")
        page.locator(".galaxy").wait_for()
        assert page.evaluate("document.activeElement.innerText") == "Galaxy"


@pytest.mark.slow
def test_contrast_of_text_is_enough(browser: Any, served: Served) -> None:
    """WCAG AA, 4.5 to 1, for every colour that text has on the grounds it stands on."""
    on_grounds = [(ink, ground) for ink in ("ink", "soft", "faint", "accent") for ground in ("paper", "raised")]
    washes = [(name, f"{name}-wash") for name in ("good", "bad", "warm", "accent")]
    pairs = [*on_grounds, *washes, ("soft", "sunk"), ("on-accent", "accent")]

    def luminance(page: Any, name: str) -> float:
        code = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
        shares = [int(code[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for scheme in ("light", "dark"):
        with opened(browser, served, scheme=scheme) as page:
            for pair in pairs:
                dim, bright = sorted(luminance(page, name) for name in pair)
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, (scheme, pair)

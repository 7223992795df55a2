"""The documentation site: every page is on it, every link leads somewhere, and it is made without a network."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import some_moe
from some_moe import __all__ as public
from some_moe.config import RunConfig
from tools import site

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    site.stage(out)
    return out


def test_every_document_and_example_is_a_page_with_its_place_in_the_contents(staged: Path) -> None:
    contents = (staged / "zensical.toml").read_text(encoding="utf-8")
    pages = {path.relative_to(staged / "docs").as_posix() for path in (staged / "docs").rglob("*.md")}
    pages = {page for page in pages if not page.startswith("files/")}
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name in pages
    for path in (ROOT / "examples").rglob("*.py"):
        assert f"examples/{path.stem}.md" in pages
    assert all(f'"{page}"' in contents for page in pages)
    assert {"index.md", "reference/python.md", "reference/settings.md", "reference/cli.md"} <= pages


def test_every_link_of_the_sources_leads_to_a_file(staged: Path) -> None:
    docs, links = staged / "docs", 0
    for path in docs.rglob("*.md"):
        if path.is_relative_to(docs / "files"):
            continue
        text = site.FENCE.sub("", path.read_text(encoding="utf-8"))
        for _, target, _ in site.LINK.findall(text):
            links += 1
            place = target.partition("#")[0]
            assert re.match(r"[a-z]+:", target) or not place or (path.parent / place).is_file(), (path.name, target)
    assert links > 100


def test_the_reference_has_every_public_name_setting_and_command(staged: Path) -> None:
    reference = staged / "docs" / "reference"
    python, settings = ((reference / f"{name}.md").read_text(encoding="utf-8") for name in ("python", "settings"))
    assert all(f"## some_moe.{name}\n" in python for name in public if not name.endswith("Config"))
    assert "def " not in re.sub(r"```.*?```", "", python, flags=re.DOTALL)
    assert all(f"`{name}`" in settings for name in RunConfig.field_names() if "." in name)
    assert "usage: some experiments run" in (reference / "cli.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in public if not name.endswith("Config")])
def test_the_docstring_of_every_public_name_tells_each_of_its_parameters(name: str) -> None:
    found = getattr(some_moe, name)
    told = f"{found.__doc__} {found.__init__.__doc__ if isinstance(found, type) else ''}"
    missing = [one for one in inspect.signature(found).parameters if not re.search(rf"\b{one}\b", told)]
    assert not missing


def test_a_reference_lists_parameters_and_hides_where_things_lie_in_memory(staged: Path) -> None:
    def save(out: str, *, steps: int = 3, say: Callable[[str], None] = print) -> None:
        """Save it.

        out: the folder; it is made. steps, say: how many,
        and who is told.
        """

    shown = "\n".join(site.describe_object("x.save", save))
    assert "save(out: str, *, steps: int = 3, say: Callable[[str], None] = …) -> None" in shown
    assert shown.endswith("\n- `out`: the folder; it is made.\n- `steps, say`: how many, and who is told.")
    python = (staged / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert " at 0x" not in python
    assert "Run.result: dict[str, Any] | None\n" in python
    assert "    keys: np.ndarray  # (E, D) float32\n" in python


def test_lists_within_lists_stay_there_and_code_is_left_alone() -> None:
    text = "1. a\n   - b\n- c\n  - d\n\n```\n  - e\n```\n"
    assert site.rewrite_links(text, "README.md", {"README.md": "index.md"}, set()) == (
        "1. a\n    - b\n- c\n    - d\n\n```\n  - e\n```\n"
    )


def test_formulas_need_no_script() -> None:
    page = r'<p><span class="arithmatex">\(a_i &lt; \beta\)</span> and <div class="arithmatex">\[x\]</div></p>'
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed: pip install 'some-moe[docs]'")
    drawn = site.draw_formulas(page)
    assert drawn.count("<math") == 2
    assert "<msub><mi>a</mi><mi>i</mi></msub>" in drawn
    assert "\\" not in drawn
    assert site.draw_formulas("<p>none</p>") == "<p>none</p>"


def test_dead_links_lost_places_and_things_from_elsewhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html#x">1</a><a href="c.html">2</a><a href="#top">3</a><a href="#no">4</a>'
        '<script src="https://example.org/x.js"></script><a href="https://example.org">5</a><img src="d.png">'
    )
    (tmp_path / "b.html").write_text('<p id="y">')
    found = "\n".join(site.find_dead_links(tmp_path))
    assert "a.html links to b.html#x, where there is no such place" in found
    assert "a.html links to c.html, which is not there" in found
    assert "a.html links to #no, where there is no such place" in found
    assert "a.html loads https://example.org/x.js" in found
    assert "a.html links to d.png, which is not there" in found
    assert found.count("\n") == 4


@pytest.mark.slow
def test_the_site_is_built_without_a_network_and_has_no_dead_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zensical", reason="zensical is not installed: pip install 'some-moe[docs]'")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    assert site.main(["--out", str(tmp_path)]) == 0, capsys.readouterr().err
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 25
    assert "Knowledge gravity" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    gravity = (tmp_path / "site" / "gravity.html").read_text(encoding="utf-8")
    assert gravity.count("<math") > 40
    assert "arithmatex" not in gravity

"""A stranger's run folder can do no harm: nothing of it runs, nothing leaves it, and what is damaged is left out."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from some_moe.cli import main
from some_moe.config import RunConfig
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.runs import read_run
from some_moe.glass.page.inside import list_missing, read_analysis
from some_moe.glass.page.markdown import render_markdown
from some_moe.glass.page.pages import make_page
from some_moe.glass.page.render import render_page
from some_moe.system.processes import python_command, python_environment

SECRET = "canary-7f3a"
PARTS = ("analysis.json", "guilds.json", "movement.json", "collected.safetensors", "movement.html")
PAGES = ("report.html", "report.md", "trace.html")
COMMANDS = (
    ["report", "."],
    ["report", ".", "--no-analyze"],
    ["analyze", ".", "--no-guilds"],
    ["trace", ".", "The cat"],
)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Files of the reader's that must neither be shown nor change: whatever they are taken for, they would fit."""
    folder = tmp_path / "home"
    (folder / "figures").mkdir(parents=True)
    for name in ("text", "figures/loss.png"):
        (folder / name).write_text(SECRET)
    return folder


def states(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_kept(folder: Path, before: dict[str, bytes], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The canary is as it was, and no page and no line of the terminal tells of it."""
    assert states(folder) == before
    printed = capsys.readouterr()
    written = [run / name for name in PAGES if (run / name).is_file() and not (run / name).is_symlink()]
    for text in (printed.out, printed.err, *(page.read_text(encoding="utf-8") for page in written)):
        assert SECRET not in text
        assert "Y2FuYXJ5LTdmM2" not in text  # as base64, in which figures are
    assert "Traceback" not in printed.err


def damage(run: Path, kind: str, canary: Path) -> None:
    if kind == "links to a file":
        for name in (*(f"analysis/{part}" for part in PARTS), *PAGES, "keys/step-2.safetensors"):
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(canary / "text")
        for figure in (run / "analysis" / "figures").iterdir():
            figure.unlink()
            figure.symlink_to(canary / "text")
    elif kind == "links to a folder":
        for name in ("analysis", "report-figures", "keys"):
            shutil.rmtree(run / name, ignore_errors=True)
            (run / name).symlink_to(canary)
    elif kind == "a folder of figures":
        shutil.rmtree(run / "analysis" / "figures")
        (run / "analysis" / "figures").symlink_to(canary / "figures")
    elif kind == "pipes":
        for name in (*(f"analysis/{part}" for part in PARTS), *PAGES, "analysis/figures/loss.png", "matplotlibrc"):
            (run / name).unlink(missing_ok=True)
            os.mkfifo(run / name)
        os.mkfifo(run / ".numba_config.yaml")
    else:
        record = json.loads((run / "analysis" / "analysis.json").read_text())
        for figure, name in zip(record["figures"], NAMES, strict=False):
            figure |= {"name": name, "png": name}
        (run / "analysis" / "analysis.json").write_text(json.dumps(record))
        (run / "matplotlibrc").write_bytes(b"text.usetex: True\nbackend: module://queue\nfont.size: 400\n\xff")


NAMES = ("../../home/text", "/etc/hostname", "x.txt", "../../home/figures/loss", "loss/../../x", ".", "")
KINDS = ("links to a file", "links to a folder", "a folder of figures", "pipes", "names")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_from_or_written_to_elsewhere(
    run: Path, canary: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run, kind, canary)
    before = states(canary)
    monkeypatch.chdir(run)
    monkeypatch.setattr("some_moe.glass.figures.canvas.PIXELS_AN_INCH", 20)
    capsys.readouterr()
    for words in COMMANDS:
        assert main(words) in (0, 2)
        assert_kept(canary, before, run, capsys)


@pytest.mark.slow
def test_no_file_of_the_folder_is_run_by_any_process(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "analysis")
    config = RunConfig.load(run / "config.yaml")
    assert config.model.num_experts < 8  # so that UMAP's process is started by hand below
    for name in ("queue", "types", "selectors", "numba", "numpy", "token", "sitecustomize"):
        (run / f"{name}.py").write_text(f"open({str(tmp_path / 'EXECUTED')!r}, 'a').write({name!r})")
    os.mkfifo(run / ".numba_config.yaml")
    os.mkfifo(run / "matplotlibrc")
    script = "import numpy as np; from some_moe.glass.inspect.projections import umap_in_background\n"
    script += "with umap_in_background() as start: assert len(start([np.eye(9)])()) == 1"
    words = [python_command("-m", "some_moe", "report", "."), python_command("-c", script)]
    for command in words:
        done = subprocess.run(command, cwd=run, env=python_environment(), capture_output=True, text=True, timeout=300)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert not (tmp_path / "EXECUTED").exists()


# --- what does not fit is left out --------------------------------------------------------------------------


def change(value: Any, place: str, new: Any) -> Any:
    """The same JSON with another value at a place such as layers.0.gini."""
    name, _, rest = place.partition(".")
    key: Any = int(name) if isinstance(value, list) else name
    value[key] = change(value[key], rest, new) if rest else new
    return value


def show(run: Path) -> str:
    """The report as Markdown; as a page it can be rendered, too."""
    record = read_run(run)
    analysis = read_analysis(record)
    page = make_page(record, analysis, [], list_missing(record, analysis))
    assert render_page(page)
    return render_markdown(page, run)


BAD = (None, "x", -1, [], {}, 1e999, [[1]], True)


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ("analysis.json", "layers.0.entropy_bits"),
        ("analysis.json", "layers.0.generalists"),
        ("analysis.json", "movement.0.drift"),
        ("analysis.json", "rules"),
        ("analysis.json", "figures.0.title"),
        ("analysis.json", "missing"),
        ("analysis.json", "of"),
        ("guilds.json", "guilds.0.words.0.text"),
        ("guilds.json", "guilds.0.knockout"),
        ("guilds.json", "guilds.0.random_keys.random_bits"),
        ("guilds.json", "families.0.layers.0.interval"),
        ("guilds.json", "communities.0.groups"),
        ("guilds.json", "passed"),
        ("movement.json", "layers.0.paths.0"),
        ("movement.json", "layers.0.hues.0"),
        ("movement.json", "steps"),
        ("movement.json", "layers"),
    ],
)
def test_a_part_that_does_not_fit_is_left_out_with_a_sentence(run: Path, part: str, place: str) -> None:
    file = run / "analysis" / part
    good = file.read_text()
    for bad in BAD:
        file.write_text(json.dumps(change(json.loads(good), place, bad)))
        record = read_run(run)
        analysis = read_analysis(record)
        assert show(run)
        found = {"analysis.json": analysis.record, "guilds.json": analysis.guilds, "movement.json": analysis.movement}
        told = [sentence for sentence in list_missing(record, analysis) if sentence.startswith(f"analysis/{part} ")]
        assert bool(found[part]) == (told == []), bad
    for text in (good[:-9], "[]", "\ud800".encode(errors="surrogatepass"), "[" * 100_000):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert f"analysis/{part} " in show(run)


@pytest.mark.parametrize("name", ["tokens", "story", "position", "loss", "experts", "gates", "keys", "usage", "meta"])
def test_a_collection_whose_parts_do_not_fit_each_other_is_left_out(run: Path, name: str) -> None:
    file = run / "analysis" / "collected.safetensors"
    seen = Collection.load(file)
    meta, arrays = {"meta": json.dumps(seen.meta)}, load_file(file)
    variants: list[tuple[dict[str, np.ndarray], dict[str, str]]] = []
    if name == "meta":
        wrong = (
            {"num_experts": 10**12},
            {"top_k": 0},
            {"depths": []},
            {"num_tokens": 1},
            {"split": 3},
            {"notes": None},
        )
        variants = [(arrays, {"meta": json.dumps(seen.meta | one)}) for one in wrong]
        variants += [(arrays, {}), (arrays, {"meta": "{"})]
    else:
        array = arrays[name]
        broken = [
            array[:-1],
            array.astype(np.float64),
            array[None],
            np.full_like(array, -9 if name != "gates" else np.nan),
        ]
        if name == "keys":
            broken[-1] = np.full_like(array, np.inf)
        if name in ("experts", "tokens"):
            broken.append(np.full_like(array, 32_000))
        variants = [(arrays | {name: np.ascontiguousarray(one)}, meta) for one in broken]
        variants.append(({other: one for other, one in arrays.items() if other != name}, meta))
    for tensors, about in variants:
        save_file(tensors, file, metadata=about)
        assert "collected.safetensors or tokenizer.json cannot be used" in show(run)


def test_the_animation_is_drawn_by_our_own_script(run: Path) -> None:
    (run / "analysis" / "movement.html").write_text("<script>steal()</script>")
    assert main(["report", str(run), "--no-analyze"]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "steal()" not in page
    assert "<iframe" in page
    assert page.count("sha256-") == 3  # the page's policy allows two scripts, and the frame's own one of them
    (run / "analysis" / "movement.json").unlink()
    assert main(["report", str(run), "--no-analyze"]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<iframe" not in page
    assert "The animation is not there; <code>some analyze RUN</code> makes it anew." in page


def test_no_control_character_reaches_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("some_moe.glass.figures.canvas.PIXELS_AN_INCH", 20)
    file = run / "analysis" / "collected.safetensors"
    seen = Collection.load(file)
    save_file(load_file(file), file, {"meta": json.dumps(seen.meta | {"run": "\x1b]0;x\x07", "notes": ["\x9b2J"]})})
    for words in (["analyze", str(run), "--draw-only", "--no-guilds"], ["report", str(run), "--no-analyze"]):
        capsys.readouterr()
        assert main(words) == 0
        said = capsys.readouterr()
        assert not set("\x1b\x07\x9b") & set(said.out + said.err)

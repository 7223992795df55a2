"""The functions do what the commands do, and what they return shows itself without trusting a name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import some_moe
from some_moe.cli import main
from some_moe.config import ConfigError
from some_moe.glass.figures.canvas import Drawing
from some_moe.glass.inspect.collection import Collection

NASTY = "<script>alert(1)<script>"  # the name of the run, and words within it


@pytest.fixture
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn but not rendered."""

    def save(drawing: Drawing, folder: Path) -> list[Path]:
        folder.mkdir(exist_ok=True)
        paths = [folder / f"{drawing.name}.{ending}" for ending in ("png", "svg")]
        for path in paths:
            path.touch()
        return paths

    monkeypatch.setattr(Drawing, "save", save)


def assert_is_safe(html: str) -> None:
    """Nothing of a hostile name became an element, and nothing is fetched from anywhere."""
    assert NASTY not in html
    assert "&lt;script&gt;alert(1)&lt;script&gt;" in html
    assert not re.search(r"<(script|link|iframe|style)\b", html)
    assert not re.search(r"""(src|href)=["'](?!data:)""", html)


def printed_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main(list(words)) == 0
    return json.loads(capsys.readouterr().out)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("quick_figures")
def test_analyze_finds_what_the_command_writes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    found = some_moe.analyze(run, guilds=False, max_tokens=400, say=said.append)
    assert found.findings == json.loads((run / "analysis" / "analysis.json").read_text())
    assert found.findings["run"] == NASTY
    assert all(path.exists() for path in found.paths)
    assert said == ["replaying the model …", "mapping the keys …", "drawing …"]
    assert capsys.readouterr().out == ""
    options = ("analyze", str(run), "--no-guilds", "--max-tokens", "400")
    assert str(found) == printed(capsys, *options)
    assert found.findings == printed_json(capsys, *options, "--json")


@pytest.mark.usefixtures("quick_figures")
def test_analyze_takes_a_loaded_run_and_works_in_halves(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collected = some_moe.analyze(some_moe.load(run), collect_only=True, split="test", max_tokens=200)
    assert collected.paths == (run / "analysis" / "collected.safetensors",)
    options = ("analyze", str(run), "--collect-only", "--split", "test", "--max-tokens", "200")
    assert collected.findings == printed_json(capsys, *options, "--json")
    assert str(collected) == printed(capsys, *options)
    drawn = some_moe.analyze(str(run), draw_only=True, guilds=False)
    assert drawn.findings["collected"]["split"] == "test"
    with pytest.raises(ConfigError, match="exclude each other"):
        some_moe.analyze(run, draw_only=True, collect_only=True)


def test_trace_is_plain_data_and_writes_only_where_it_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = some_moe.trace(some_moe.load(run), "The cat", layers=[1])
    assert found.paths == ()
    assert not (run / "trace.html").exists()
    command = printed_json(capsys, "trace", str(run), "The cat", "--layers", "1", "--json")
    assert json.loads(json.dumps(found.findings)) == command
    paged = some_moe.trace(run, "The cat", html=run / "trace.html")
    assert str(paged) == printed(capsys, "trace", str(run), "The cat")


def test_report_of_one_run_writes_what_the_command_writes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = printed(capsys, "report", str(run))
    pages = [(run / f"report.{ending}").read_bytes() for ending in ("html", "md")]
    found = some_moe.report(run)
    assert str(found) == line
    assert [path.read_bytes() for path in found.paths] == pages
    result = json.loads((run / "result.json").read_text())
    assert found.findings["runs"][NASTY]["test_loss"] == result["test_loss"]
    assert json.loads(json.dumps(found.findings)) == found.findings


def test_report_of_several_runs_names_each(run: Path, analysed: Path, tmp_path: Path) -> None:
    found = some_moe.report([run, analysed], out=tmp_path / "two.html")
    assert found.paths == (tmp_path / "two.html", tmp_path / "two.md")
    assert len(found.findings["runs"]) == 2
    assert "Runs beside each other" in found.title
    for wrong, words in (([run, run], "given twice"), ([], "no run is given")):
        with pytest.raises(ConfigError, match=words):
            some_moe.report(wrong)
    with pytest.raises(ConfigError, match="is not a page"):
        some_moe.report(run, out="page.md")


def test_a_notebook_shows_results_whatever_their_names_try(run: Path) -> None:
    assert_is_safe(some_moe.analyze(run, draw_only=True, guilds=False)._repr_html_())
    assert_is_safe(some_moe.trace(run, f"The {NASTY} cat")._repr_html_())
    found = some_moe.report(run, analyze=False)
    assert_is_safe(found._repr_html_())
    assert "Test loss" in found._repr_html_()


def test_a_terminal_shows_results_on_one_line(run: Path) -> None:
    found = some_moe.trace(run, "The cat")
    assert repr(found) == f"<Result {found.title!r}: nothing written>"
    report = some_moe.report(run, analyze=False)
    assert str(run / "report.html") in repr(report)
    assert "\n" not in repr(report)


def test_any_text_can_be_replayed(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("The old king went to the sea. " * 20, encoding="utf-8")
    found = some_moe.analyze(run, data=text, collect_only=True, max_tokens=200)
    assert found.findings["split"] == "file book.txt"
    seen = Collection.load(run / "analysis" / "collected.safetensors")
    tokenizer = some_moe.load(run).tokenizer
    assert tokenizer.decode(seen.tokens[seen.story == 0].tolist()).startswith("The old king went to the sea.")


def test_text_that_is_not_there_is_refused_in_one_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["analyze", str(run), "--data", "nowhere.txt", "--collect-only"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "'nowhere.txt' does not exist" in said[-1]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before

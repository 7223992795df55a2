"""`some adapt` as a person types it: a table, JSON, a page and a run, and one sentence for what is wrong."""

import json
import os
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

import some_moe
from some_moe.cli import main
from some_moe.glass.adaptation import Adaptation
from some_moe.training.runs import load
from tests.shared.typed import SMOKE, listing, refused


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("To be or not to be.\n\nThat is the question.\n\n" * 8)
    (tmp_path / "<b>.txt").write_text("The king is dead.\n\nLong live the king!\n\n" * 8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ["SOME_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    path = tmp_path_factory.mktemp("trained") / "run"
    assert main([*SMOKE, "--out", str(path)]) == 0
    return path


def test_it_prints_a_table_writes_a_page_and_saves_a_run_that_everything_opens(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(trained)
    words = ["adapt", str(trained), "--stream", "a.txt", "<b>.txt", "a.txt", "--chunk-tokens", "64"]
    capsys.readouterr()
    assert main([*words, "--controls", "all", "--out", "moved", "--html", "page.html"]) == 0
    told = capsys.readouterr()
    readers = ("still", "gravity", "random", "bias", "dynamic", "trigram")
    assert [line.split()[0] for line in told.out.splitlines()[2:8]] == [*readers]
    assert [line.split(":")[0] for line in told.err.splitlines()] == [*readers]
    assert listing(trained) == before
    page = Path("page.html").read_text()
    HTMLParser().feed(page)
    assert "default-src 'none'" in unescape(page)
    assert "<b>.txt" not in page
    assert page.count("<polyline") == 2 + 5 + 6 + 2  # ahead by keys, ahead, loss, drift
    for command in (["eval", "moved", "--split", "valid"], ["generate", "moved", "--max-tokens", "2", "--seed", "1"]):
        assert main(command) == 0
    assert main([*words, "--out", "moved"]) == 2


def test_json_holds_what_was_measured_and_no_place(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["adapt", str(trained), "--stream", "a.txt", "--chunk-tokens", "64", "--gravity.alpha", "0.2", "--json"]
    capsys.readouterr()
    assert main(words) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert str(trained.parent) not in text
    assert found["gravity"]["alpha"] == 0.2
    still, gravity = found["readers"]
    assert len(gravity["losses"]) == len(gravity["drift"]) == len(found["texts"][0]["sizes"])
    assert gravity["ahead"] == pytest.approx(still["loss"] - gravity["loss"])
    shown = Adaptation(found)
    assert f"{gravity['loss']:.4f}" in repr(shown)
    assert "<svg" in shown._repr_html_()
    assert "<script" not in shown._repr_html_()


def test_an_open_run_is_read_with_and_not_changed(trained: Path) -> None:
    run = load(trained)
    keys = run.keys(0).keys.copy()
    found = some_moe.adapt(run, ["a.txt"], chunk_tokens=64)
    assert found.to_dict()["readers"][1]["drift"][-1] > 0
    assert (run.keys(0).keys == keys).all()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--stream", "absent.txt"], "--stream 'absent.txt' does not exist"),
        (["--stream", "a.txt", "--keep", "absent.txt"], "--keep 'absent.txt' does not exist"),
        (["--stream", "a.txt", "--rate", "fast"], "--rate 'fast' is not a list of numbers"),
        (["--stream", "a.txt", "--rate", "1,1"], "--rate '1,1' names a rate twice"),
        (["--stream", "a.txt", "--rate", "1,nan", "--valid", "a.txt"], "--rate nan is out of range"),
        (["--stream", "a.txt", "--controls", "still,nobody"], "--controls 'nobody' is unknown"),
        (["--stream", "a.txt", "--model.top-k", "1"], "model.top_k is the run's"),
        (["--stream", "a.txt", "--gravity.alpha", "-1"], "gravity.alpha"),
        (["--stream", "a.txt", "--html", "absent/page.html"], "--html 'absent/page.html' is no place for a page"),
        (["--stream", "a.txt", "--html", "."], "--html '.' is no place for a page"),
        ([], "`some adapt` needs --stream"),
    ],
)
def test_bad_input_is_one_sentence(
    trained: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, "adapt", str(trained), *words)
    assert not Path("moved").exists()

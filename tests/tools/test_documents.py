"""docs/results.md: made from the results alone, the same every time, and never out of date unnoticed."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from some_moe.lab.registry import EXPERIMENTS
from tools.documents import find_outdated, main, make_documents
from tools.experiment_index import ENTRIES
from tools.published_figures import shows_the_same

MakeUp = Callable[..., Path]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def here(make_up: MakeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with made-up results of two runs, and no document yet."""
    for seed in range(3):
        make_up("A1", seed, loss=0.75 + 0.01 * seed)
    make_up("frozen-keys")
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_text() -> str:
    """The document as it would be written."""
    return make_documents(Path("results"), Path("docs/results.md"))[Path("docs/results.md")].decode()


def write_files() -> str:
    assert main([]) == 0
    return Path("docs/results.md").read_text(encoding="utf-8")


def test_the_document_tells_what_was_read_where_records_do(here: Path) -> None:
    assert "## What they read" not in write_text()
    data = {"digest": "d" * 64, "files": [{"name": "tales.txt", "digest": "f" * 16}]}
    data |= {"documents": {"train": 10000, "valid": 1500, "test": 1500}}
    data |= {"tokenizer": {"digest": "t" * 16, "vocab_size": 12921}}
    for name in ("A1-seed0", "A1-seed1"):
        file = here / "results" / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"data": data}))
    told = f"tales.txt ({'f' * 16}) | 10,000 / 1,500 / 1,500 | 12921 ids ({'t' * 16})"
    assert f"| {'d' * 12} | {told} | A1-seed0, A1-seed1 |" in write_text()


@pytest.mark.usefixtures("here")
def test_the_document_shows_every_series_with_published_beside_measured(make_up: MakeUp) -> None:
    for name in ("mvp-v6", "V1", "B1", "v2-professional"):
        make_up(name)
    text = write_text()
    sections = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert sections == [
        "In short", "MVP", "V (v3), tolerance ±10 %", "A (v4), tolerance ±0.06 nats", "B (v4), tolerance ±0.06 nats",
        "v2–v7 reports", "Baselines", "Where a run is not the published one", "Experiment index, v2 to v7",
    ]  # fmt: skip
    for line in (
        "| A (v4) | ±0.06 nats | 6 | 1 | 1 | 3 |",
        "| A1 | 0.7629 | 0.7600 ± 0.0100 | -0.0029 | within |",
        "| A2 | 0.7259 | – | – | not measured |",
        "| A1 | 1 | 0.8872 | 1.0600 ± 0.0100 | +0.1728 | outside |",
        "| A1 | 3 | 0.7600 ± 0.0100 | 2.7600 ± 0.0100 | 2.7500 to 2.7700 |",
        "| A1 | 419,144,704 | 419.14 | 15,770,624 | 15.77 |",
        "| [A1-seed2](../results/A1-seed2.json) | 400 | 1,248 | 45,679 | 12.3 | a made-up device |",
        "| v2-professional | 0.5046 | 1.1111 | +0.6065 | no tolerance |",
        "| frozen-keys | 1.1111 | not published |",
    ):
        assert line in text.splitlines(), line


@pytest.mark.usefixtures("here")
def test_every_published_run_is_in_the_document() -> None:
    text = write_text()
    for experiment in EXPERIMENTS:
        if experiment.published is not None:
            assert f"\n| {experiment.name} | {experiment.published.val_loss} |" in text


def test_every_table_is_whole_and_every_link_leads_somewhere(here: Path) -> None:
    text = write_files()
    blocks = [block.splitlines() for block in text.split("\n\n")]
    tables = [block for block in blocks if block[0].startswith("|")]
    assert len(tables) > 20
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
        assert len(table) > 2
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    assert len(links) == 6, "two figures and four results"
    assert [link for link in links if not (here / "docs" / link).is_file()] == []


@pytest.mark.usefixtures("here")
def test_the_index_has_the_entries_and_fields_of_the_published_one_in_order() -> None:
    index = write_text().split("## Experiment index, v2 to v7\n")[1]
    versions = [line.split(":")[0] for line in index.splitlines() if line.startswith("### ")]
    assert versions == [f"### {version}" for version in ("v2", "v3", "v3.5", "v4", "v5", "v6", "v7")]
    for entry in index.split("\n### ")[1:]:
        fields = [line.split("**")[1] for line in entry.splitlines() if line.startswith("- **")]
        assert fields == [
            "Dataset", "Config", "Sequence length", "Reported metrics", "Measured here", "Observations",
            "Read with care", "Source",
        ]  # fmt: skip
    assert "A1: validation loss 0.7629, perplexity 2.14, gini 0.7912, entropy 4.0851 bits, 64 of 64" in index
    assert "A1: validation loss 0.7600 ± 0.0100 with padding counted, 2.7600 ± 0.0100 over real tokens" in index
    assert "A4: not measured yet." in index
    assert "Not stated, and registered as source hf:roneneldan/TinyStories; vocab\\_size 8,192." in index
    assert "A2: Width helps." in index


def test_the_index_names_every_published_run_after_the_mvp() -> None:
    indexed = {name for entry in ENTRIES for name in entry.runs}
    assert indexed == {e.name for e in EXPERIMENTS if e.published is not None and e.series != "MVP"}
    assert all(set(entry.named) <= set(entry.runs) for entry in ENTRIES)


def test_documents_are_the_same_bytes_in_another_process(here: Path) -> None:
    made = make_documents(Path("results"), Path("docs/results.md"))
    assert {path.name for path in made} == {"results.md", "results-loss-a.svg", "results-usage-a.svg"}
    path = os.pathsep.join(map(str, (REPOSITORY / "src", REPOSITORY)))
    environment = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tools.documents"]
    subprocess.run(command, cwd=here, env=environment, check=True, capture_output=True, timeout=120)
    assert {path: path.read_bytes() for path in made} == made


@pytest.mark.usefixtures("here")
def test_the_check_passes_on_what_was_just_made(capsys: pytest.CaptureFixture[str]) -> None:
    write_files()
    capsys.readouterr()
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == "docs/results.md and 2 figures show the results\n"


def test_the_check_finds_a_figure_that_is_not_in_the_results(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text = here / "docs" / "results.md", write_files()
    path.write_text(text.replace("0.7600 ± 0.0100", "0.7500 ± 0.0100"), encoding="utf-8")
    capsys.readouterr()
    assert main(["--check"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "documents: docs/results.md does not show the results; run `python -m tools.documents`\n"
    assert captured.out == ""


def test_the_check_finds_results_that_changed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files()
    path = here / "results" / "A1-seed1.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"val_loss_padded": 0.7}))
    capsys.readouterr()
    before = {file: file.read_bytes() for file in (here / "docs").rglob("*") if file.is_file()}
    assert main(["--check"]) == 1
    assert "docs/results.md does not show the results, and 1 more files are out" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in (here / "docs").rglob("*") if file.is_file()} == before


@pytest.mark.usefixtures("here")
def test_the_check_finds_a_missing_figure() -> None:
    write_files()
    figure = Path("docs/figures/results-loss-a.svg")
    figure.unlink()
    assert find_outdated(make_documents(Path("results"), Path("docs/results.md"))) == [(figure, "is missing")]
    assert main(["--check"]) == 1


def test_a_figure_of_another_matplotlib_is_known_by_its_numbers() -> None:
    made = b"<svg>Numbers: 0123abcd. Drawn by matplotlib 3.11.2. <path/></svg>"
    assert shows_the_same(made, made)
    assert shows_the_same(made.replace(b"3.11.2", b"3.8.0").replace(b"<path/>", b"<line/>"), made)
    assert not shows_the_same(made.replace(b"<path/>", b"<line/>"), made)
    assert not shows_the_same(made.replace(b"3.11.2", b"3.8.0").replace(b"0123", b"9999"), made)
    assert not shows_the_same(b"<svg/>", made)


def test_figures_carry_their_numbers(here: Path) -> None:
    made = make_documents(Path("results"), Path("docs/results.md"))
    figures = [contents for path, contents in made.items() if path.suffix == ".svg"]
    assert all(b"Numbers: " in figure and b"Drawn by matplotlib " in figure for figure in figures)
    path = here / "results" / "A1-seed0.json"
    path.write_text(path.read_text().replace('"val_loss_padded": 0.75,', '"val_loss_padded": 0.7,'))
    again = make_documents(Path("results"), Path("docs/results.md"))
    changed = {path.name for path in made if not shows_the_same(made[path], again[path])}
    assert changed == {"results.md", "results-loss-a.svg"}


@pytest.mark.usefixtures("here")
def test_words_of_a_result_stay_words(make_up: MakeUp) -> None:
    make_up("A2", device="<b>|`x`", status="[stop](http://x)")
    text = write_text()
    assert "| &lt;b&gt;\\|\\`x\\` |" in text
    assert "A2: \\[stop\\](http://x)." in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--results", "nowhere"],
         "there is no folder 'nowhere' with results; `some experiments run NAME` writes one, or name another with "
         "--results"),
        (["--results", "docs"],
         "'docs' holds no result of a registered experiment; `some experiments run NAME` writes one"),
        (["--out", "docs/results.html"], "--out docs/results.html is not Markdown; give a name that ends in .md"),
        (["--out", "no/results.md"], "--out no/results.md lies in a folder that does not exist; make the folder first"),
        (["--chek"], "--chek is not an option of `python -m tools.documents`; did you mean '--check'?"),
    ],
)  # fmt: skip
def test_docs_refuses_in_one_sentence(
    here: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments]) == 2
    assert capsys.readouterr().err == f"documents: {sentence}\n"
    assert list((here / "docs").iterdir()) == []


def test_the_document_of_this_repository_shows_its_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_the_package_does_without_the_tools() -> None:
    imports = re.compile(r"^\s*(from|import) tools\b", re.MULTILINE)
    package = sorted((REPOSITORY / "src").rglob("*.py"))
    assert [file for file in package if imports.search(file.read_text(encoding="utf-8"))] == []


def test_results_at_the_published_sizes_stand_in_the_place_of_older_ones(here: Path, make_up: MakeUp) -> None:
    newer = make_up("A1", 0, loss=0.7123, file="newer.json")
    (here / "results/published").mkdir()
    newer.rename(here / "results/published/A1-seed0.json")
    text = write_text()
    assert "0.7123" in text
    assert "0.7500 ±" not in text
    assert "frozen-keys-seed0.json" in text, "what has no newer one stays"

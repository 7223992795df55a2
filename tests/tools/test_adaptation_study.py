"""The study of adaptation: its page says what the records hold, and a small copy of it runs from texts to page."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tools.adaptation_study import VERBS, judge, main, read_records

GAINS = {"still": 0.0, "gravity": 0.02, "random": -0.03, "bias": 0.7, "dynamic": 1.9, "trigram": 0.4}


def make_up(folder: Path, gains: dict[str, float], seeds: int = 3, wobble: float = 0.001) -> Path:
    folder.mkdir(exist_ok=True)
    for seed in range(seeds):
        readers: list[dict[str, Any]] = []
        for who, gain in gains.items():
            here = gain + wobble * seed * (who != "still")
            parts = [{"loss": 3.0 - own, "ahead": own, "within": 0.01} for own in (0.0, here, here / 2)]
            losses = [3.0, 3.0 - here, 3.0 - here / 2]
            readers.append({"who": who, "rate": None if who in ("still", "trigram") else 1.0, "texts": parts,
                            "losses": losses, "kept": [2.5, 2.5, 2.6, 2.55],
                            "drift": [] if who == "trigram" else [0.1, 0.2, 0.3]})  # fmt: skip
        record = {"base": "frozen", "seed": seed, "device": "a made-up device", "versions": {"torch": "2"},
                  "commit": "0123456789abcdef", "texts": [{"sizes": [10]}] * 3, "readers": readers}  # fmt: skip
        (folder / f"frozen-seed{seed}.json").write_text(json.dumps(record))
    return folder


def test_the_page_says_what_the_records_hold(tmp_path: Path) -> None:
    results, page = make_up(tmp_path / "results", GAINS), tmp_path / "docs/studies/adaptation.md"
    words = ["page", "--results", str(results), "--out", str(page)]
    assert main(words) == 0
    text = page.read_text()
    verdict = text.split("## Verdict")[1].split("##")[0]
    assert "are a gain: +0.0210 ± 0.0025 nats a token ahead" in verdict
    assert verdict.count(". ") == 1  # two sentences
    assert "| keys by gravity | 1 | 2.9790 ± 0.0025 | +0.0210 ± 0.0025 | +0.0105 ± 0.0012 | +0.1000 ± 0.0000 |" in text
    assert (tmp_path / "docs/figures/study-adaptation-frozen.svg").exists()
    assert main([*words, "--check"]) == 0
    make_up(results, GAINS | {"gravity": -0.2})
    assert main([*words, "--check"]) == 1


@pytest.mark.parametrize(
    ("gain", "wobble", "seeds", "word"),
    [(0.02, 0.05, 3, "no measurable change"), (-0.02, 0.001, 3, "a loss"), (0.02, 0.0, 1, "one random seed, a lead")],
)
def test_the_verdict_claims_no_more_than_the_interval(
    tmp_path: Path, gain: float, wobble: float, seeds: int, word: str
) -> None:
    results = make_up(tmp_path / "results", GAINS | {"gravity": gain - wobble}, seeds, wobble)
    assert word in judge(read_records(results))


def test_without_records_the_page_says_so(tmp_path: Path) -> None:
    page = tmp_path / "docs/studies/adaptation.md"
    assert main(["page", "--results", str(tmp_path / "none"), "--out", str(page)]) == 0
    assert "Not measured yet" in page.read_text()
    assert main(["nothing"]) == 2
    assert list(VERBS) == ["texts", "run", "page"]


def test_texts_are_laid_out_so_that_no_document_is_in_two_of_them(tmp_path: Path) -> None:
    for name in ("", "more_"):
        for split in ("train", "valid", "test"):
            told = "".join(json.dumps({"text": f"{name}{split} story {n}"}) + "\n" for n in range(10))
            plain, packed = tmp_path / f"tinystories_{split}.jsonl", tmp_path / f"tinystories_more_{split}.jsonl.gz"
            packed.write_bytes(gzip.compress(told.encode())) if name else plain.write_text(told)
    (tmp_path / "ood_shakespeare.txt").write_text("\n\n".join(f"Speech {n}." for n in range(20)))
    assert main(["texts", "--from", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    files = {path.stem: path.read_text().splitlines() for path in (tmp_path / "out").rglob("*.jsonl")}
    assert {name: len(lines) for name, lines in files.items()} == {
        "train": 20, "valid": 10, "test": 10, "stories-1": 5, "stories-2": 5, "shakespeare": 12, "stories-valid": 10,
        "shakespeare-valid": 4,
    }  # fmt: skip
    lines = [line for many in files.values() for line in many]
    assert len(set(lines)) == len(lines)


def test_the_page_in_the_documents_is_that_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["page", "--check"]) == 0


@pytest.mark.slow
def test_a_small_copy_runs_from_texts_to_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    (texts / "stories").mkdir(parents=True)
    told = [f"Once there was cat number {n}. It sat on mat {7 * n % 13} and slept." for n in range(40)]
    for name in ("stories/train", "stories/valid", "stories/test", "stories-1", "shakespeare", "stories-2",
                 "stories-valid", "shakespeare-valid"):  # fmt: skip
        mine = [f"{name} {text}" for text in told]
        (texts / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in mine))
    words = ["--texts", str(texts), "--out", str(tmp_path / "out"), "--seeds", "0", "--size", "mini"]
    assert main(["run", *words]) == 0
    assert main(["page", "--results", str(tmp_path / "out"), "--out", str(tmp_path / "docs/studies/a.md")]) == 0
    assert "a lead" in (tmp_path / "docs/studies/a.md").read_text()

"""Documents longer than a row: split, no token is lost, and each is learned and scored once."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import some_moe
from some_moe.config import DataConfig, RunConfig
from some_moe.data.batches import Batches, encode_rows
from some_moe.data.dataset import prepare, settle_data
from some_moe.data.sources import SPLITS, load_corpus
from some_moe.data.tokenizer import BOS, EOS, Tokenizer
from some_moe.lab.jobs import list_differences
from some_moe.lab.registry.presets import smoke
from some_moe.sinks.display import Display
from some_moe.training.runs import Run


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))


def write_books(path: Path, count: int, size: int) -> Path:
    """So many books of about so many characters each."""
    draw, words = (
        random.Random(0),
        ["the", "fox", "ran", "over", "a", "hill", "and", "saw", "blue", "birds", "under", "old", "trees"],
    )
    books = (f"Book {n}. " + " ".join(draw.choices(words, k=size // 5)) for n in range(count))
    path.write_text("\n\n".join(books))
    return path


def test_a_split_document_gives_each_of_its_tokens_as_a_target_once() -> None:
    text = "There were seven small frogs in the pond."
    tokenizer = Tokenizer.train([text], 300)
    whole = [BOS, *tokenizer.encode(text), EOS]
    for seq_len in range(2, len(whole) + 2):
        rows = encode_rows([text, "a", ""], tokenizer, seq_len, split=True)
        lists = rows.to_lists()
        num_rows = -(-(len(whole) - 1) // seq_len)
        assert lists[:num_rows] == [whole[r * seq_len : (r + 1) * seq_len + 1] for r in range(num_rows)]
        assert [one for row in lists[:num_rows] for one in row[1:]] == whole[1:]
        assert lists[-1] == [BOS, EOS]
        assert (rows.num_cut, rows.num_stories) == (0, 3)


def test_rows_that_fit_are_the_same_split_or_cut() -> None:
    texts = ["a b c", "d e"]
    tokenizer = Tokenizer.train(texts, 300)
    cut, split = (encode_rows(texts, tokenizer, 32, split=split) for split in (False, True))
    assert cut.to_lists() == split.to_lists()


@pytest.mark.parametrize("size", [13_000, pytest.param(130_000, marks=pytest.mark.slow)])
def test_forty_books_lose_no_token_in_any_batching(tmp_path: Path, size: int) -> None:
    config = DataConfig(source=str(write_books(tmp_path / "books.txt", 40, size)), seq_len=128, long="split")
    dataset, corpus = prepare(config, 400), load_corpus(config)
    for split in SPLITS:
        wanted = [one for text in corpus.read(split) for one in (*dataset.tokenizer.encode(text), EOS)]
        rows = getattr(dataset, split)
        assert [one for row in rows.to_lists() for one in row[1:]] == wanted
        assert rows.num_cut == 0
    wanted = Counter(one for row in dataset.test.to_lists() for one in row[1:])
    for batching in ("padded", "bucketed", "packed"):
        batches = Batches(
            dataset.test, config.override({"batching": batching}), rows_a_step=8, seed=0, keep_partial=True
        )
        targets = Counter(one for batch in batches.epoch(0) for one in batch.targets[batch.real].tolist())
        assert targets == wanted, batching


def test_split_and_cut_rows_are_kept_apart_in_the_cache_and_auto_is_cut(tmp_path: Path) -> None:
    config = DataConfig(source=str(write_books(tmp_path / "books.txt", 20, 1000)), seq_len=32)
    auto, cut, split = (prepare(config.override({"long": long}), 400) for long in ("auto", "cut", "split"))
    assert auto.digest == cut.digest != split.digest
    assert prepare(config.override({"long": "split"}), 400).digest == split.digest
    assert len(split.train) > len(cut.train) == cut.train.num_stories == split.train.num_stories


@pytest.mark.parametrize(
    ("changes", "settled"),
    [
        ({}, "cut"),
        ({"data.source": "own.txt"}, "split"),
        ({"data.source": "own.txt", "experiment": "A1"}, "cut"),
        ({"data.source": "own.txt", "data.long": "cut"}, "cut"),
        ({"data.long": "split"}, "split"),
    ],
)
def test_a_new_run_splits_own_texts_and_cuts_the_published_ones(changes: dict[str, Any], settled: str) -> None:
    config = RunConfig().override({"data.train_subset_size": 64, **changes})
    assert settle_data(config).data.long == settled
    assert (config.known_steps is None) == (settled == "split")  # a story need not be a row
    assert not list_differences(settle_data(config), config)


class Listener(Display):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def train(tmp_path: Path, **changes: Any) -> tuple[Run, list[str]]:
    base = {"data.source": str(write_books(tmp_path / "books.txt", 40, 800)), "train.epochs": 1, "train.max_steps": 3}
    display = Listener()
    config = smoke().override(base | changes)
    return some_moe.train(config, out=tmp_path / "run", display=display), display.lines


def test_a_run_on_books_trains_on_all_of_them_and_scores_all(tmp_path: Path) -> None:
    run, lines = train(tmp_path, **{"data.seq_len": 64, "data.train_subset_size": 20})
    assert run.config.data.long == "split"
    assert "20 training stories in " in lines[0]
    found = load_corpus(run.config.data.override({"train_subset_size": None})).count("train")
    assert f"20 of {found} training stories are used (data.train_subset_size; null takes all)" in lines
    assert not [line for line in lines if "cut off" in line]
    own = tmp_path / "own.txt"
    own.write_text("The fox ran over a hill. " * 100)
    scored = run.evaluate(data=own)
    assert scored["num_tokens"] == len(run.tokenizer.encode(own.read_text().strip())) + 1


def test_where_much_is_cut_the_cure_is_named(tmp_path: Path) -> None:
    run, lines = train(tmp_path, **{"data.seq_len": 64, "data.long": "cut"})
    assert run.config.data.long == "cut"
    (said,) = [line for line in lines if "cut off" in line]
    assert said.endswith("lie beyond seq_len 64 and are cut off; --data.long split makes rows of them")

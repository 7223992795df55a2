"""Prepared data: encoded by hand-checkable rules, cached by content, made again when the cache is damaged."""

import json
from pathlib import Path

import pytest

from some_moe.config import ConfigError, DataConfig
from some_moe.data.batches import encode_rows
from some_moe.data.dataset import cache_folder, prepare
from some_moe.data.tokenizer import BOS, EOS, Tokenizer
from some_moe.stories import generator

TEXTS = [f"There were {n} small frogs in pond {n * 7 % 50}." for n in range(120)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


def test_rows_are_bos_text_eos_and_a_long_one_is_cut() -> None:
    tokenizer = Tokenizer.train(TEXTS, 300)
    ids = tokenizer.encode(TEXTS[5])
    rows = encode_rows([TEXTS[5], "a"], tokenizer, seq_len=4)
    assert rows[0].tolist() == [BOS, *ids[:4]]
    assert rows[1].tolist() == [BOS, *tokenizer.encode("a"), EOS]
    assert rows.num_cut == len(ids) + 2 - 5


def test_the_tokenizer_sees_the_training_split_alone(source: Path) -> None:
    dataset = prepare(DataConfig(source=str(source)), 400)
    from some_moe.data.sources import load_corpus

    corpus = load_corpus(DataConfig(source=str(source)))
    assert dataset.tokenizer.to_json() == Tokenizer.train(corpus.train, 400).to_json()
    assert len(dataset.train) == len(corpus.train)


def test_the_second_time_comes_from_the_cache_and_is_the_same(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(source=str(source), seq_len=32)
    first = prepare(config, 400)
    monkeypatch.setattr("some_moe.data.dataset._encode", lambda *_: pytest.fail("the cache was not used"))
    second = prepare(config, 400)
    assert second.digest == first.digest
    assert second.test.to_lists() == first.test.to_lists()
    assert second.tokenizer.to_json() == first.tokenizer.to_json()


def test_changed_content_and_settings_miss_the_cache(source: Path) -> None:
    config = DataConfig(source=str(source), seq_len=32)
    digests = {prepare(config, 400).digest, prepare(config, 350).digest}
    digests.add(prepare(config.override({"seq_len": 8}), 400).digest)
    source.write_text(source.read_text(encoding="utf-8") + '{"text": "One more story."}\n', encoding="utf-8")
    digests.add(prepare(config, 400).digest)
    assert len(digests) == 4


@pytest.mark.parametrize("changed", ["lexicon.txt", "plots.txt"])
def test_changed_words_of_the_stories_miss_the_cache(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(source="stories", seq_len=32, train_subset_size=8, val_subset_size=2)
    prepare(config, 300)
    copies = []
    for file in generator.FILES:
        copies.append(tmp_path / file.name)
        copies[-1].write_bytes(file.read_bytes() + (b"# more\n" if file.name == changed else b""))
    monkeypatch.setattr(generator, "FILES", copies)
    prepare(config, 300)
    assert len(list(cache_folder().iterdir())) == 2


def test_a_damaged_cache_entry_is_made_again(source: Path) -> None:
    config = DataConfig(source=str(source))
    first = prepare(config, 400)
    for entry in cache_folder().iterdir():
        entry.write_bytes(b"broken")
    assert prepare(config, 400).digest == first.digest


def test_a_cache_that_cannot_be_written_is_done_without(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "file" / "below"))
    assert len(prepare(DataConfig(source=str(source)), 400).train) > 90


def test_a_tokenizer_that_does_not_fit_is_refused(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(Tokenizer.train(TEXTS, 320).to_json(), encoding="utf-8")
    config = DataConfig(source=str(source), tokenizer=str(path))
    assert prepare(config, 512).tokenizer.to_json() == path.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the tokenizer has \d+ ids, but model.vocab_size is 300"):
        prepare(config, 300)
    with pytest.raises(ConfigError, match=r"cannot read data.tokenizer .*missing.json"):
        prepare(config.override({"tokenizer": str(tmp_path / "missing.json")}), 300)

"""Prepared data: encoded by hand-checkable rules, cached by content, made again when the cache is damaged."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from some_moe.config import ConfigError, DataConfig
from some_moe.data.batches import encode_rows
from some_moe.data.dataset import prepare
from some_moe.data.tokenizer import BOS, EOS, Tokenizer
from some_moe.stories import generator
from some_moe.system import cache
from some_moe.system.cache import cache_folder

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
    assert dataset.tokenizer.to_json() == Tokenizer.train(corpus.read("train"), 400).to_json()
    assert len(dataset.train) == corpus.count("train")


def test_the_second_time_comes_from_the_cache_and_is_the_same(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(source=str(source), seq_len=32)
    first = prepare(config, 400)
    monkeypatch.setattr("some_moe.data.dataset._make", lambda *_: pytest.fail("the cache was not used"))
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


def test_a_dataset_tells_its_files_sizes_and_tokenizer_without_a_path(source: Path, tmp_path: Path) -> None:
    config = DataConfig(source=str(source), seq_len=32)
    dataset = prepare(config, 400)
    told = dataset.describe()
    bytes_of_file = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    assert told["files"] == [{"name": "texts.jsonl", "digest": bytes_of_file}]
    assert sum(told["documents"].values()) == len(TEXTS)
    assert told["tokenizer"]["vocab_size"] == dataset.tokenizer.vocab_size < 400
    assert str(tmp_path) not in json.dumps(told)
    # Another place is no other data; another cut of the same file is.
    moved = source.rename(tmp_path / "moved.jsonl")
    again = prepare(config.override({"source": str(moved)}), 400).describe()
    assert again == told | {"files": [{"name": "moved.jsonl", "digest": bytes_of_file}]}
    fewer = prepare(config.override({"source": str(moved), "train_subset_size": 50}), 400).describe()
    assert fewer["files"] == again["files"]
    assert fewer["digest"] != again["digest"]


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


def the_folder() -> Path:
    (folder,) = cache_folder().iterdir()
    return folder


def change(folder: Path, *, seals: bool, **changes: np.ndarray | str) -> None:
    """Change prepared files, or what is told of them; seals: as somebody would who knows how they are sealed."""
    for name, value in changes.items():
        if isinstance(value, np.ndarray):
            (folder / name.replace("_", ".")).write_bytes(value.tobytes())
    about = json.loads((folder / cache.ABOUT).read_text())
    about |= {name: value for name, value in changes.items() if isinstance(value, str)}
    if seals:
        about["digest"] = cache.digest_files(folder, about["files"])
        about["seal"] = cache.seal(WANTED[-1], about)
    (folder / cache.ABOUT).write_text(json.dumps(about))
    if "all" in changes:
        (folder / cache.ABOUT).write_text(str(changes["all"]))


WANTED: list[str] = []


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the words that data is asked for by."""
    real = cache.folder_of

    def folder_of(wanted: str) -> Path:
        WANTED.append(wanted)
        return real(wanted)

    monkeypatch.setattr(cache, "folder_of", folder_of)


@pytest.mark.parametrize("name", ["train.ids", "test.starts", "about.json"])
def test_a_damaged_cache_entry_is_made_again_with_a_word(source: Path, name: str) -> None:
    config, said = DataConfig(source=str(source)), []
    first = prepare(config, 400)
    file = the_folder() / name
    good = file.read_bytes()
    for damage in (b"", b"broken", good[:-2], good[:-1] + bytes([good[-1] ^ 1]), good[:8] + b"x" + good[9:]):
        file.write_bytes(damage)
        assert prepare(config, 400, say=said.append).digest == first.digest
        assert said.pop().endswith("cannot be used (it is not what was stored), and is made again")
        assert file.read_bytes() == good
    assert prepare(config, 400, say=said.append).digest == first.digest
    assert not said


def test_what_is_made_again_leaves_the_memory_of_those_alone_who_use_the_old(source: Path) -> None:
    config = DataConfig(source=str(source), seq_len=32)
    first = prepare(config, 400)
    before = first.train.to_lists()
    with (the_folder() / "train.ids").open("ab") as file:
        file.write(b"more")
    prepare(config, 400)
    cache.clear()
    assert first.train.to_lists() == before


@pytest.mark.parametrize("seals", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"train_ids": np.full(50, 60_000, np.uint16), "train_starts": np.array([0, 25, 50])},
        {"train_ids": np.full(100, 5, np.uint16), "train_starts": np.array([0, 25, 50])},
        {"train_ids": np.full(101, 5, np.uint8), "train_starts": np.array([0, 25, 50])},
        {"train_ids": np.full(50, 5, np.uint16), "train_starts": np.array([0, 25, 51])},
        {"train_ids": np.full(50, 5, np.uint16), "train_starts": np.array([0, -3, 50])},
        {"train_ids": np.full(50, 5, np.uint16), "train_starts": np.array([0, 50])},
        {"train_ids": np.zeros(0, np.uint16), "train_starts": np.array([0])},
        {"all": "[]"},
        {"all": "[" * 100_000},
        {"tokenizer": Tokenizer.train(TEXTS, 600).to_json()},
    ],
    ids=range(10),
)
@pytest.mark.usefixtures("heard")
def test_prepared_data_that_does_not_fit_is_made_again(source: Path, changes: dict[str, Any], seals: bool) -> None:
    config, said = DataConfig(source=str(source), seq_len=32), []
    first = prepare(config, 400)
    before = first.train.to_lists()
    change(the_folder(), seals=seals, **changes)
    again = prepare(config, 400, say=said.append)
    assert again.digest == first.digest
    assert again.train.to_lists() == before
    assert len(said) == 1


@pytest.mark.usefixtures("heard")
def test_prepared_data_of_another_tokenizer_is_made_again(source: Path) -> None:
    config, own = DataConfig(source=str(source), seq_len=32), Tokenizer.train(TEXTS, 350)
    first = prepare(config, 400, own)
    change(the_folder(), seals=True, tokenizer=Tokenizer.train(TEXTS[:3], 300).to_json())
    assert prepare(config, 400, own).tokenizer.to_json() == first.tokenizer.to_json() == own.to_json()


def test_data_prepared_for_one_question_is_no_answer_to_another(source: Path, tmp_path: Path) -> None:
    config, said = DataConfig(source=str(source), seq_len=32), []
    prepare(config, 400)
    other = the_folder().rename(tmp_path / "other")
    wanted = prepare(config, 350)
    place = the_folder()
    place.rename(tmp_path / "first")
    other.rename(place)
    assert prepare(config, 350, say=said.append).digest == wanted.digest
    assert len(said) == 1


def test_what_is_called_like_the_generated_stories_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, said = DataConfig(train_subset_size=8, val_subset_size=2), []
    prepare(config, 300, say=said.append)
    assert not said
    Path("stories").mkdir()
    prepare(config, 300, say=said.append)
    assert said == ["data.source 'stories' means the generated ones; what is called so in this folder is './stories'"]


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

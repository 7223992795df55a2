"""Every kind of source is read, split without overlap and deduplicated; bad files are named in one sentence."""

import json
import sys
import types
from pathlib import Path

import pytest

from some_moe.config import ConfigError, DataConfig
from some_moe.data.sources import SPLITS, Corpus, load_corpus, read_documents

WORDS = [f"Story number {n} is about a {'cat' if n % 2 else 'dog'}." for n in range(400)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def assert_disjoint(corpus: Corpus) -> None:
    splits = [getattr(corpus, split) for split in SPLITS]
    assert all(splits)
    together = [document for split in splits for document in split]
    assert len(together) == len(set(together))


def load(path: Path, **fields: object) -> Corpus:
    return load_corpus(DataConfig(source=str(path), **fields))  # type: ignore[arg-type]


def test_generated_stories_are_split_without_overlap_and_grow_in_place() -> None:
    small = load_corpus(DataConfig(train_subset_size=30, val_subset_size=5))
    large = load_corpus(DataConfig(train_subset_size=60, val_subset_size=5))
    assert_disjoint(large)
    assert (len(small.train), len(small.valid), len(small.test)) == (30, 5, 5)
    assert large.train[:30] == small.train
    assert large.test == small.test


def test_txt_is_split_at_end_of_text_or_blank_lines_or_the_given_separator(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\nstill one<|endoftext|>\ntwo\n<|endoftext|>", encoding="utf-8")
    assert read_documents(path, DataConfig()) == ["one\n\nstill one", "two"]
    path.write_text("one\nline\n \n\ntwo\n", encoding="utf-8")
    assert read_documents(path, DataConfig()) == ["one\nline", "two"]
    assert read_documents(path, DataConfig(separator="t")) == ["one\nline", "wo"]


def test_jsonl_and_parquet_give_the_same_corpus(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'some-moe[data]'")
    arrow = sys.modules["pyarrow"]
    parquet.write_table(arrow.table({"text": WORDS}), tmp_path / "a.parquet")
    from_jsonl = load(write_jsonl(tmp_path / "a.jsonl", WORDS))
    assert load(tmp_path / "a.parquet").digest() == from_jsonl.digest()
    parquet.write_table(arrow.table({"story": WORDS}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="needs a 'text' column"):
        load(tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR0")
    with pytest.raises(ConfigError, match="is not a parquet file"):
        load(tmp_path / "c.parquet")


def test_one_file_is_split_by_content_so_that_order_does_not_matter(tmp_path: Path) -> None:
    first = load(write_jsonl(tmp_path / "a.jsonl", WORDS))
    second = load(write_jsonl(tmp_path / "b.jsonl", WORDS[::-1]))
    assert_disjoint(first)
    assert {*first.test} == {*second.test}
    assert 5 <= len(first.valid) <= 40
    assert 5 <= len(first.test) <= 40


def test_repeats_are_kept_once_and_held_out_text_never_trains(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x_train.jsonl", [*WORDS[:300], WORDS[0], " " + WORDS[1], WORDS[350]])
    write_jsonl(tmp_path / "x_valid.jsonl", WORDS[300:350])
    write_jsonl(tmp_path / "x_test.jsonl", [*WORDS[350:], WORDS[300]])
    corpus = load(tmp_path)
    assert_disjoint(corpus)
    assert corpus.train == WORDS[:300]
    assert corpus.duplicates == 4
    assert WORDS[300] in corpus.test
    assert len(corpus.valid) == 49


def test_a_folder_without_a_test_file_gets_one_from_valid(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train-0.jsonl", WORDS[:150])
    write_jsonl(tmp_path / "train-1.jsonl", WORDS[150:300])
    write_jsonl(tmp_path / "validation.jsonl", WORDS[300:])
    corpus = load(tmp_path)
    assert_disjoint(corpus)
    assert len(corpus.train) == 300
    assert {*corpus.valid, *corpus.test} == {*WORDS[300:]}


def test_subsets_are_the_first_ones(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", WORDS)
    whole, part = load(path), load(path, train_subset_size=10, val_subset_size=3)
    assert part.train == whole.train[:10]
    assert (part.valid, part.test) == (whole.valid[:3], whole.test[:3])


def test_a_handful_of_documents_still_has_three_splits(tmp_path: Path) -> None:
    assert_disjoint(load(write_jsonl(tmp_path / "a.jsonl", WORDS[:5])))


def test_a_dataset_is_read_through_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: pip install 'some-moe[data]'")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", WORDS[:300])
    write_jsonl(tmp_path / "set" / "validation.jsonl", WORDS[300:])
    corpus = load_corpus(DataConfig(source=f"hf:{tmp_path / 'set'}", train_subset_size=100))
    assert_disjoint(corpus)
    assert corpus.train == WORDS[:100]
    assert {*corpus.valid, *corpus.test} == {*WORDS[300:]}


class HubTable(dict[str, list[str]]):
    """One split of a dataset: texts by column."""

    @property
    def column_names(self) -> list[str]:
        return [*self]


def test_hub_splits_of_one_kind_are_read_together_and_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {
        "train_clean": HubTable(text=WORDS[:100]),
        "train_other": HubTable(text=[f" {text}\n" for text in WORDS[100:200]] + [" ", ""]),
        "validation": HubTable(text=WORDS[200:300]),
        "test": HubTable(text=WORDS[300:]),
    }
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda _: splits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    corpus = load_corpus(DataConfig(source="hf:some/thing"))
    assert (corpus.train, corpus.valid, corpus.test) == (WORDS[:200], WORDS[200:300], WORDS[300:])
    splits["test"] = HubTable(story=WORDS[300:])
    with pytest.raises(ConfigError, match=r"^hf:some/thing, test, has the columns \['story'\]; it needs a 'text'"):
        load_corpus(DataConfig(source="hf:some/thing"))


def test_a_hub_that_cannot_be_reached_is_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("datasets")

    def fail(name: str) -> None:
        raise ConnectionError(f"no route to {name}\nand more")

    fake.load_dataset = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(ConfigError, match=r"hf:some/thing could not be loaded \(no route to some/thing\)") as error:
        load_corpus(DataConfig(source="hf:some/thing"))
    assert "\n" not in str(error.value)


def test_without_datasets_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'some-moe\[data\]'"):
        load_corpus(DataConfig(source="hf:some/thing"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"  \n\n ", "holds no text"),
        ("a.txt", b"\xff\xfe\x00\x01", "is not UTF-8 text"),
        ("a.txt", b"ab\x00cd", "is binary"),
        ("a.jsonl", b'{"text": "a"}\n{"text": oops}\n', "line 2, is not JSON"),
        ("a.jsonl", b'{"story": "a"}\n', "has no text: it has the fields ['story']"),
        ("a.jsonl", b'{"text": 5}\n', "has no text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "a \\ud800 b"}\n', r"line 2, has half a character, '\ud800'"),
        ("a.jsonl", b"[1]\n", "is no object"),
        ("a.csv", b"text\nx\n", "ends in '.csv'; supported are .txt, .jsonl, .parquet"),
    ],
)
def test_bad_files_are_named_in_one_sentence(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load(tmp_path / name)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_source_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.txt' does not exist"):
        load(tmp_path / "nowhere.txt")
    with pytest.raises(ConfigError, match=r"has no \.txt, \.jsonl, \.parquet file"):
        load(tmp_path)


def test_a_mark_at_the_start_of_a_file_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\n\ntwo".encode("utf-8-sig"))
    assert read_documents(tmp_path / "a.txt", DataConfig()) == ["one", "two"]


def test_a_separator_may_be_written_as_a_shell_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree")
    assert read_documents(tmp_path / "a.txt", DataConfig(separator=r"\n")) == ["one", "two", "three"]

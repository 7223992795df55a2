"""Every kind of source is read, split without overlap and deduplicated; bad files are named in one sentence."""

import gzip
import json
import os
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from some_moe.config import ConfigError, DataConfig
from some_moe.data.readers import read_documents
from some_moe.data.sources import SPLITS, load_corpus
from tests.data.whole import Lists, in_lists

WORDS = [f"Story number {n} is about a {'cat' if n % 2 else 'dog'}." for n in range(400)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def assert_disjoint(corpus: Lists) -> None:
    splits = [getattr(corpus, split) for split in SPLITS]
    assert all(splits)
    together = [document for split in splits for document in split]
    assert len(together) == len(set(together))


def load(path: Path, **fields: object) -> Lists:
    return in_lists(load_corpus(DataConfig(source=str(path), **fields)))  # type: ignore[arg-type]


def test_generated_stories_are_split_without_overlap_and_grow_in_place() -> None:
    small = in_lists(load_corpus(DataConfig(train_subset_size=30, val_subset_size=5)))
    large = in_lists(load_corpus(DataConfig(train_subset_size=60, val_subset_size=5)))
    assert_disjoint(large)
    assert (len(small.train), len(small.valid), len(small.test)) == (30, 5, 5)
    assert large.train[:30] == small.train
    assert large.test == small.test


def test_txt_is_split_at_end_of_text_or_blank_lines_or_the_given_separator(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\nstill one<|endoftext|>\ntwo\n<|endoftext|>", encoding="utf-8")
    assert [*read_documents(path, DataConfig())] == ["one\n\nstill one", "two"]
    path.write_text("one\nline\n \n\ntwo\n", encoding="utf-8")
    assert [*read_documents(path, DataConfig())] == ["one\nline", "two"]
    assert [*read_documents(path, DataConfig(separator="t"))] == ["one\nline", "wo"]


def test_jsonl_and_parquet_give_the_same_corpus(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install pyarrow")
    arrow = sys.modules["pyarrow"]
    parquet.write_table(arrow.table({"text": WORDS}), tmp_path / "a.parquet")
    from_jsonl = load(write_jsonl(tmp_path / "a.jsonl", WORDS))
    assert load(tmp_path / "a.parquet") == from_jsonl
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
    pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", WORDS[:300])
    write_jsonl(tmp_path / "set" / "validation.jsonl", WORDS[300:])
    corpus = in_lists(load_corpus(DataConfig(source=f"hf:{tmp_path / 'set'}", train_subset_size=100)))
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
    fake.__version__ = "4.0.0"  # type: ignore[attr-defined]
    fake.load_dataset = lambda _: splits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    corpus = in_lists(load_corpus(DataConfig(source="hf:some/thing")))
    assert (corpus.train, corpus.valid, corpus.test) == (WORDS[:200], WORDS[200:300], WORDS[300:])
    splits["test"] = HubTable(story=WORDS[300:])
    with pytest.raises(ConfigError, match=r"^hf:some/thing, test, has the columns \['story'\]; it needs a 'text'"):
        load_corpus(DataConfig(source="hf:some/thing"))


def test_a_hub_that_cannot_be_reached_is_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("datasets")
    fake.__version__ = "4.0.0"  # type: ignore[attr-defined]

    def fail(name: str) -> None:
        raise ConnectionError(f"no route to {name}\nand more")

    fake.load_dataset = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(ConfigError, match=r"hf:some/thing could not be loaded \(no route to some/thing\)") as error:
        load_corpus(DataConfig(source="hf:some/thing"))
    assert "\n" not in str(error.value)


def test_without_datasets_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'datasets>=4'"):
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
        ("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "line 1, has numbers or nesting beyond all measure"),
        ("a.jsonl", b"[" * 100_000, "line 1, has numbers or nesting beyond all measure"),
        ("a.json", b'[{"text": "a"},\n{"text": oops}]', "is not JSON (its line 2); mend it"),
        ("a.json", b'[{"text": "a"}, {"story": "b"}]', "record 2, has no text: it has the fields ['story']"),
        ("a.json", b"[" * 100_000, "has numbers or nesting beyond all measure; mend it"),
        ("a.json", b'[{"messages": [{"role": "user"}]}]', "holds a list of messages, 'messages', not a text"),
        ("a.jsonl", b'{"text": [1]}', "holds a list of messages, 'text', not a text"),
        ("a.jsonl", json.dumps({f"f{n}": n for n in range(30)}).encode(), "and 20 more"),
        ("a.txt.gz", b"not packed", "is no whole gzip file"),
        ("a.txt.gz", gzip.compress(b"a story", mtime=0)[:-4], "is no whole gzip file"),
        ("a.txt.gz", gzip.compress(b"\xff\xfe", mtime=0), "is not UTF-8 text (byte 0)"),
        ("a.tar.gz", b"", "ends in '.tar.gz'"),
        ("a.csv", b"text\nx\n", "ends in '.csv'; supported are .txt, .md, .json, .jsonl, .parquet"),
    ],
)
def test_bad_files_are_named_in_one_sentence(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load(tmp_path / name)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path) -> None:
    text, lines = "\n\n".join(WORDS).encode(), b"\n".join(json.dumps({"body": word}).encode() for word in WORDS)
    files = {
        "a.TXT": text,
        "b.md": text,
        "c.txt.gz": gzip.compress(text),
        "d.json": json.dumps([{"body": word} for word in WORDS], indent=1).encode(),
        "e.json": json.dumps(WORDS).encode(),
        "f.json": lines,
        "g.JSONL.GZ": gzip.compress(lines[:100]) + gzip.compress(lines[100:]),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert [*read_documents(tmp_path / name, DataConfig(text_field="body"))] == WORDS, name


def test_a_packed_file_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("some_moe.system.reading.UNPACKED_FREE", 1 << 16)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(bytes(1 << 22)))
    with pytest.raises(ConfigError, match=r"a.txt.gz' gives more than the \d+,\d+ bytes that it may"):
        load(tmp_path / "a.txt.gz")


def test_parquet_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    broken = arrow.array([b"good", b"\xff\xfe"]).view(arrow.string())
    parquet.write_table(arrow.table({"text": broken}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"has text that is not UTF-8, from row 0 on; mend it"):
        load(tmp_path / "a.parquet")


def test_a_folder_is_read_with_its_subfolders_whose_names_may_tell_the_splits(tmp_path: Path) -> None:
    for place, texts in {"train": WORDS[:300], "valid/deep": WORDS[300:350], "other/test": WORDS[350:]}.items():
        (tmp_path / place).mkdir(parents=True)
        write_jsonl(tmp_path / place / "0.jsonl", texts)
    (tmp_path / ".hidden").mkdir()
    write_jsonl(tmp_path / ".hidden" / "train.jsonl", ["never read"])
    (tmp_path / "train" / ".0.txt").write_text("never read")
    (tmp_path / "train" / "notes.rst").write_text("never read")
    write_jsonl(tmp_path / "elsewhere", ["A linked story."])
    (tmp_path / "train" / "1.jsonl").symlink_to(tmp_path / "elsewhere")
    corpus = load(tmp_path)
    assert corpus.train == [*WORDS[:300], "A linked story."]
    assert (corpus.valid, corpus.test) == (WORDS[300:350], WORDS[350:])


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def make_link_to_folder(path: Path) -> None:
    (path.parent / "a folder").mkdir()
    path.symlink_to("a folder")


def make_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


ODD_THINGS = {
    make_pipe: "is a pipe, not a file",
    make_loop: "Too many levels of symbolic links",
    make_socket: "is a socket, not a file",
    make_link_to_folder: "is a link to a folder",
    make_link_to_nothing: "No such file or directory",
}


@pytest.mark.parametrize("make", ODD_THINGS, ids=lambda make: make.__name__)
def test_an_odd_thing_in_a_folder_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    Path("texts").mkdir()
    write_jsonl(Path("texts/a.jsonl"), WORDS)
    make(Path("texts/odd.txt"))
    with pytest.raises(ConfigError, match=r"odd\.txt") as error:
        load(Path("texts"))
    assert ODD_THINGS[make] in str(error.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "is '', which names nothing"),
        (" ", "is ' ', which names nothing"),
        ("https://example.org/a.txt", "'https://example.org/a.txt' is an address"),
        ("/dev/null", "'/dev/null' is a device, not a file"),
        ("a" * 300 + ".txt", "File name too long"),
        ("\udcff.txt", "which is no printable sign"),
        ("a\0b.txt", "which is no printable sign"),
        ("/dev/null/a.txt", "Not a directory"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(source: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_corpus(DataConfig(source=source))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_may_not_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a story")
    refusal = PermissionError(13, "Permission denied", str(tmp_path / "a.txt"))
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(refusal))
    with pytest.raises(ConfigError, match=r"a.txt' cannot be used \(Permission denied\); ask its owner"):
        load(tmp_path / "a.txt")


def test_a_folder_with_nothing_to_train_on_says_what_is_missing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "valid.jsonl", WORDS)
    with pytest.raises(ConfigError, match="has text for valid alone; put a file to train on beside it, with train in"):
        load(tmp_path)


def test_the_documents_that_a_subset_leaves_out_are_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", WORDS)
    assert load(path).unused == 0
    assert load(path, train_subset_size=10).unused == len(load(path).train) - 10


def test_more_generated_stories_than_can_be_made_are_refused_with_what_they_would_need() -> None:
    with pytest.raises(ConfigError, match=r"train_subset_size 1000000000000000000 generated stories would need .* GB"):
        DataConfig(train_subset_size=10**18)
    assert DataConfig(source="own.txt", train_subset_size=10**18)


@pytest.mark.parametrize(("field", "value"), [("prefetch", 10**12), ("workers", 10**6), ("seq_len", 10**9)])
def test_sizes_beyond_all_measure_are_refused(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be less than or equal to"):
        DataConfig(**{field: value})


def test_an_old_datasets_library_could_run_code_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("datasets")
    fake.__version__ = "2.19.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(ConfigError, match=r"hf:some/thing needs a newer datasets library than 2\.19\.1"):
        load_corpus(DataConfig(source="hf:some/thing"))


def test_offline_the_hub_is_never_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets")
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it went online"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it went online"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^hf:some/thing could not be loaded \(.*\); train or evaluate on it first"):
        load_corpus(DataConfig(source="hf:some/thing"), offline=True)


def test_a_missing_source_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.txt' does not exist"):
        load(tmp_path / "nowhere.txt")
    with pytest.raises(ConfigError, match=r"has no \.txt, \.md, \.json, \.jsonl, \.parquet file"):
        load(tmp_path)


def test_a_mark_at_the_start_of_a_file_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\n\ntwo".encode("utf-8-sig"))
    assert [*read_documents(tmp_path / "a.txt", DataConfig())] == ["one", "two"]


def test_a_separator_may_be_written_as_a_shell_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree")
    assert [*read_documents(tmp_path / "a.txt", DataConfig(separator=r"\n"))] == ["one", "two", "three"]

"""Data in a stream: the same rows and batches as from memory, whatever its packing, and however often it was killed."""

import gzip
import json
import random
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from some_moe.config import ConfigError, DataConfig
from some_moe.data import dataset as module
from some_moe.data import tokenizer as tokenizing
from some_moe.data.batches import Batches, Rows, pack_stories
from some_moe.data.dataset import prepare
from some_moe.data.readers import read_documents
from some_moe.data.sources import SPLITS, load_corpus
from some_moe.errors import FailureError
from some_moe.system import cache, streams
from some_moe.system.processes import python_command, python_environment
from tests.data.whole import digest_whole, encode_whole, in_lists, pack_whole, read_whole, split_whole

DRAW = random.Random(0)
NOUNS = ["fox", "hill", "bird", "tree", "pond", "frog", "moon", "shoe", "cake", "bear"]
STORIES = [
    " ".join(["Story", str(number), *DRAW.choices(NOUNS, k=DRAW.choice([3, 20, 90]))]) + "." for number in range(300)
]
STORIES += STORIES[::7]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small source is read, encoded and saved in many pieces."""
    monkeypatch.setattr(streams, "PIECE", 98)
    monkeypatch.setattr(streams, "PACKED_PIECE", 89)
    monkeypatch.setattr(tokenizing, "CHUNK", 1500)
    monkeypatch.setattr(module, "SHARD", 5000)


def as_lines(stories: list[str]) -> str:
    return "".join(json.dumps({"text": story}) + "\n" for story in stories)


def as_list(stories: list[str]) -> str:
    return json.dumps([{"text": story} for story in stories], indent=1)


FORMS: dict[str, Callable[[list[str]], str]] = {
    "a.jsonl": as_lines,
    "a.json": as_list,
    "a.txt": "\n \n\n".join,
    "b.txt": "<|endoftext|>\n".join,
}


def write_source(path: Path, stories: list[str] = STORIES) -> Path:
    path.write_text("\ufeff" + FORMS[path.name](stories), encoding="utf-8")
    return path


# --- the same as from memory --------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("long", ["cut", "split"])
@pytest.mark.parametrize("name", FORMS)
def test_a_source_read_in_pieces_gives_what_it_gives_in_memory(tmp_path: Path, name: str, long: Any) -> None:
    path = write_source(tmp_path / name)
    config = DataConfig(source=str(path), seq_len=24, long=long, train_subset_size=200)
    wanted = split_whole({"all": read_whole(path, config)}, config)
    assert in_lists(load_corpus(config)) == wanted
    dataset = prepare(config, 400)
    assert dataset.tokenizer.to_json() == tokenizing.Tokenizer.train(wanted.train, 400).to_json()
    assert dataset.digest == digest_whole(wanted, dataset.tokenizer, config)
    assert (dataset.duplicates, dataset.unused) == (wanted.duplicates, wanted.unused)
    assert [getattr(dataset, split).num_stories for split in SPLITS] == [
        len(getattr(wanted, split)) for split in SPLITS
    ]


@pytest.mark.parametrize("batching", ["padded", "bucketed", "packed"])
@pytest.mark.parametrize("long", ["cut", "split"])
def test_batches_of_mapped_rows_equal_those_of_rows_in_memory(tmp_path: Path, batching: Any, long: Any) -> None:
    config = DataConfig(source=str(write_source(tmp_path / "a.jsonl")), seq_len=24, long=long, batching=batching)
    dataset = prepare(config, 400)
    texts = in_lists(load_corpus(config)).train
    in_memory = Rows(*encode_whole(texts, dataset.tokenizer, config))
    mapped, whole = (Batches(rows, config, rows_a_step=4, seed=3) for rows in (dataset.train, in_memory))
    pairs = [*zip(mapped.epoch(1), whole.epoch(1), strict=True)]
    assert len(pairs) > 9
    for left, right in pairs:
        for name, value in vars(left).items():
            assert value is None or torch.equal(value, getattr(right, name)), name


@pytest.mark.parametrize(
    "splits",
    [
        {"train": 0.6, "valid": 0.2, "test": 0.2},
        {"train": 0.7, "valid": 0.3},
        {"train": 0.8, "test": 0.2},
        {"train": 0.5, "all": 0.5},
        {"all": 0.5, "valid": 0.5},
        {"all": 0.004, "valid": 0.004},
        {"all": 0.01},
    ],
    ids=str,
)
def test_splits_told_by_names_are_those_of_lists_in_memory(tmp_path: Path, splits: dict[str, float]) -> None:
    told, start = {}, 0
    for split, share in splits.items():
        told[split] = STORIES[start : start + int(len(STORIES) * share)]
        start += len(told[split]) - 1  # the last one is in two files
        (tmp_path / f"{split}-1.jsonl").write_text(as_lines(told[split]))
    config = DataConfig(source=str(tmp_path), val_subset_size=30)
    assert in_lists(load_corpus(config)) == split_whole(told, config)


@pytest.mark.parametrize("count", [0, 1, 50, 3000])
def test_rows_are_packed_as_by_lists(count: int) -> None:
    lengths = np.minimum(np.random.default_rng(count).integers(1, 100, count), 64)
    groups = pack_stories(lengths, 64)
    assert [groups[row] for row in range(len(groups))] == pack_whole(lengths, 64)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('ab"\\\n é{}[],', max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(VALUES, max_size=4),
    st.sampled_from([None, 1]),
    st.integers(0, 200),
    st.sampled_from(["", "x", ",", "]", '"', "9"]),
    st.integers(1, 40),
)
def test_a_list_in_pieces_is_read_as_json_reads_it(
    values: list[Any], indent: int | None, place: int, wrong: str, size: int
) -> None:
    text = json.dumps(values, indent=indent)
    text = text[: place + 1] + wrong + text[place + 1 :]
    pieces = iter([text[start : start + size] for start in range(0, len(text), size)])
    try:
        wanted: Any = json.loads(text)
    except json.JSONDecodeError as error:
        wanted = f" (its line {error.lineno})" if error.lineno > 1 else " is not JSON;"
    try:
        assert [*streams.read_list(next(pieces), pieces, "it")] == wanted
    except ConfigError as error:
        assert isinstance(wanted, str) and wanted in str(error)  # noqa: PT017, PT018


# --- packed -------------------------------------------------------------------------------------------------


def pack_zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard", reason="zstandard is not installed: pip install zstandard").compress(data)


PACKERS = {".gz": gzip.compress, ".zst": pack_zstd}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("name", FORMS)
def test_a_packed_source_gives_what_it_gives_unpacked(tmp_path: Path, name: str, packing: str) -> None:
    data = write_source(tmp_path / name).read_bytes()
    packed = tmp_path / f"packed{Path(name).suffix}{packing.upper()}"
    half = len(data) // 2
    packed.write_bytes(PACKERS[packing](data[:half]) + PACKERS[packing](data[half:]) + bytes(300))  # in two parts
    assert [*read_documents(packed, DataConfig())] == [*read_documents(tmp_path / name, DataConfig())]


@pytest.mark.parametrize("packing", PACKERS)
def test_a_packed_file_that_is_damaged_or_cut_off_is_named(tmp_path: Path, packing: str) -> None:
    good = PACKERS[packing](as_lines(STORIES).encode())
    file = tmp_path / f"a.jsonl{packing}"
    for bad in (b"", good[:-1], good[: len(good) // 2], good[:3], b"no packing at all", good + b"more"):
        file.write_bytes(bad)
        with pytest.raises(ConfigError, match=r"a\.jsonl\.(gz|zst)' is no whole (gzip|zstd) file; pack it again"):
            load_corpus(DataConfig(source=str(file)))


def test_a_zstd_file_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("some_moe.system.reading.UNPACKED_FREE", 1 << 16)
    (tmp_path / "a.txt.zst").write_bytes(pack_zstd(b"a" * (1 << 24)))
    with pytest.raises(ConfigError, match=r"a.txt.zst' gives more than the \d+,\d+ bytes that it may"):
        load_corpus(DataConfig(source=str(tmp_path / "a.txt.zst")))


def test_without_zstandard_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zstandard", "compression", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.txt.zst").write_bytes(b"(")
    with pytest.raises(ConfigError, match=r"^reading \.zst needs zstandard; run pip install zstandard$"):
        load_corpus(DataConfig(source=str(tmp_path / "a.txt.zst")))


def test_what_the_library_of_python_3_14_unpacks_is_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed: pip install zstandard")
    fake: Any = types.ModuleType("compression.zstd")
    fake.ZstdDecompressor = lambda: zstandard.ZstdDecompressor().decompressobj()
    fake.ZstdError = zstandard.ZstdError
    monkeypatch.setitem(sys.modules, "compression", types.ModuleType("compression"))
    monkeypatch.setitem(sys.modules, "compression.zstd", fake)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"one\n\ntwo"))
    assert [*read_documents(tmp_path / "a.txt.zst", DataConfig())] == ["one", "two"]


# --- large files --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("name", "good", "bad", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n', b'{"text": oops}\n', "line 301, is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n', b'{"story": "b"}\n', "line 301, has no text"),
        ("a.json", b'{"text": "a"},\n', b'{"text": oops},\n', "is not JSON (its line 301)"),
        ("a.json", b'{"text": "a"},\n', b'{"story": "b"},\n', "record 301, has no text"),
        ("a.txt", b"a\n\n", b"\xff\n\n", "is not UTF-8 text (byte 900)"),
        ("a.txt", b"\xc3\xa9\n\n", b"\xc3\n\n", "is not UTF-8 text (byte 1200)"),
        ("a.txt", b"a\n\n", b"a\0b", "is binary, not text"),
    ],
)
def test_what_is_wrong_in_the_middle_is_named_with_its_place(
    tmp_path: Path, name: str, good: bytes, bad: bytes, words: str
) -> None:
    begin, end = (b"[", b'"end"]') if name == "a.json" else (b"", b"")
    (tmp_path / name).write_bytes(begin + good * 300 + bad + good * 300 + end)
    with pytest.raises(ConfigError) as error:
        load_corpus(DataConfig(source=str(tmp_path / name)))
    assert words in str(error.value)


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = write_source(tmp_path / "a.jsonl"), module.survey

    def survey(*words: Any) -> Any:
        with path.open("a") as file:
            file.write(as_lines(["One more."]))
        return real(*words)

    monkeypatch.setattr(module, "survey", survey)
    with pytest.raises(ConfigError, match="was changed while it was read; run it again"):
        prepare(DataConfig(source=str(path)), 400)


def test_a_large_corpus_teaches_its_vocabulary_by_an_even_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(source=str(write_source(tmp_path / "a.jsonl")))
    corpus = load_corpus(config)
    size = corpus.count_bytes("train")
    for learned, every in ((size, 1), (size - 1, 2), (size // 3 + 1, 3)):
        monkeypatch.setattr(module, "LEARNED", learned)
        monkeypatch.setenv("SOME_CACHE", str(tmp_path / str(every)))
        texts = [*corpus.read("train")][::every]
        assert prepare(config, 500).tokenizer.to_json() == tokenizing.Tokenizer.train(texts, 500).to_json()


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1000))
    with pytest.raises(FailureError, match=r"' needs up to 0\.0 GB in .*cache', and 0\.0 GB are free; make"):
        prepare(DataConfig(source=str(write_source(tmp_path / "a.jsonl"))), 400)


@pytest.mark.usefixtures("small_pieces")
def test_progress_is_told_from_the_begin_to_the_end(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    prepare(DataConfig(source=str(write_source(tmp_path / "a.jsonl"))), 400, track=lambda *one: told.append(one))
    assert told.pop() == ("", 0, 0)
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert len(told) > 9
    assert told[-1][1] == told[-1][2]


# --- killed, and two at once --------------------------------------------------------------------------------


def read_files(folder: Path) -> dict[str, bytes]:
    (entry,) = folder.iterdir()
    return {file.name: file.read_bytes() for file in entry.iterdir()}


class KilledError(Exception):
    """The process ends here."""


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kept", [0, 1, 4])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_killed_preparation_goes_on_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, damaged: bool
) -> None:
    config = DataConfig(source=str(write_source(tmp_path / "a.jsonl")), seq_len=24, long="split")
    wanted = prepare(config, 400)
    undisturbed = read_files(tmp_path / "cache")
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "again"))
    real, calls, learned = module.Shards.append, [], []

    def append(self: module.Shards, *words: Any) -> None:
        real(self, *words)
        calls.append(self.next)
        self.files["train.ids"].file.flush()  # what is written behind the last mark is cut off
        if len(calls) == 4 * kept + 2:
            raise KilledError

    monkeypatch.setattr(module.Shards, "append", append)
    with pytest.raises(KilledError):
        prepare(config, 400)
    (entry,) = cache.list_entries()
    assert not entry.is_whole
    if damaged:
        (tmp_path / "again" / entry.name / "train.ids").write_bytes(b"damaged")
    monkeypatch.setattr(module, "_learn", lambda *_: learned.append(1) or wanted.tokenizer)
    done = len(calls)
    assert prepare(config, 400).digest == wanted.digest
    assert read_files(tmp_path / "again") == undisturbed
    if kept and not damaged:
        assert not learned
        assert calls[done] > calls[0]
    else:
        assert learned


@pytest.mark.usefixtures("small_pieces")
def test_two_at_once_prepare_the_same_data_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, made = DataConfig(source=str(write_source(tmp_path / "a.jsonl"))), []
    real, found = module._learn, []

    def learn(*words: Any) -> Any:
        made.append(1)
        return real(*words)

    monkeypatch.setattr(module, "_learn", learn)

    def run() -> None:
        found.append(prepare(config, 400).digest)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len({*found}) == len(made) == 1


PREPARING = """
import sys
from some_moe.config import DataConfig
from some_moe.data import dataset
dataset.SHARD = 1 << 18
print(dataset.prepare(DataConfig(source=sys.argv[1]), 300).digest)
"""


@pytest.mark.slow
def test_processes_that_are_killed_while_others_wait_leave_the_same_data(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(as_lines([f"{story} {number}" for number in range(8) for story in STORIES]))
    wanted = prepare(DataConfig(source=str(path)), 300).digest
    environment = python_environment() | {"SOME_CACHE": str(tmp_path / "other")}
    words = python_command("-c", PREPARING, str(path))
    start = lambda: subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)  # noqa: E731
    first, second = start(), start()
    while not [*(tmp_path / "other").glob("*/train.ids")] and first.poll() is None:
        pass
    first.kill()
    first.communicate()
    third = start()
    assert [process.communicate()[0].strip() for process in (second, third)] == [wanted] * 2


# --- memory -------------------------------------------------------------------------------------------------

MEASURED = """
import resource, sys
from some_moe.config import DataConfig
from some_moe.data.dataset import prepare
from some_moe.data.batches import Batches
config = DataConfig(source=sys.argv[1], seq_len=64, long="split", batching=sys.argv[2])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
dataset = prepare(config, 300)
batches = Batches(dataset.train, config, rows_a_step=8, seed=0).epoch(0)
for _ in range(3):
    next(batches)
batches.close()
print(peak(), len(dataset.train.ids))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    """Lists of texts and of ids took thirty times the bytes of the source."""
    environment = python_environment() | {"SOME_CACHE": str(tmp_path / "other"), "OMP_NUM_THREADS": "1"}
    peaks = []
    for megabytes in (2, 40):
        path = tmp_path / f"{megabytes}.jsonl"
        with path.open("w") as file:
            for number in range(megabytes * 500):
                file.write(as_lines([f"{number} " + " ".join(DRAW.choices(NOUNS, k=400))]))
        words = python_command("-c", MEASURED, str(path), "bucketed")
        told = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.split()
        peaks.append(int(told[0]))
    assert peaks[1] - peaks[0] < 40

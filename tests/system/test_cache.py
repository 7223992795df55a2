"""The cache: sealed, bounded, the longest unused first to go, and done without where it cannot be used."""

import os
from pathlib import Path

import numpy as np
import pytest

from some_moe.errors import ConfigError
from some_moe.system import cache
from some_moe.system.files import HOST

ARRAYS = {"a": np.arange(1000)}
LABEL = {"source": "own.txt", "tokens": "1000"}
NO_PROCESS = 2**22 + 1  # larger than any process number


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SOME_CACHE_LIMIT", raising=False)
    return tmp_path / "cache"


def load(wanted: str, said: list[str] | None = None) -> tuple[cache.Arrays, str] | None:
    return cache.load(wanted, lambda arrays, about: (arrays, about), (said if said is not None else []).append)


def store(*wanted: str) -> None:
    """Store some, each used a minute after the one before it."""
    for number, one in enumerate(wanted):
        cache.store(one, ARRAYS, "words", LABEL)
        os.utime(cache.file_of(one), (0, 60 * number))


def test_what_was_stored_comes_back_and_nothing_else_does() -> None:
    assert load("one") is None
    store("one")
    found = load("one")
    assert found is not None
    assert np.array_equal(found[0]["a"], ARRAYS["a"])
    assert found[1] == "words"
    assert load("two") is None


def test_a_file_of_something_else_under_this_name_is_not_believed() -> None:
    said: list[str] = []
    store("one")
    cache.file_of("one").rename(cache.file_of("two"))
    assert load("two", said) is None
    assert said[0].endswith("cannot be used (it is not what was stored), and is made again")


def test_the_longest_unused_go_first_and_the_one_just_written_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store("one", "two", "three")
    size = cache.file_of("one").stat().st_size
    load("one")  # used now
    monkeypatch.setenv("SOME_CACHE_LIMIT", str(2.5 * size / 2**30))
    cache.store("four", ARRAYS, "words", LABEL)
    assert [cache.file_of(name).exists() for name in ("one", "two", "three", "four")] == [True, False, False, True]
    monkeypatch.setenv("SOME_CACHE_LIMIT", "0")
    cache.store("five", ARRAYS, "words", LABEL)
    assert [entry.name for entry in cache.list_entries()] == [cache.file_of("five").name]


def test_other_files_in_the_folder_are_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE_LIMIT", "0")
    folder.mkdir()
    (folder / "mine.safetensors").write_text("mine")
    store("one", "two")
    cache.clear()
    assert [path.name for path in folder.iterdir()] == ["mine.safetensors"]


def test_what_a_dead_process_left_half_written_is_removed(folder: Path) -> None:
    folder.mkdir()
    (folder / f".left.{HOST}-{NO_PROCESS}.tmp").write_text("half")
    (folder / f".being.{HOST}-{os.getppid()}.tmp").write_text("half")
    store("one")
    assert sorted(path.name[:6] for path in folder.glob(".*")) == [".being"]


@pytest.mark.parametrize("limit", ["much", "nan", "-1", "1,5"])
def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setenv("SOME_CACHE_LIMIT", limit)
    with pytest.raises(ConfigError, match=f"SOME_CACHE_LIMIT '{limit}' is not a size in GiB"):
        load("one")


@pytest.mark.parametrize("place", ["/dev/null/below", "a" * 300, "\udcff", "/proc/nowhere"])
def test_a_place_that_cannot_be_used_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / place))
    assert load("one") is None
    cache.store("one", ARRAYS, "words", LABEL)
    assert load("two") is None


def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(cache.file_of("one"))
    assert load("one") is None
    assert cache.list_entries() == []


def test_entries_tell_what_they_are_and_old_ones_are_cleared() -> None:
    store("one", "two")
    load("two")
    cache.file_of("three").write_text("damaged")
    newest, *_, oldest = cache.list_entries()
    assert (newest.source, newest.tokens) in {("own.txt", 1000), (None, None)}
    assert (oldest.name, oldest.source, oldest.tokens) == (cache.file_of("one").name, "own.txt", 1000)
    assert [entry.name for entry in cache.clear(30)] == [oldest.name]
    assert len(cache.clear()) == 2
    assert cache.clear() == []

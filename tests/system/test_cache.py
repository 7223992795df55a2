"""The cache: sealed, bounded, the longest unused first to go, and done without where it cannot be used."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from some_moe.errors import ConfigError
from some_moe.system import cache
from some_moe.system.files import HOST

LABEL = {"source": "own.txt", "tokens": 1000, "files": ["a"]}
NO_PROCESS = 2**22 + 1  # larger than any process number


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SOME_CACHE_LIMIT", raising=False)
    return tmp_path / "cache"


class NothingThereError(Exception):
    """Something was to be made."""


def build(folder: Path, about: cache.About) -> tuple[bytes, cache.About]:
    return (folder / "a").read_bytes(), about


def load(wanted: str, said: list[str] | None = None) -> tuple[bytes, cache.About] | None:
    def fail(*_: object) -> cache.About:
        raise NothingThereError

    try:
        return cache.obtain(wanted, build, fail, (said if said is not None else []).append)
    except NothingThereError:
        return None


def keep(wanted: str) -> tuple[bytes, cache.About]:
    def make(folder: Path, *_: object) -> cache.About:
        (folder / "a").write_bytes(bytes(1000))
        return {**LABEL}

    return cache.obtain(wanted, build, make, [].append)


def store(*wanted: str) -> None:
    """Store some, each used a minute after the one before it."""
    for number, one in enumerate(wanted):
        keep(one)
        os.utime(cache.folder_of(one), (0, 60 * number))


def test_what_was_stored_comes_back_and_nothing_else_does() -> None:
    assert load("one") is None
    store("one")
    found = load("one")
    assert found is not None
    assert found[0] == bytes(1000)
    assert found[1].items() >= LABEL.items()
    assert load("two") is None


def test_a_file_of_something_else_under_this_name_is_not_believed() -> None:
    said: list[str] = []
    store("one")
    cache.folder_of("one").rename(cache.folder_of("two"))
    assert load("two", said) is None
    assert said[0].endswith("cannot be used (it is not what was stored), and is made again")


def test_the_longest_unused_go_first_and_the_one_just_written_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store("one", "two", "three")
    size = cache.list_entries()[0].bytes
    load("one")  # used now
    monkeypatch.setenv("SOME_CACHE_LIMIT", str(2.5 * size / 2**30))
    keep("four")
    assert [cache.folder_of(name).exists() for name in ("one", "two", "three", "four")] == [True, False, False, True]
    monkeypatch.setenv("SOME_CACHE_LIMIT", "0")
    keep("five")
    assert [entry.name for entry in cache.list_entries()] == [cache.folder_of("five").name]


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
    assert keep("one")[0] == bytes(1000)
    assert load("two") is None


def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(cache.folder_of("one"))
    assert cache.list_entries() == []
    assert load("one") is None
    store("two")
    for name in ("a", cache.ABOUT):
        (cache.folder_of("two") / name).unlink()
        os.mkfifo(cache.folder_of("two") / name)
        assert load("two") is None


def test_entries_tell_what_they_are_and_old_ones_are_cleared() -> None:
    store("one", "two")
    load("two")
    cache.folder_of("three").with_suffix(".safetensors").write_text("of an older version")
    newest, *_, oldest = cache.list_entries()
    assert (newest.source, newest.tokens) in {("own.txt", 1000), (None, None)}
    assert (oldest.name, oldest.source, oldest.tokens) == (cache.folder_of("one").name, "own.txt", 1000)
    assert [entry.name for entry in cache.clear(30)] == [oldest.name]
    assert len(cache.clear()) == 2
    assert cache.clear() == []


def test_what_is_half_made_is_listed_gone_on_with_and_cleared() -> None:
    def stop(folder: Path, half: cache.About, save: Callable[[cache.About], None]) -> cache.About:
        heard.append(half)
        (folder / "a").write_bytes(b"half")
        save(LABEL | {"tokens": 500})
        raise NothingThereError

    heard: list[cache.About] = []
    for _ in range(2):
        with pytest.raises(NothingThereError):
            cache.obtain("one", build, stop, [].append)
    assert (heard[0], heard[1]["tokens"]) == ({}, 500)
    (entry,) = cache.list_entries()
    assert (entry.source, entry.tokens, entry.is_whole) == ("own.txt", 500, False)
    file = cache.folder_of("one") / cache.ABOUT
    file.write_text(file.read_text().replace("500", "501"))
    with pytest.raises(NothingThereError):
        cache.obtain("one", build, stop, [].append)
    assert heard[2] == {}
    assert [entry.name for entry in cache.clear()] == [cache.folder_of("one").name]
    assert keep("one")[0] == bytes(1000)


def test_what_is_being_made_is_not_cleared_and_another_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(cache, "WAIT_SECONDS", 0.01)

    def make(folder: Path, *_: object) -> cache.About:
        assert cache.clear() == []
        thread.start()
        while not said:
            thread.join(0.01)
        (folder / "a").write_bytes(b"first")
        return {**LABEL}

    found: list[bytes] = []
    second = lambda: found.append(cache.obtain("one", build, make, said.append)[0])  # noqa: E731
    thread = threading.Thread(target=second)
    assert cache.obtain("one", build, make, said.append)[0] == b"first"
    thread.join()
    assert found == [b"first"]
    assert said == ["another process is preparing the same data; waiting for it …"]

"""`some cache`: what is kept is listed and cleared."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from some_moe.cli import main
from some_moe.commands.cache import format_size
from some_moe.system import cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SOME_CACHE_LIMIT", raising=False)


def fill() -> None:
    for wanted, source in (("one", "own.txt"), ("two", "stories\x1b[2J")):
        label = {"source": source, "tokens": 2000, "files": []}
        cache.obtain(wanted, lambda *_: True, lambda *_, label=label: label, print)
    os.utime(cache.folder_of("one"), (0, 0))


def leave_half() -> None:
    def stop(_folder: Path, _half: cache.About, save: Callable[[cache.About], None]) -> cache.About:
        save({"source": "large.jsonl.zst", "tokens": 3_000_000})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.obtain("three", lambda *_: True, stop, print)


def test_the_cache_is_listed_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["cache", "list"]) == 0
    assert capsys.readouterr().out == f"0 B of at most 10.0 GiB in {tmp_path / 'cache'}\n"
    fill()
    assert main(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [word in lines[0] for word in ("name", "source", "tokens", "size", "last used")] == [True] * 5
    assert "2,000" in lines[-2]
    assert lines[-2].endswith("1970-01-01 00:00")
    assert main(["cache", "list", "--json"]) == 0
    said = capsys.readouterr().out
    assert "\\u001b" not in said
    found = json.loads(said)
    assert [entry["source"] for entry in found["entries"]] == ["stories\ufffd[2J", "own.txt"]
    assert found["bytes"] == sum(entry["bytes"] for entry in found["entries"])


def test_what_was_left_half_made_is_listed_and_cleared_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    leave_half()
    assert main(["cache", "list"]) == 0
    line = capsys.readouterr().out.splitlines()[-2]
    assert "large.jsonl.zst" in line
    assert "half-made" in line
    assert main(["cache", "clear"]) == 0
    assert not cache.list_entries()


def test_old_files_are_cleared_then_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fill()
    assert main(["cache", "clear", "--older-than", "30"]) == 0
    assert capsys.readouterr().out.startswith("removed 1 entry, ")
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out.endswith(f"from {tmp_path / 'cache'}\n")
    assert not cache.list_entries()


@pytest.mark.parametrize("days", ["soon", "-1", "²", "1" * 5000, "", "1.5"])
def test_days_that_are_none_are_refused(capsys: pytest.CaptureFixture[str], days: str) -> None:
    fill()
    assert main(["cache", "clear", f"--older-than={days}"]) == 2
    assert "is not a number of days; give one such as 30" in capsys.readouterr().err
    assert len(cache.list_entries()) == 2


def test_a_folder_that_may_not_be_read_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    assert main(["cache", "list"]) == 2
    assert "cannot be used (Permission denied)" in capsys.readouterr().err


def test_sizes_have_a_unit_that_suits_them() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 5 << 20, 1 << 40)] == [
        *("0 B", "1023 B", "1.0 KiB", "5.0 MiB", "1,024.0 GiB")
    ]

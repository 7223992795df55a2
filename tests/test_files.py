"""A file is there whole or not at all, and on the disk before it gets its name."""

import os
from pathlib import Path

import pytest

from some_moe.files import write_beside, write_whole


def test_text_and_bytes_take_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for contents in ("Gänse\n", b"\x89PNG\r\n"):
        write_whole(path, contents)
        assert path.read_bytes() == (contents.encode() if isinstance(contents, str) else contents)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "result.json", []

    def sync(descriptor: int) -> None:
        assert not path.exists()
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", sync)
    write_whole(path, "{}")
    assert synced == [2]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "collected.safetensors"
    write_whole(path, "old")

    def write_half() -> None:
        with write_beside(path) as scratch:
            scratch.write_text("half of the n")
            raise failure

    with pytest.raises(type(failure)):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_does_not_exist_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "no" / "place.txt", "text")

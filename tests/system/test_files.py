"""A file is there whole or not at all, and on the disk before it gets its name."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from some_moe.errors import ConfigError
from some_moe.system.files import HOST, clear_scratch, inside, name_scratch, write_beside, write_whole


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


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real.html", tmp_path / "link.html"
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_a_device_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    write_whole(Path(os.devnull), "away with it")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(Path("/dev/full"), "x" * 100_000)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "text")


def test_a_file_is_as_readable_as_the_umask_allows_whoever_made_it(tmp_path: Path) -> None:
    path, before = tmp_path / "model.safetensors", os.umask(0o022)
    try:
        with write_beside(path) as scratch:
            scratch.write_text("tensors")
            scratch.chmod(0o600)  # as safetensors leaves it
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 127)
    write_whole(path, "text")
    assert path.read_text() == "text"


def test_scratch_files_of_processes_that_are_gone_are_cleared(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, own, other = (tmp_path / f".page.html.{who}.tmp" for who in (f"{HOST}-{gone.pid}", f"{HOST}-1", "ffff-1"))
    for file in (left, own, other):
        file.touch()
    clear_scratch(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([own, other])


def test_what_leads_out_of_a_folder_is_refused(tmp_path: Path) -> None:
    folder, secret = tmp_path / "run", tmp_path / "secret.txt"
    folder.mkdir()
    secret.touch()
    (folder / "out.html").symlink_to(secret)
    (folder / "within.html").symlink_to(folder / "page.html")
    (folder / "round").symlink_to(folder / "round")
    assert inside(folder, "page.html") == folder / "page.html"
    assert inside(folder, "within.html") == folder / "within.html"
    inside(folder, "round")  # opened, it is refused by the system
    for name in ("out.html", "../secret.txt", str(secret)):
        with pytest.raises(ConfigError, match=r"leads out of its folder, to .*secret\.txt"):
            inside(folder, name)
    alias = tmp_path / "alias"
    alias.symlink_to(folder)
    assert inside(alias, "page.html") == alias / "page.html"


def test_writing_clears_what_was_left_of_the_same_file(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, other = (tmp_path / f".{name}.{HOST}-{gone.pid}.tmp" for name in ("page[1].html", "other.html"))
    for file in (left, other):
        file.touch()
    write_whole(tmp_path / "page[1].html", "page")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "page[1].html", other])


def test_a_link_in_the_place_of_a_scratch_file_is_not_written_through(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    name_scratch(tmp_path / "page.html").symlink_to(secret)
    write_whole(tmp_path / "page.html", "page")
    assert secret.read_text() == "mine"
    assert (tmp_path / "page.html").read_text() == "page"

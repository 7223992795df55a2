"""The watch sees what changes a folder, and does to it what an attack says."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tests.kills.moments import Attack, Watch


@contextmanager
def watching(root: Path, attack: Attack | None = None) -> Iterator[Watch]:
    watch = Watch(str(root), attack or Attack())
    watch.install()
    try:
        yield watch
    finally:
        watch.remove()


def append(path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("a line\n")
        file.flush()


def write_by_descriptor(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"text")
    os.fsync(descriptor)
    os.close(descriptor)


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a text": (lambda root: (root / "x").write_text("text"), ["create x", "write x", "within write x"]),
    "a line": (lambda root: append(root / "x"), ["create x", "write x", "within write x"]),
    "a descriptor": (lambda root: write_by_descriptor(root / "x"), ["create x", "write x", "within write x"]),
    "an empty file": (lambda root: (root / "x").touch(), ["create x"]),
    "tensors": (lambda root: save_file({"t": torch.zeros(9)}, root / "x"), ["tensors x", "within tensors x"]),
    "a folder": (lambda root: (root / "new").mkdir(), ["mkdir new"]),
    "a rename": (lambda root: os.replace(root / "old" / "file", root / "x"), ["rename x"]),
    "a link": (lambda root: os.link(root / "old" / "file", root / "x"), ["link x"]),
    "a removal": (lambda root: (root / "old" / "file").unlink(), ["unlink old/file"]),
    "a tree removed": (lambda root: shutil.rmtree(root / "old"), ["unlink old/file", "rmdir old"]),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path.resolve() / "root"
    (root / "old").mkdir(parents=True)
    (root / "old" / "file").write_text("before")
    return root


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_below_the_folder_is_a_moment(root: Path, change: str) -> None:
    act, labels = CHANGES[change]
    with watching(root) as watch:
        act(root)
    assert watch.labels == labels


def test_what_is_read_or_lies_elsewhere_is_no_moment(root: Path) -> None:
    with watching(root) as watch:
        (root / "old" / "file").read_text()
        list(root.iterdir())
        (root.parent / "elsewhere").write_text("text")
    assert watch.labels == []


def test_processes_of_their_own_share_the_names_of_their_moments(root: Path) -> None:
    watch = Watch(str(root), Attack())
    assert watch.label(f"{root}/keys/.step-12.safetensors.00c0ffee-123.tmp") == "keys/.step-N.safetensors.tmp"


@pytest.mark.parametrize("change", ["a text", "a line"])
def test_a_full_disk_takes_half_and_refuses_the_rest(root: Path, change: str) -> None:
    with watching(root, Attack("full", moment=2)), pytest.raises(OSError, match="No space left") as refusal:
        CHANGES[change][0](root)
    assert refusal.value.errno == errno.ENOSPC
    assert (root / "x").read_text() in ("te", "a l")


def test_a_full_disk_refuses_tensors_in_the_words_of_safetensors_and_still_removes(root: Path) -> None:
    with watching(root, Attack("full", moment=1)):
        with pytest.raises(SafetensorError, match="os error 28"):
            save_file({"t": torch.zeros(9)}, root / "x")
        shutil.rmtree(root / "old")
    assert 0 < (root / "x").stat().st_size < 100
    assert not (root / "old").exists()


@pytest.mark.parametrize("change", ["a text", "tensors", "a folder", "a rename", "a removal"])
def test_a_read_only_folder_stays_as_it_was(root: Path, change: str) -> None:
    with watching(root, Attack("readonly", moment=1)), pytest.raises((OSError, SafetensorError), match="Read-only"):
        CHANGES[change][0](root)
    assert [str(path.relative_to(root)) for path in sorted(root.rglob("*"))] == ["old", "old/file"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system does not have")
@pytest.mark.parametrize(("moment", "left"), [(1, None), (2, 0), (3, 2)])
def test_a_process_dies_at_its_moment(root: Path, moment: int, left: int | None) -> None:
    child = os.fork()
    if child == 0:
        with watching(root, Attack("kill", moment)):
            (root / "x").write_text("text")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert ((root / "x").stat().st_size if (root / "x").exists() else None) == left

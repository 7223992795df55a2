"""A folder is renewed as a whole or stays as it was, and no link leads what is written out of it."""

import errno
import os
from pathlib import Path

import pytest

from some_moe.errors import ConfigError, FailureError
from some_moe.system.staging import own_place, publish, stage, writing


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_staged_files_take_the_places_of_older_ones(tmp_path: Path) -> None:
    folder = tmp_path / "analysis"
    (folder / "figures").mkdir(parents=True)
    for name in ("all.json", "kept.json", "figures/old.png", "figures/both.png"):
        (folder / name).write_text("old")
    with stage(folder, "") as scratch:
        (scratch / "figures").mkdir()
        for name in ("all.json", "figures/both.png", "figures/new.png"):
            (scratch / name).write_text("new")
        assert contents(folder)["all.json"] == "old"
        publish(scratch, folder, last="all.json", outdated=("figures/*.png",))
    new = dict.fromkeys(("all.json", "figures/both.png", "figures/new.png"), "new")
    assert contents(folder) == new | {"kept.json": "old"}
    assert sorted(path.name for path in folder.iterdir()) == ["all.json", "figures", "kept.json"]


def fill_the_disk(folder: Path) -> None:
    with stage(folder, "") as scratch:
        (scratch / "all.json").write_text("new")
        raise OSError(errno.ENOSPC, "No space left on device")


def bring_in(folder: Path, name: str) -> None:
    with stage(folder, "") as scratch:
        (scratch / name).parent.mkdir(exist_ok=True)
        (scratch / name).write_text("new")
        publish(scratch, folder, outdated=("gone.json",))


def test_what_fails_on_the_way_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "all.json").write_text("old")
    with pytest.raises(FailureError, match=r"cannot be written .No space left on device.; make room"):
        fill_the_disk(tmp_path)
    assert contents(tmp_path) == {"all.json": "old"}


def test_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    folder, canary = tmp_path / "run", tmp_path / "canary"
    folder.mkdir()
    canary.write_text("mine")
    (folder / "all.json").symlink_to(canary)
    (folder / "gone.json").symlink_to(canary)
    bring_in(folder, "all.json")
    assert canary.read_text() == "mine"
    assert contents(folder) == {"all.json": "new"}
    assert not (folder / "all.json").is_symlink()
    (folder / "figures").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="leads out of its folder"):
        bring_in(folder, "figures/canary")
    assert canary.read_text() == "mine"


def test_a_place_of_ones_own_is_no_link_out_and_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert own_place(tmp_path / "run", "page.html") == tmp_path / "run" / "page.html"
    (tmp_path / "run" / "page.html").symlink_to(tmp_path / "elsewhere.html")
    with pytest.raises(ConfigError, match="leads out of its folder"):
        own_place(tmp_path / "run", "page.html")
    os.mkfifo(tmp_path / "run" / "pipe.html")
    with pytest.raises(ConfigError, match="is a pipe, not a file"):
        own_place(tmp_path / "run", "pipe.html")


def test_a_reader_that_has_gone_is_no_full_disk() -> None:
    with pytest.raises(BrokenPipeError), writing(Path("x")):
        raise BrokenPipeError

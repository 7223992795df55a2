"""One tiny run, trained once, for what needs a model."""

import shutil
from pathlib import Path

import pytest

from some_moe.cli import main


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the preset smoke, cut down. Nobody may write into it: see `run`."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "live-cache"))
    path = tmp_path_factory.mktemp("live") / "tiny"
    train = ["train", "--preset", "smoke", "--name", "tiny", "--out", str(path), "--model.num-experts", "6"]
    train += ["--data.train-subset-size", "32", "--data.val-subset-size", "6", "--train.epochs", "2"]
    assert (
        main(
            [
                *train,
                "--train.snapshot-every",
                "2",
                "--gravity.respawn-below",
                "0.9",
                "--gravity.respawn-patience",
                "1",
                "--gravity.ema-decay",
                "0.8",
            ]
        )
        == 0
    )
    patch.undo()
    return path


@pytest.fixture(scope="session")
def run(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in a folder of its own."""
    path = tmp_path_factory.mktemp("watched") / "tiny"
    shutil.copytree(trained, path)
    return path

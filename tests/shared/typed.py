"""What the tests of typed commands share."""

import shutil
from pathlib import Path

import pytest

from some_moe.cli import main
from some_moe.config import RunConfig

SMOKE = [
    *("train", "--preset", "smoke", "--data.train-subset-size", "24", "--data.val-subset-size", "4"),
    *("--train.epochs", "1", "--train.sample-tokens", "4"),
]


def listing(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must be refused; return its one sentence."""
    capsys.readouterr()
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("some: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


def edit_config(trained: Path, copy: Path, changes: dict[str, str]) -> Path:
    """A copy of the trained run whose config says something else."""
    shutil.copytree(trained, copy)
    RunConfig.load(copy / "config.yaml").override(changes).save(copy / "config.yaml")
    return copy

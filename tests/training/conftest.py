"""Fixtures of the tests that type commands."""

import os
from pathlib import Path

import pytest

from some_moe.cli import main
from tests.shared.typed import SMOKE


@pytest.fixture
def own_place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ["SOME_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    path = tmp_path_factory.mktemp("trained") / "run"
    assert main([*SMOKE, "--out", str(path)]) == 0
    return path

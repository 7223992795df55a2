"""The runs that several tests of this folder are held against."""

import os
from pathlib import Path

import pytest

from some_moe.cli import main
from tests.parallel.members import SETTINGS, Members


@pytest.fixture(scope="session")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture(scope="session")
def alone(members: Members, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that the teams' runs are held against."""
    os.environ["SOME_CACHE"] = str(members.cache)
    path = tmp_path_factory.mktemp("alone") / "run"
    assert main([*SETTINGS, "--out", str(path)]) == 0
    return path

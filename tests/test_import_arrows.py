"""Imports go one way: config ← kernels ← model; config ← data, metrics, experiments; all ← train ← analysis …"""

import ast
from pathlib import Path

import pytest

import some_moe

ROOT = Path(some_moe.__file__).parent
LEAVES = {"config", "files", "hashing"}
ALLOWED = {
    "files": set(),
    "hashing": set(),
    "config": {"files"},
    "kernels": LEAVES,
    "model": LEAVES | {"kernels"},
    "data": LEAVES,
    "metrics": LEAVES,
    "experiments": LEAVES,
    "train": LEAVES | {"kernels", "model", "data", "metrics", "experiments"},
    "analysis": LEAVES | {"kernels", "model", "data", "metrics", "experiments", "train"},
    "report": LEAVES | {"data", "metrics", "experiments", "analysis"},
    "bench": LEAVES | {"kernels", "model", "data", "metrics", "experiments", "train"},
}
ANALYSIS_MAY_REPLAY = {"some_moe.train.checkpoint", "some_moe.train.evaluate", "some_moe.train.runs"}
EVERYWHERE = {"cli", "commands", "__main__", "__init__"}
FILES = sorted(ROOT.rglob("*.py"))
MOST_LINES = 400
LONGER = {"data/lexicon.py": 450}  # lists of words, which nobody reads in order


def imported_modules(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            assert node.module is not None
            # `from some_moe.model import gravity` names a module too.
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    room = room_of(path)
    if room in EVERYWHERE:
        return
    assert room in ALLOWED, f"{room} is not a room of the design; give it its arrows here"
    for name in imported_modules(path):
        if not name.startswith("some_moe.") or name == "some_moe.__version__":
            continue
        target = name.split(".")[1]
        assert target == room or target in ALLOWED[room], f"{room} must not import {name}"
        if room == "analysis" and target == "train":
            assert any(name.startswith(allowed) for allowed in ANALYSIS_MAY_REPLAY), f"analysis must not import {name}"


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) in {"experiments", "config", "files"}])
def test_listing_rooms_never_import_torch(path: Path) -> None:
    assert not [name for name in imported_modules(path) if name.split(".")[0] in {"torch", "numpy"}]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_can_be_read_in_one_sitting(path: Path) -> None:
    most = LONGER.get(path.relative_to(ROOT).as_posix(), MOST_LINES)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= most

"""The house: imports go one way, every room has a budget of lines, and what lists things never loads torch."""

import ast
from pathlib import Path

import pytest

import some_moe

ROOT = Path(some_moe.__file__).parent
LEAVES = {"config", "files", "hashing", "layout", "precision"}
CORE = {"config", "data", "experts", "model", "metrics", "training"}
# Which rooms a room may import. What stands in LAZILY may be imported too, but only within a function.
ALLOWED = {
    "files": set(),
    "hashing": set(),
    "layout": set(),
    "precision": set(),
    "config": {"files"},
    "data": LEAVES,
    "metrics": LEAVES,
    "experts": LEAVES,
    "model": LEAVES | {"experts"},
    "parallel": LEAVES | {"data", "model"},
    "sinks": LEAVES,
    "training": LEAVES | {"data", "experts", "model", "metrics", "parallel", "sinks", "fast"},
    "fast": LEAVES | {"data", "experts", "model", "metrics", "training"},
    "glass": LEAVES | {"data", "experts", "model", "metrics", "training", "lab"},
    "lab": LEAVES | {"data", "experts", "model", "metrics", "training", "glass", "fast"},
    "commands": LEAVES | CORE | {"parallel", "glass", "lab", "cli", "api"},
    "cli": LEAVES,  # commands are named in a table, and imported when one of them runs
    "__main__": {"cli"},
    "api": LEAVES | {"training", "parallel", "sinks", "lab"},
    "__init__": LEAVES | {"api", "fast", "glass", "model", "training"},
}
FILES = sorted(ROOT.rglob("*.py"))


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
    assert room in ALLOWED, f"{room} is not a room of the design; give it its arrows here"
    for name in imported_modules(path):
        if not name.startswith("some_moe.") or name == "some_moe.__version__":
            continue
        target = name.split(".")[1]
        assert target == room or target in ALLOWED[room], f"{room} must not import {name}"


LISTING = [p for p in FILES if room_of(p) in {"config", "files"} or p.is_relative_to(ROOT / "lab" / "registry")]


@pytest.mark.parametrize("path", LISTING, ids=lambda path: str(path.relative_to(ROOT)))
def test_listing_rooms_never_import_torch(path: Path) -> None:
    assert not [name for name in imported_modules(path) if name.split(".")[0] in {"torch", "numpy"}]

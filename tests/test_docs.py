"""What the documents name is there: every station of the walk, every file, every command, every setting."""

import ast
import re
from pathlib import Path

import pytest

from some_moe.cli import COMMANDS
from some_moe.config import RunConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "some_moe"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    # results.md and audit.md are made, see tests/tools/test_documents.py
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in ("results.md", "audit.md")),
]
STATION = re.compile(r"^\| \d+ \| [^|]+ \| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)
WALK = STATION.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
PLACES = (
    ROOT,
    PACKAGE,
    PACKAGE / "glass",
    PACKAGE / "hf",
    PACKAGE / "lab",
    PACKAGE / "experts",
    PACKAGE / "fast" / "ops",
)
OF_A_RUN = ("runs/", "DIR/", "RUN/", "analysis/", "checkpoints/", "keys/")  # folders that training makes


def find_function(path: Path, name: str) -> bool:
    """Whether the file defines `function` or `Class.method`."""
    nodes: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        if not found:
            return False
        nodes = found[0].body
    return True


def read_words(path: Path) -> list[str]:
    """What stands in backticks, outside of blocks of code."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


def test_the_walk_is_short() -> None:
    assert 10 <= len(WALK) <= 15


@pytest.mark.parametrize(("file", "function"), WALK, ids=[file for file, _ in WALK])
def test_every_station_of_the_walk_is_there(file: str, function: str) -> None:
    assert find_function(PACKAGE / file, function)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_python_file_and_folder_that_is_named_exists(path: Path) -> None:
    named = [word.removeprefix("some_moe/") for word in read_words(path) if re.fullmatch(r"[\w./-]+(\.py|/)", word)]
    named = [word for word in named if not word.startswith(OF_A_RUN)]
    missing = [word for word in named if not any((place / word).exists() for place in PLACES)]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        place, _, anchor = target.partition("#")
        file = path.parent / place if place else path
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_and_setting_that_is_named_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for words in re.findall(r"(?:`|^(?:\.venv/bin/)?)some ([a-z]+(?: [a-z]+)?)", text, re.MULTILINE):
        first, _, second = words.partition(" ")
        assert first in COMMANDS, words
        inner = COMMANDS[first][1]
        assert isinstance(inner, str) or not second or second in inner, words
    known = {name.replace("_", "-") for name in RunConfig.field_names()}
    for name in re.findall(r"--((?:model|gravity|data|train)\.[\w-]+)", text):
        assert name.replace("_", "-") in known, name


def test_every_target_of_make_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in DOCUMENTS:
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)) <= targets

"""What is published: metadata that is true, and a wheel that works where there is no repository."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import some_moe

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_one_version_everywhere_and_a_citation_that_says_the_same() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == PROJECT["version"] == some_moe.__version__
    assert citation["license"] == PROJECT["license"] == "MIT"
    assert {"cff-version", "message", "title", "authors", "type"} <= citation.keys()
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_every_python_that_is_promised_is_tested_by_the_workflow() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    tested = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    promised = [words.rpartition(" :: ")[2] for words in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", words)]
    assert tested == promised
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    asked = {word for command in commands for word in re.findall(r"^make ([a-z-]+)", command)}
    assert {"test", "test-ci", "site"} <= asked <= targets


def test_dev_has_what_every_extra_that_tests_need_has() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras["sweep"]) <= set(extras["dev"])
    assert set(extras["docs"]) <= set(extras["dev"])


@pytest.mark.slow
def test_the_wheel_works_outside_the_repository(tmp_path: Path) -> None:
    """Built and unpacked elsewhere, it lists, refuses, trains, generates and writes a config."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    source = tmp_path / "source"  # a copy: building leaves folders behind
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    subprocess.run(build, cwd=source, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    place = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        metadata = packed.read(next(name for name in names if name.endswith("METADATA"))).decode()
        packed.extractall(place)
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "some_moe").rglob("*.*")}
    assert "some_moe/lab/registry/published.yaml" in files
    assert {name for name in files if not name.endswith(".pyc")} == {name for name in names if "dist-info" not in name}
    assert not [name for name in names if name.startswith(("tests", "tools", "examples", "build"))]
    assert "Classifier: Typing :: Typed" in metadata
    away = tmp_path / "away"
    away.mkdir()
    environment = os.environ | {"PYTHONPATH": str(place), "SOME_CACHE": str(tmp_path / "cache")}

    def some(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "some_moe", *words]
        return subprocess.run(command, cwd=away, env=environment, capture_output=True, text=True, timeout=300)

    where = subprocess.run(
        [sys.executable, "-P", "-c", "import some_moe; print(some_moe.__file__)"],
        cwd=away, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(place))
    assert "commit" not in some("--version").stdout
    assert "A1" in some("experiments", "list").stdout
    assert "usage: some COMMAND" in some("--help").stdout
    assert f"some-moe {PROJECT['version']}, Python" in some("doctor").stdout
    assert "_some()" in some("completion", "bash").stdout
    refused = some("experiments", "compare")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert some("init", "--preset", "smoke").returncode == 0
    trained = some("train", "--config", "config.yaml", "--out", "run")
    assert trained.returncode == 0, trained.stderr
    assert some("generate", "run", "--max-tokens", "5", "--seed", "0").returncode == 0
    assert some("report", "run").returncode == 0
    assert (away / "run" / "report.html").is_file()

"""Runs at a glance: from what they wrote, whatever state it is in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from some_moe.cli import main
from some_moe.config import ConfigError, RunConfig
from some_moe.lab.folders import count_steps, list_runs
from some_moe.lab.registry.presets import find_preset


def make(folder: Path, age: int, **files: str) -> None:
    folder.mkdir(parents=True)
    find_preset("smoke").save(folder / "config.yaml")
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    for file in folder.iterdir():
        os.utime(file, (1_700_000_000 + age, 1_700_000_000 + age))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    log = '{"step": 4, "val_loss": 2.5}\n#torn\n{"step": 8, "train_loss": 2.0}\n[1]\n{"step": 9, "tr'
    make(tmp_path / "runs" / "begun", 2, metrics_jsonl=log)
    result = {"status": "finished", "steps": 24, "val_loss": 1.5, "test_loss": 1.25}
    make(tmp_path / "runs" / "sweep" / "done", 1, result_json=json.dumps(result))
    make(tmp_path / "runs" / "torn", 3, result_json="[" * 5000)
    (tmp_path / "runs" / "other").mkdir()
    return tmp_path / "runs"


def test_each_run_says_how_far_it_is(place: Path) -> None:
    done, begun, torn = list_runs(place)
    assert done == {
        "run": str(place / "sweep" / "done"), "state": "finished", "step": 24, "steps": 24,
        "val_loss": 1.5, "test_loss": 1.25, "changed": "2023-11-14T22:13:21+00:00",
    }  # fmt: skip
    assert (begun["state"], begun["step"], begun["steps"], begun["val_loss"]) == ("unfinished", 8, 24, 2.5)
    assert (torn["state"], torn["step"]) == ("damaged", None)


def test_the_table_names_them_and_loads_no_torch(place: Path) -> None:
    script = "import sys; from some_moe.cli import main; main(['runs']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=place.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:3]] == [
        ["runs/sweep/done", "finished", "24"], ["runs/begun", "unfinished", "8"],
    ]  # fmt: skip


def test_a_place_without_runs_and_one_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="there is no folder 'none'"):
        list_runs("none")


@pytest.mark.parametrize(
    "changes",
    [{}, {"train.max_steps": 5}, {"data.train_subset_size": None}, {"data.batching": "packed", "train.max_steps": 7}],
)
def test_the_steps_are_those_that_the_config_knows(changes: dict[str, object]) -> None:
    for config in (RunConfig().override(changes), find_preset("smoke").override(changes)):
        assert count_steps(config.to_yaml()) == config.known_steps

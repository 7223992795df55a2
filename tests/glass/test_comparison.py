"""Runs beside each other: only what differs is shown, and seeds are taken together."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from some_moe.cli import main
from some_moe.config import RunConfig
from some_moe.glass.figures.curves import MOST_POINTS, average_neighbours, choose_looks, draw_sizes, show_name
from some_moe.glass.inspect.runs import read_run
from some_moe.glass.page.comparison import compare, find_differences, name_runs


def make_copies(run: Path, folder: Path, copies: dict[str, dict[str, Any]]) -> list[Path]:
    """Copies of a run's light files, each with other settings and with its losses shifted by its number."""
    paths = []
    for place, (name, changes) in enumerate(copies.items()):
        path = folder / name
        path.mkdir(parents=True)
        for file in ("metrics.jsonl", "env.json"):
            shutil.copy(run / file, path)
        RunConfig.load(run / "config.yaml").override({"name": name, **changes}).save(path / "config.yaml")
        result = json.loads((run / "result.json").read_text()) | {"test_loss": 2.0 + place}
        (path / "result.json").write_text(json.dumps(result))
        paths.append(path)
    return paths


def test_a_comparison_shows_only_the_settings_that_differ(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = make_copies(run, tmp_path / "many", {"a": {}, "b": {"gravity.alpha": 0.02}})
    assert main(["report", *map(str, paths)]) == 0
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    header = next(line for line in text.splitlines() if line.startswith("| Run |"))
    assert header.startswith("| Run | gravity.alpha | Test loss |")
    assert "beta" not in header
    assert "Lowest test loss: a, 2.0000" in text
    assert "one random seed here" in text
    for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (tmp_path / link).is_file()
    assert (tmp_path / "report.html").is_file()


def test_seeds_of_one_experiment_are_taken_together(run: Path, tmp_path: Path) -> None:
    copies = {"wide-s0": {"train.seed": 0}, "wide-s1": {"train.seed": 1}, "other": {"gravity.beta": 0.0}}
    paths = make_copies(run, tmp_path, copies)
    assert main(["report", *map(str, paths), "--out", str(tmp_path / "c.html")]) == 0
    text = (tmp_path / "c.md").read_text(encoding="utf-8")
    assert re.search(r"^\| wide \| 2 \| 2\.5000 ± 0\.7071 \| .* \| 2\.0000 to 3\.0000 \|$", text, re.M)
    assert [one.group for one in compare([read_run(path) for path in paths])] == ["wide", "wide", "other"]


def test_settings_that_decide_no_result_are_no_difference(run: Path, tmp_path: Path) -> None:
    changes = {"train.log_every": 7, "train.device": "auto", "train.keep_last": 5}
    paths = make_copies(run, tmp_path, {"a": {}, "b": changes})
    runs = [read_run(path) for path in paths]
    assert find_differences(runs) == []
    assert len({one.group for one in compare(runs)}) == 1


def test_many_differences_get_a_table_of_their_own(run: Path, tmp_path: Path) -> None:
    changes = {f"gravity.{name}": 0.5 for name in ("alpha", "beta", "delta", "ema_decay", "theta_percentile")}
    changes |= {"train.clip": 2.0, "train.warmup": 0.2}
    paths = make_copies(run, tmp_path, {"a": {}, "b": changes})
    assert main(["report", *map(str, paths), "--out", str(tmp_path / "c.html")]) == 0
    text = (tmp_path / "c.md").read_text(encoding="utf-8")
    assert "| Run | Test loss |" in text
    assert "| Setting | a | b |" in text
    assert "| gravity.alpha | 0.01 | 0.5 |" in text


def test_runs_on_different_text_come_with_a_warning(run: Path, tmp_path: Path) -> None:
    paths = make_copies(run, tmp_path, {"a": {}, "b": {"model.vocab_size": 600}})
    assert main(["report", *map(str, paths), "--out", str(tmp_path / "c.html")]) == 0
    assert "Compare their bits per byte" in (tmp_path / "c.md").read_text(encoding="utf-8")


def test_runs_of_one_name_are_told_apart(run: Path, tmp_path: Path) -> None:
    first, second = make_copies(run, tmp_path / "x", {"a": {"name": "same"}, "b": {"name": "same"}})
    assert name_runs([read_run(first), read_run(second)]) == ["a", "b"]
    twin = tmp_path / "y" / "a"
    shutil.copytree(first, twin)
    assert name_runs([read_run(first), read_run(twin)]) == [str(first), str(twin)]


def test_series_share_a_look_within_a_group(run: Path, tmp_path: Path) -> None:
    paths = make_copies(run, tmp_path, {"n-s0": {}, "n-s1": {"train.seed": 1}, "other": {"gravity.beta": 0.0}})
    looks = choose_looks(compare([read_run(path) for path in paths]))
    assert list(looks) == ["n", "other"]
    assert len(set(looks.values())) == 2
    assert draw_sizes([]) is None


def test_names_in_figures_are_neither_mathematics_nor_hidden() -> None:
    assert show_name("cost_$x$") == r"cost_\$x\$"
    assert show_name("_hidden").endswith("_hidden")
    assert not show_name("_hidden").startswith("_")
    assert len(show_name("x" * 99)) == 30


def test_long_curves_are_averaged_and_short_ones_kept() -> None:
    x, y = average_neighbours(range(10), range(10))
    assert y.tolist() == list(range(10))
    x, y = average_neighbours(range(1000), np.ones(1000))
    assert len(x) == len(y) == MOST_POINTS
    assert y.tolist() == [1.0] * MOST_POINTS

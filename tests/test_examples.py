"""Every program of examples/ runs, at small sizes, and prints what it promises."""

import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from some_moe.model.layer import SomeLayer

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What train_on_a_text.py leaves."""
    path = tmp_path_factory.mktemp("examples") / "text"
    run_example("train_on_a_text.py", "--out", path, "--steps", 6, "--stories", 80, "--width", 16)
    return path


def test_every_example_has_a_test() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.name}"' in tests for path in EXAMPLES.glob("*.py"))


def test_a_layer_learns_in_somebodys_transformer(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("layer_in_your_transformer.py", "--steps", 12, "--width", 16, "--experts", 4)
    said = capsys.readouterr().out
    first, last = (float(loss) for loss in re.findall(r"loss at the \w+ step +([\d.]+)", said))
    assert last < first
    moved = [float(distance) for distance in re.findall(r"keys moved by ([\d.]+)", said)]
    assert len(moved) == 2
    assert min(moved) > 0


def test_a_text_is_trained_on_and_gone_on_with(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = trained.with_name("text.txt")
    assert text.read_text(encoding="utf-8").count("\n\n") >= 79
    run_example("train_on_a_text.py", text, "--out", trained, "--steps", 6, "--width", 16, "--prompt", "A dog")
    said = capsys.readouterr().out
    assert re.search(r"^test_loss \d\.\d+ nats a token", said, re.MULTILINE)
    assert "\nA dog" in said


def test_a_new_rule_keeps_keys_apart_and_forward_changes_no_state(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = SomeLayer.forward

    def watched(layer: SomeLayer, *given: object, **named: object) -> object:
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        found = forward(layer, *given, **named)  # type: ignore[arg-type]
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
        return found

    monkeypatch.setattr(SomeLayer, "forward", watched)
    run_example("new_gravity_rule.py", "--steps", 8, "--stories", 40, "--width", 16, "--strength", 0.2)
    without, with_rule = (float(cosine) for cosine in re.findall(r"the nearest (-?[\d.]+)", capsys.readouterr().out))
    assert with_rule < without


def test_strength_zero_is_the_same_as_no_new_rule() -> None:
    rule = runpy.run_path(str(EXAMPLES / "new_gravity_rule.py"))["repel_nearest"]
    keys = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert not rule(keys, torch.ones(6), 0.0).any()
    pushed = rule(keys, torch.tensor([0, 1, 1, 1, 1, 1]), 0.5)
    assert not pushed[0].any()
    assert pushed.any()


@pytest.mark.slow
def test_a_run_is_opened_looked_into_and_reported(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    run_example("open_a_run.py", run, "--text", "A dog", "--max-tokens", 400)
    said = capsys.readouterr().out
    assert said.count("goes on with") == 3
    assert "layer 1: gini" in said
    assert (run / "report.html").is_file()


@pytest.mark.slow
def test_branches_are_grown_and_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--documents", 120, "--steps", 4, "--branch-steps", 3, "--width", 16)
    run_example("grow_and_merge.py", "--out", tmp_path / "out", *few)
    said = capsys.readouterr().out
    rows = re.findall(r"^(\w+) +([\d.]+) \((\d+)%\) +([\d.]+) \((\d+)%\) +([\d.]+) \((\d+)%\)$", said, re.MULTILINE)
    assert [row[0] for row in rows] == ["base", "sums", "letters", "merged"]
    assert rows[0][2::2] == ("0", "0", "0")
    assert re.search(r"^sums: [\d.]+ MB beside the base's [\d.]+$", said, re.MULTILINE)

"""Figures go to W&B and trackio by the same calls; what is missing, or fails, is a sentence."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import some_moe
from some_moe.config import ConfigError
from some_moe.lab.registry.presets import find_preset
from some_moe.sinks.trackers import Tracker
from some_moe.training.runs import Run

SMALL = {
    "data.train_subset_size": 24, "data.val_subset_size": 4, "train.epochs": 1, "train.sample_tokens": 0,
    "train.log_every": 1,
}  # fmt: skip


class Fake(ModuleType):
    """What both packages offer, written down."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any, Any]] = []
        self.fails = ""

    def init(self, **named: Any) -> None:
        print("greetings")
        if self.fails == "init":
            raise RuntimeError("No API key\nconfigured.")
        self.calls.append(("init", named, None))

    def log(self, figures: dict[str, float], step: int) -> None:
        if self.fails == "log" and step > 1:
            raise RuntimeError("gone")
        self.calls.append(("log", figures, step))

    def finish(self) -> None:
        self.calls.append(("finish", None, None))


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    fake = Fake(request.param)
    monkeypatch.setitem(sys.modules, request.param, fake)
    return fake


def train(tracker: Fake, out: Path, **more: Any) -> Run:
    config = find_preset("smoke").override(SMALL | {f"train.{tracker.__name__}": True})
    return some_moe.train(config, out=out, display=False, **more)


def test_every_record_arrives_with_its_step(tracker: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tracker, tmp_path / "run")
    kinds = [kind for kind, _, _ in tracker.calls]
    assert kinds == ["init", *["log"] * len(run.metrics), "finish"]
    for (_, figures, step), record in zip(tracker.calls[1:-1], run.metrics, strict=True):
        assert step == record["step"]
        assert "step" not in figures
        if "val_loss" in record:
            assert figures["val_loss"] == record["val_loss"]
            assert figures["layer 1/gini"] == record["layers"][1]["gini"]
        else:
            assert figures["train_loss"] == record["train_loss"]
    begun = tracker.calls[0][1]
    assert begun["config"]["model.top_k"] == run.config.model.top_k
    assert begun["project"] == "some-moe"
    assert begun["resume"] == "allow"
    assert capsys.readouterr().out == ""


def test_a_resumed_run_goes_on_in_the_same_curve_and_a_new_one_does_not(tracker: Fake, tmp_path: Path) -> None:
    run = train(tracker, tmp_path / "run")
    longer = run.config.override({"train.epochs": 2})
    some_moe.train(longer, out=tmp_path / "run", resume="auto", display=False)
    train(tracker, tmp_path / "other")
    named = [call[1].get("id", call[1]["name"]) for call in tracker.calls if call[0] == "init"]
    assert named[0] == named[1]
    assert named[2] != named[0]


def test_a_tracker_that_fails_on_the_way_lets_training_go_on(
    tracker: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker.fails = "log"
    run = train(tracker, tmp_path / "run")
    assert run.result is not None
    assert run.result["status"] == "finished"
    assert capsys.readouterr().err == f"{tracker.__name__} has failed (gone); training goes on without it\n"


def test_one_that_cannot_begin_says_what_to_do(tracker: Fake, tmp_path: Path) -> None:
    tracker.fails = "init"
    with pytest.raises(ConfigError, match=rf"^train\.{tracker.__name__} cannot begin \(No API key configured\); "):
        train(tracker, tmp_path / "run")


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_missing_package_is_one_sentence_and_nothing_is_written(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, package, None)
    config = find_preset("smoke").override(SMALL | {f"train.{package}": True})
    with pytest.raises(ConfigError, match=f"^train.{package} needs the {package} package; run pip install {package}$"):
        some_moe.train(config, out=tmp_path / "run", display=False)
    assert not (tmp_path / "run").exists()


def test_the_real_package_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = Tracker("wandb", tmp_path, find_preset("smoke"))
    sink.add({"step": 1, "train_loss": 2.0})
    sink.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))

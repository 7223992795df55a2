"""A sweep: trials are run folders, killed ones are taken up again, losing ones are stopped, and a page shows it all."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from some_moe.cli import main
from some_moe.glass.page.sweep import format_flag, render_sweep
from some_moe.lab.space import Sweep
from some_moe.lab.sweep import Sweeper
from some_moe.system.processes import take_lock
from some_moe.training.run_folder import LOCK, RunFolder

pytest.importorskip("optuna", reason="optuna is not installed: pip install optuna")
SPACE = """
preset: smoke
settings:
  {data.train_subset_size: 16, data.val_subset_size: 4, train.epochs: 2, train.sample_tokens: 0, train.save_every: 1}
space:
  train.learning_rate: {low: 3e-4, high: 3e-2, log: true}
  model.query: [linear, mlp]
"""


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(SPACE)


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(name) / "sweep.json").read_text())
    return found


class Pretended(Sweeper):
    """A sweep whose runs are arithmetic: what optuna is told, without training."""

    def run_one(self, trial: Any, config: Any, claim: Any, *, watched: bool) -> tuple[str, str]:  # noqa: ARG002
        if config.model.query == "mlp" and config.train.learning_rate < 1e-3:
            return "failed", "it diverged"
        folder = self.out / config.name
        folder.mkdir()
        loss = abs(config.train.learning_rate - 0.01) + 0.5 * config.train.seed
        trial.report(loss, 1)
        self.losses[config.name] = loss
        return ("pruned", "") if trial.should_prune() else ("done", "")

    losses: dict[str, float] = {}  # noqa: RUF012


class Told:
    """A run that writes down what it is sent."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    from some_moe.lab import sweep as module

    monkeypatch.setattr(
        module.RunFolder, "read_result", lambda folder: {"best_val_loss": Pretended.losses[folder.path.name]}
    )

    def run(out: str = "out", **changes: Any) -> dict[str, Any]:
        sweep = Sweep.from_yaml(SPACE).override(changes)
        return Pretended(sweep, sweep.base_config(Path()), Path(out), lambda _: None).run()

    return run


def test_proposals_depend_on_the_seed_alone_however_often_it_was_stopped(pretend: Any) -> None:
    whole = pretend("a", trials=5)
    for trials in (2, 4, 5):
        pieces = pretend("b", trials=trials)
    assert [trial["settings"] for trial in pieces["trials"]] == [trial["settings"] for trial in whole["trials"]]
    other = pretend("c", trials=3, sampler_seed=1)
    assert other["trials"][0]["settings"] != whole["trials"][0]["settings"]


def test_outcome_and_page_tell_every_trial(pretend: Any) -> None:
    found = pretend(trials=14, prune_after=4)
    assert len(found["trials"]) == 14
    assert {"done", "pruned"} <= {trial["state"] for trial in found["trials"]}
    done = [trial["value"] for trial in found["trials"] if trial["state"] == "done"]
    assert found["best"]["value"] == min(done)
    assert sum(found["importances"].values()) == pytest.approx(1)
    page = render_sweep("<script>", found)
    assert page.count("<polyline") == sum(trial["value"] is not None for trial in found["trials"])
    assert "<script" not in page
    assert "default-src &#39;none&#39;" in page
    assert re.search(r"--train\.learning-rate 0\.0\d+ \\\n--model\.query (linear|mlp)", page)


def test_flags_of_the_page_are_one_word_each_for_a_shell() -> None:
    values = {"a.b_c": [0, 1], "a.d": None, "a.e": True, "a.f": "my file.txt", "a.g": 3e-05}
    words = shlex.split(" ".join(f"--{name} {format_flag(value)}" for name, value in values.items()))
    assert words == ["--a.b_c", "[0, 1]", "--a.d", "null", "--a.e", "true", "--a.f", "my file.txt", "--a.g", "3e-05"]


def test_a_worker_that_can_say_nothing_stops_its_other_runs(pretend: Any) -> None:  # noqa: ARG001
    """A terminal that has gone answers each word with an error: a polite kill must reach the runs all the same."""
    sweep = Sweep.from_yaml(SPACE)

    def say(_: str) -> None:
        raise BrokenPipeError

    sweeper = Pretended(sweep, sweep.base_config(Path()), Path("out"), say, workers=2)
    with pytest.raises(BrokenPipeError):
        sweeper.run()
    assert sweeper.signals.count == 1
    assert len(list(Path("out").glob("trial-*"))) <= 2
    sweeper.signals.count, told = 0, Told()
    sweeper.signals.told[told] = 0  # type: ignore[index]
    with pytest.raises(BrokenPipeError):
        sweeper.signals.note(signal.SIGTERM, None)
    assert (sweeper.signals.count, told.signals) == (1, [signal.SIGINT])


def test_what_decides_is_found_to_matter_most(pretend: Any) -> None:
    importances = pretend(trials=24, prune=False, sampler="random")["importances"]
    assert importances["train.learning_rate"] > 0.6


def test_a_trials_value_is_the_mean_over_its_seeds(pretend: Any) -> None:
    found = pretend(trials=1, seeds=[0, 1], sampler="random")
    assert sorted(path.name for path in Path("out").glob("trial-*")) == ["trial-0000-seed-0", "trial-0000-seed-1"]
    rate = found["trials"][0]["settings"]["train.learning_rate"]
    assert found["best"]["value"] == pytest.approx(abs(rate - 0.01) + 0.25)


def test_a_run_that_outlived_its_worker_is_waited_for(pretend: Any) -> None:
    pretend("out", trials=1)
    sweep = Sweep.from_yaml(SPACE)
    sweeper = Sweeper(sweep, sweep.base_config(Path()), Path("out"), lambda _: None)
    folder = RunFolder(Path("out/trial-0000"))
    lock = take_lock(folder.path / LOCK, "")
    waited = threading.Thread(target=sweeper.wait_for, args=(folder,))
    waited.start()
    waited.join(timeout=0.6)
    assert waited.is_alive()
    lock.release()
    waited.join(timeout=30)
    assert not waited.is_alive()
    sweeper.signals.count = 1
    assert not sweeper.wait_for(folder)


def test_another_space_in_the_same_folder_is_refused(pretend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pretend("out", trials=1)
    Path("space.yaml").write_text(SPACE.replace("3e-2", "4e-2"))
    assert main(["sweep", "space.yaml", "--out", "out"]) == 2
    assert "'out' was begun with another space, base or seeds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["no.yaml"], "cannot read the config 'no.yaml'"),
        (["space.yaml", "--workers", "0"], "--workers 0 is out of range"),
        (["space.yaml", "--trials", "0"], "trials must be"),
        (["space.yaml", "--out", "full"], "'full' is not empty and no sweep"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("full").mkdir()
    Path("full/mine").touch()
    assert main(["sweep", *words]) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert message.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["full", "space.yaml"]


def test_without_optuna_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("some_moe.commands.sweeping.find_spec", lambda _: None)
    assert main(["sweep", "space.yaml"]) == 2
    expected = "some: some sweep needs optuna, which is not installed; run pip install 'some-moe[sweep]'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.slow
def test_a_sweep_that_was_killed_ends_as_if_it_had_not_been(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "space.yaml", "--out", "whole", "--trials", "2"]) == 0
    assert "best best_val_loss" in capsys.readouterr().out
    command = [sys.executable, "-m", "some_moe", "sweep", "space.yaml", "--out", "killed", "--trials", "2"]
    process = subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL)
    begun = time.monotonic()
    while not Path("killed/trial-0000/metrics.jsonl").exists() and time.monotonic() - begun < 120:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert read("whole")["trials"][0]["state"] == "done"
    words = ["sweep", "space.yaml", "--out", "killed", "--trials", "2", "--workers", "2", "--dead-after", "5"]
    assert main(words) == 0
    assert "trial-0000: taken up again, for process" in capsys.readouterr().out
    whole, killed = read("whole"), read("killed")
    assert killed["trials"][0]["value"] == whole["trials"][0]["value"]
    assert {trial["state"] for trial in killed["trials"]} == {"done"}
    for run in ("whole", "killed"):
        assert (Path(run) / "sweep.html").is_file()
        assert main(["eval", f"{run}/trial-0000", "--json"]) == 0

"""What a folder says of its run: training, finished, killed, failed, damaged or gone; and queues."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from some_moe.config import ConfigError
from some_moe.live import plans, watched
from some_moe.live.logs import pick_metrics
from some_moe.live.watched import Watch, Watched, find_published, is_held
from some_moe.training.run_folder import LOCK, RunFolder
from tests.live.folders import append, make_run, step_line, write_keys


def look(run: Watched) -> dict[str, Any]:
    run._looked = 0.0
    run.refresh()
    return run.summary


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "run")


@pytest.fixture
def run(path: Path) -> Watched:
    return Watch([path]).runs["0"]


def test_a_run_that_is_written_to_is_training(run: Watched) -> None:
    found = look(run)
    assert (found["state"], found["step"], found["steps"]) == ("training", 20, 100)
    assert (found["train_loss"], found["val_loss"]) == (4.8, 4.5)
    assert found["seconds_left"] == pytest.approx(80 * 0.1)
    assert found["snapshots"] == [0, 10, 20]
    assert found["layers"] == 2
    append(run.path, "metrics.jsonl", step_line(21))
    assert look(run)["step"] == 21


def test_a_run_that_wrote_nothing_for_long_was_killed(run: Watched) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        os.utime(run.path / name, (1, 1))
    found = look(run)
    assert found["state"] == "killed"
    assert "resume" in found["note"]


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="locks are seen on Linux alone")
def test_a_run_whose_process_holds_it_is_training_however_quiet_and_dead_as_soon_as_it_is_gone(run: Watched) -> None:
    folder = RunFolder(run.path)
    with folder.claim():
        if not is_held(run.path / LOCK):
            pytest.skip("this system does not list locks")
        for name in ("config.yaml", "metrics.jsonl"):
            os.utime(run.path / name, (1, 1))
        assert look(run)["state"] == "training"
        folder.release()
    assert look(run)["state"] == "killed"
    append(run.path, "metrics.jsonl", step_line(21))
    os.utime(run.path / "metrics.jsonl", (2**32, 2**32))  # another machine goes on
    assert look(run)["state"] == "training"


def test_looking_never_takes_the_lock(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    import filelock

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a reader tried the lock")

    monkeypatch.setattr(filelock.BaseFileLock, "acquire", refuse)
    (run.path / LOCK).touch()
    assert look(run)["state"] == "training"


def test_a_finished_run_shows_its_result(run: Watched) -> None:
    (run.path / "result.json").write_text(
        json.dumps({"status": "finished", "steps": 100, "val_loss": 4.0, "test_loss": 4.1, "best_val_loss": 3.9}),
        encoding="utf-8",
    )
    found = look(run)
    assert (found["state"], found["step"], found["val_loss"], found["test_loss"]) == ("finished", 100, 4.0, 4.1)
    (run.path / "result.json").unlink()  # resumed, to train longer
    assert look(run)["state"] == "training"


def test_a_folder_that_vanishes_and_comes_back(run: Watched) -> None:
    look(run)
    shutil.move(run.path, run.path.with_name("away"))
    found = look(run)
    assert (found["state"], found["name"], found["step"]) == ("gone", "run", 20)
    shutil.move(run.path.with_name("away"), run.path)
    assert look(run)["state"] == "training"


@pytest.mark.parametrize("text", ["", "model: [", "model: {d_model: -1}", "\x00", "name: ../../x", "- a\n- b"])
def test_a_damaged_config_is_said_and_mended(run: Watched, text: str) -> None:
    look(run)
    good = (run.path / "config.yaml").read_text(encoding="utf-8")
    (run.path / "config.yaml").write_text(text + "x" * (text == ""), encoding="utf-8")
    found = look(run)
    assert found["state"] == "damaged"
    assert found["note"]
    (run.path / "config.yaml").write_text(good, encoding="utf-8")
    assert look(run)["state"] == "training"


@pytest.mark.parametrize("name", ["metrics.jsonl", "keys", "checkpoints", "result.json", "grown.json"])
def test_links_out_of_the_folder_are_not_followed(run: Watched, tmp_path: Path, name: str) -> None:
    place = run.path / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(tmp_path)
    os.utime(run.path / "config.yaml")
    found = look(run)
    assert found["state"] == "damaged"


def test_a_queue_says_why_a_run_failed(run: Watched, path: Path) -> None:
    job = {"name": "run", "state": "failed", "reason": "the loss became nan at step 7"}
    (path.parent / "queue.json").write_text(json.dumps({"jobs": [job, {"name": "b", "state": "done"}, 7]}))
    for name in ("config.yaml", "metrics.jsonl"):
        os.utime(path / name, (1, 1))
    found = look(run)
    assert (found["state"], found["note"]) == ("failed", job["reason"])
    (queue,) = Watch([path]).list_queues()
    assert [one["state"] for one in queue["jobs"]] == ["failed", "done"]
    (path.parent / "queue.json").write_text("{")
    assert Watch([path]).list_queues() == []


def claim(folder: Path, name: str, state: str, number: int = 1) -> Path:
    (folder / ".claims").mkdir(exist_ok=True)
    file = folder / ".claims" / f"{name}.{number}.json"
    file.write_text(json.dumps({"state": state, "process": 1, "host": "x", "dead_after": 60}), encoding="utf-8")
    return file


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of six trials: one is done, one pruned, one failed, one runs."""
    folder = tmp_path / "sweep"
    make_run(folder / "trial-0001")
    (folder / "space.json").write_text(json.dumps({"sweep": {"trials": 6}}), encoding="utf-8")
    names = ("done", "pruned", "failed")
    trials = [
        {"name": f"trial-000{n}", "state": state, "reason": "no memory" * (n == 2)} for n, state in enumerate(names)
    ]
    best = {"name": "trial-0000", "value": 2.5, "settings": {"train.learning_rate": 0.01, "model.query": "mlp"}}
    told = {"metric": "best_val_loss", "trials": trials, "best": best}
    (folder / "sweep.json").write_text(json.dumps(told), encoding="utf-8")
    claim(folder, "trial-0002", "running")
    for number, state in ((0, "done"), (1, "pruned"), (3, "running")):
        claim(folder, f"trial-000{number}", state)
    claim(folder, "trial-0002", "failed", 2)
    return folder


def test_a_sweep_tells_its_trials_and_the_best(sweep: Path) -> None:
    (plan,) = Watch([sweep]).list_queues()
    assert (plan["kind"], plan["total"], plan["folder"]) == ("sweep", 6, str(sweep))
    assert [(job["name"][-1], job["state"]) for job in plan["jobs"]] == [
        ("0", "done"), ("1", "pruned"), ("2", "failed"), ("3", "running")]  # fmt: skip
    assert plan["jobs"][2]["reason"] == "no memory"
    assert plan["best"] == {
        "name": "trial-0000", "value": 2.5, "settings": "train.learning_rate 0.01, model.query mlp",
        "metric": "best val loss"}  # fmt: skip


def test_a_trial_is_seen_to_begin_and_its_worker_to_fall_silent(sweep: Path) -> None:
    watch = Watch([sweep])
    assert len(watch.list_queues()[0]["jobs"]) == 4
    new = claim(sweep, "trial-0004", "running")
    assert watch.list_queues()[0]["jobs"][-1] == {"name": "trial-0004", "state": "running", "reason": ""}
    os.utime(new, (1, 1))
    assert Watch([sweep]).list_queues()[0]["jobs"][-1]["state"] == "interrupted"


def test_a_run_that_its_sweep_stopped_was_pruned_not_killed(sweep: Path) -> None:
    (run,) = Watch([sweep]).runs.values()
    assert look(run)["state"] == "pruned"  # at once, although it wrote a moment ago
    for name in ("config.yaml", "metrics.jsonl"):
        os.utime(run.path / name, (1, 1))
    assert look(run)["state"] == "pruned"
    shutil.move(run.path, sweep / "trial-0001-seed-3")  # of a sweep with several seeds
    (run,) = Watch([sweep]).runs.values()
    assert look(run)["state"] == "pruned"
    shutil.rmtree(sweep / ".claims")  # as in a copy
    (sweep / "sweep.json").unlink()
    assert look(run)["state"] == "killed"


def test_plans_are_read_when_they_change_and_not_for_every_look(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, read = Watch([sweep]), plans.read_sweep
    looks: list[Path] = []
    monkeypatch.setattr(plans, "AGAIN_SECONDS", 1e9)
    monkeypatch.setattr(plans, "read_sweep", lambda folder: looks.append(folder) or read(folder))
    for _ in range(20):
        watch.list_queues()
    assert len(looks) == 1
    claim(sweep, "trial-0005", "running")
    watch.list_queues()
    assert len(looks) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"sweep": 7}', '{"sweep": {"trials": "x"}}', "link", "long"])
def test_a_damaged_sweep_is_none_or_what_is_left_of_it(sweep: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if text == "long":
        monkeypatch.setattr(plans, "MOST_BYTES", 10)
    elif text == "link":
        (sweep / "space.json").unlink()
        (sweep / "space.json").symlink_to("/etc/passwd")
    else:
        (sweep / "space.json").write_text(text, encoding="utf-8")
    found = Watch([sweep]).list_queues()
    assert [plan["total"] for plan in found] == ([4] if "sweep" in text else [])


def test_new_runs_of_a_folder_are_found(path: Path) -> None:
    watch = Watch([path.parent])
    assert len(watch.runs) == 1
    make_run(path.parent / "later")
    watch._looked = 0.0
    watch.refresh()
    assert [run.path.name for run in watch.runs.values()] == ["run", "later"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        Watch([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="holds none"):
        Watch([tmp_path])


def test_a_folder_is_looked_at_once_however_many_ask(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(run, "_look", lambda: looks.append(1) or {})
    for _ in range(50):
        run.refresh()
    assert len(looks) == 1


def test_a_curve_has_few_points_and_its_last(run: Watched) -> None:
    append(run.path, "metrics.jsonl", "".join(step_line(step) for step in range(21, 5_001)))
    look(run)
    curve = run.read_curve()
    assert 400 <= len(curve["train"]) <= 850
    assert curve["train"][-1][0] == 5_000
    assert curve["val"] == [[20, 4.5]]


def test_a_long_log_is_thinned(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "WHOLE", 1_000)
    monkeypatch.setattr(watched, "FEW", 10)
    assert 0 < len(run.read_curve()["train"]) < 10


def test_of_a_log_that_grew_a_curve_reads_what_is_new(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def pick(lines: list[bytes]) -> dict[str, Any]:
        read.append(len(lines))
        return pick_metrics(lines)

    monkeypatch.setattr(watched, "pick_metrics", pick)
    assert len(run.read_curve()["train"]) == 20
    append(run.path, "metrics.jsonl", step_line(21) + step_line(22)[:30])
    assert run.read_curve()["train"][-1][0] == 21
    assert read == [21, 1]
    (run.path / "metrics.jsonl").write_text(step_line(1, loss=7.0))
    assert run.read_curve() == {"train": [[1, 7.0]], "val": []}


def test_snapshots_that_come_and_go_are_seen(run: Watched) -> None:
    look(run)
    write_keys(run.path, 30, 2, 6, 8)
    assert look(run)["snapshots"] == [0, 10, 20, 30]
    (run.path / "keys" / "step-30.safetensors").unlink()
    assert look(run)["snapshots"] == [0, 10, 20]


def test_published_figures_are_known_by_the_experiment() -> None:
    found = find_published("A1")
    assert found is not None
    assert found["val_loss"] > 0
    assert find_published("nothing such") is None
    assert find_published(None) is None

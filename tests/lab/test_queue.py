"""The queue: how jobs are told apart, run, skipped, stopped and continued."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from some_moe.commands.training import resolve_config, take_settings
from some_moe.config import ConfigError
from some_moe.lab.jobs import Job, find_standing, hide_place, make_jobs
from some_moe.lab.queue import Queue, Signals, explain_failure
from some_moe.lab.registry import EXPERIMENTS
from some_moe.lab.registry.selection import select_experiments
from some_moe.lab.scaling import Stories, scale
from some_moe.sinks.display import Display
from some_moe.training.loop import start, train
from some_moe.training.run_folder import RunFolder
from tests.shared.tiny import A1, TINY


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


# --- jobs -------------------------------------------------------------------------------------------------


def test_the_words_that_train_a_job_give_its_config() -> None:
    overrides = {"data.source": "a=b/[x].txt", "gravity.frozen_layers": [0, 1], "train.learning_rate": "3e-5"}
    for experiment in EXPERIMENTS:
        asked = experiment.config.override(overrides)
        config, schedule = scale(asked, Stories(6903, 400, 400))
        job = Job(experiment=experiment, seed=7, config=config, schedule=schedule, overrides={})
        command, preset, name, *flags = job.training_words
        assert (command, preset) == ("train", "--preset")
        assert resolve_config(name, None, take_settings(flags, "some train")[0]) == config


def test_an_override_that_an_experiment_refuses_names_it() -> None:
    with pytest.raises(ConfigError, match=r"^D2-frozen-deep: gravity\.frozen_layers names layer 8"):
        make_jobs(select_experiments(["A1", "D2-frozen-deep"]), [0], TINY)


def test_overrides_that_change_nothing_are_not_recorded() -> None:
    (job,) = make_jobs([A1], [0], TINY | {"model.temperature": 0.8, "train.clip": "1"})
    assert "model.temperature" not in job.overrides
    assert "train.clip" not in job.overrides
    assert job.overrides["data.batch_size"] == 8


def test_only_absolute_paths_are_shortened() -> None:
    assert hide_place("/somewhere/texts/a.txt") == "a.txt"
    for kept in ("texts/a.txt", "hf:roneneldan/TinyStories", "stories", 3, None):
        assert hide_place(kept) == kept


def test_a_folder_tells_how_far_its_job_has_come(tmp_path: Path) -> None:
    (job,) = make_jobs([A1], [0], TINY)
    folder = RunFolder(tmp_path / "run")
    assert find_standing(job, folder) == "new"
    folder.path.mkdir()
    assert find_standing(job, folder) == "new"
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not a run, but holds something"):
        find_standing(job, folder)
    # How experts are stored was left to the machine that began the run.
    job.config.override({"model.expert_dtype": "bfloat16"}).save(folder.config_file)
    assert find_standing(job, folder) == "begun"
    folder.result_file.write_text("{}")
    assert find_standing(job, folder) == "done"
    other = replace(job, config=job.config.override({"train.clip": 2.0}))
    with pytest.raises(ConfigError, match=r"run with another config: train.clip \(1.0 there, 2.0 here\)"):
        find_standing(other, folder)


def test_a_job_begins_anew_in_a_folder_left_half_made(tmp_path: Path) -> None:
    (job,) = make_jobs([A1], [0], TINY)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a run, but holds something"):
        find_standing(job, RunFolder(tmp_path))
    for name in (".run.lock", "env.json", ".config.yaml.tmp"):
        (tmp_path / name).write_text("")
    assert find_standing(job, RunFolder(tmp_path)) == "new"


# --- the queue --------------------------------------------------------------------------------------------


def finish(queue: Queue, job: Job) -> tuple[int, str]:
    """Train in this process."""
    train(start(job.config, RunFolder(queue.out / job.name), Display()))
    return 0, ""


def make_queue(tmp_path: Path, said: list[str], seeds: tuple[int, ...] = (0, 1, 2), at_once: int = 1) -> Queue:
    jobs, out = make_jobs([A1], seeds, TINY), tmp_path / "q"
    return Queue(jobs, out, out / "results", said.append, at_once=at_once)


def states(tmp_path: Path) -> dict[str, str]:
    return {job["name"]: job["state"] for job in json.loads((tmp_path / "q" / "queue.json").read_text())["jobs"]}


def test_a_failed_job_is_noted_and_the_queue_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_once(queue: Queue, job: Job) -> tuple[int, str]:
        assert states(tmp_path)[job.name] == "running"
        return (1, "warning\nsome: the loss became nan at step 2\n") if job.seed == 1 else finish(queue, job)

    monkeypatch.setattr(Queue, "_train", fail_once)
    said: list[str] = []
    queue = make_queue(tmp_path, said)
    queue.run()
    assert queue.exit_code == 1
    assert states(tmp_path) == {"A1-seed0": "done", "A1-seed1": "failed", "A1-seed2": "done"}
    rows = queue.describe()
    assert [row["state"] for row in rows] == ["done", "failed", "done"]
    assert rows[1]["reason"] == "the loss became nan at step 2"
    assert rows[1]["val_loss"] is None
    assert math.isfinite(rows[0]["val_loss"])
    assert rows[0]["published_val_loss"] == 0.7629
    assert [path.name for path in sorted((tmp_path / "q" / "results").iterdir())] == ["A1-seed0.json", "A1-seed2.json"]
    assert said[0] == "[1/3] A1, seed 0: 2 steps"
    assert said[2] == "[2/3] A1, seed 1: 2 steps"
    assert said[3] == "[2/3] A1, seed 1: failed: the loss became nan at step 2"

    # The same queue again tries what failed, and nothing else.
    monkeypatch.setattr(Queue, "_train", finish)
    said.clear()
    again = make_queue(tmp_path, said)
    again.run()
    assert again.exit_code == 0
    assert [line for line in said if "done already" in line] == [
        "[1/3] A1, seed 0: done already",
        "[3/3] A1, seed 2: done already",
    ]
    assert [row["state"] for row in again.describe()] == ["done already", "done", "done already"]


def test_a_run_that_was_told_to_stop_stops_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "_train", lambda *_: (130, "some: interrupted at step 1\n"))
    queue = make_queue(tmp_path, [])
    queue.run()
    assert queue.exit_code == 130
    assert states(tmp_path) == {"A1-seed0": "interrupted", "A1-seed1": "waiting", "A1-seed2": "waiting"}


def test_several_run_at_once_and_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    taken: list[int] = []

    def meet(queue: Queue, job: Job) -> tuple[int, str]:
        taken.append(job.seed)
        both.wait()  # nobody passes before another run has begun
        assert list(states(tmp_path).values()).count("running") >= 1
        return (1, "some: no\n") if job.seed == 2 else finish(queue, job)

    monkeypatch.setattr(Queue, "_train", meet)
    queue = make_queue(tmp_path, [], seeds=(0, 1, 2, 3), at_once=2)
    queue.run()
    assert sorted(taken) == [0, 1, 2, 3]
    assert queue.exit_code == 1
    assert list(states(tmp_path).values()) == ["done", "done", "failed", "done"]
    records = [json.loads(path.read_text()) for path in (tmp_path / "q" / "results").iterdir()]
    assert [record["at_once"] for record in records] == [2, 2, 2]


@pytest.mark.parametrize(("at_once", "order"), [(1, ["A1", "A6", "V1"]), (2, ["A6", "A1", "V1"])])
def test_of_several_at_once_the_longest_is_begun_first(tmp_path: Path, at_once: int, order: list[str]) -> None:
    data = {"data.source": "stories", "data.train_subset_size": 200, "data.val_subset_size": 8}
    jobs = make_jobs(select_experiments(["A1", "A6", "V1"]), [0], data)
    queue = Queue(jobs, tmp_path / "q", tmp_path / "results", lambda _: None, at_once=at_once)
    assert [turn.job.experiment.name for turn in queue._order()] == order
    assert [turn.job.experiment.name for turn in queue.turns] == ["A1", "A6", "V1"]  # told as they were named


def test_a_stop_reaches_all_that_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)

    def sleep(queue: Queue, job: Job) -> tuple[int, str]:  # noqa: ARG001
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
        if both.wait() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return queue.signals.wait_for(process), ""

    monkeypatch.setattr(Queue, "_train", sleep)
    said: list[str] = []
    queue = make_queue(tmp_path, said, at_once=2)
    queue.run()
    assert queue.exit_code == 130
    assert states(tmp_path) == {"A1-seed0": "interrupted", "A1-seed1": "interrupted", "A1-seed2": "waiting"}
    assert sum("stopping" in line for line in said) == 1


def test_a_signal_during_a_run_that_ends_well_keeps_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish_though_told(queue: Queue, job: Job) -> tuple[int, str]:
        os.kill(os.getpid(), signal.SIGTERM)
        while not queue.signals.count:  # the main thread hears of it, not this one
            time.sleep(0.001)
        return finish(queue, job)

    monkeypatch.setattr(Queue, "_train", finish_though_told)
    queue = make_queue(tmp_path, [])
    queue.run()
    assert queue.exit_code == 130
    assert states(tmp_path) == {"A1-seed0": "done", "A1-seed1": "waiting", "A1-seed2": "waiting"}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_queue_json_keeps_jobs_of_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "_train", finish)
    make_queue(tmp_path, [], (0,)).run()
    make_queue(tmp_path, [], (1,)).run()
    assert states(tmp_path) == {"A1-seed0": "done", "A1-seed1": "done"}
    (tmp_path / "q" / "queue.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"queue.json' is damaged.*; remove it"):
        make_queue(tmp_path, [], (1,))


def test_records_missing_from_a_results_folder_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "_train", finish)
    make_queue(tmp_path, [], (0,)).run()
    first = (tmp_path / "q" / "results" / "A1-seed0.json").read_text()
    queue = Queue(make_jobs([A1], [0], TINY), tmp_path / "q", tmp_path / "elsewhere", str)
    queue.run()
    assert (tmp_path / "elsewhere" / "A1-seed0.json").read_text() == first


def test_a_record_of_another_run_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "_train", finish)
    make_queue(tmp_path, [], (0,)).run()
    results = tmp_path / "q" / "results"
    # The same command may measure again, elsewhere; another one may not.
    Queue(make_jobs([A1], [0], TINY), tmp_path / "other", results, str).run()
    with pytest.raises(ConfigError, match=r"A1-seed0.json' is of some experiments run A1 .*; choose another folder"):
        Queue(make_jobs([A1], [0], TINY | {"train.clip": 2.0}), tmp_path / "third", results, str)
    (results / "A1-seed0.json").write_text("{")
    with pytest.raises(ConfigError, match="is of something else"):
        make_queue(tmp_path, [], (0,))


def test_a_record_of_other_data_of_the_same_name_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Queue, "_train", finish)
    results = tmp_path / "results"

    def make(data: str, out: str) -> Queue:
        return Queue(make_jobs([A1], [0], TINY | {"data.source": str(tmp_path / data)}), tmp_path / out, results, str)

    for data in ("d1", "d2"):
        (tmp_path / data).mkdir()
        stories = [{"text": f"Story {n} of {data} is short."} for n in range(60)]
        (tmp_path / data / "s.jsonl").write_text("".join(json.dumps(story) + "\n" for story in stories))
    make("d1/s.jsonl", "q").run()
    make("d1/s.jsonl", "again").run()
    with pytest.raises(ConfigError, match=r"A1-seed0.json' is of other data called 's.jsonl'; choose another"):
        make("d2/s.jsonl", "other")
    assert make("d1/s.jsonl", "q").turns[0].standing == "done"
    # A record, or a run, from before digests were kept is known by its command alone.
    record = json.loads((results / "A1-seed0.json").read_text())
    digest = record.pop("data_digest")
    assert json.loads((tmp_path / "q" / "A1-seed0" / "result.json").read_text())["data_digest"] == digest
    (results / "A1-seed0.json").write_text(json.dumps(record))
    assert make("d2/s.jsonl", "other").turns[0].standing == "new"


def test_two_queues_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def enter_too(queue: Queue, job: Job) -> tuple[int, str]:
        with pytest.raises(ConfigError, match="is in use by another queue"):
            make_queue(tmp_path, []).run()
        return finish(queue, job)

    monkeypatch.setattr(Queue, "_train", enter_too)
    queue = make_queue(tmp_path, [], (0,))
    queue.run()
    assert queue.exit_code == 0


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "q").write_text("a file")
    with pytest.raises(ConfigError, match=r"q' cannot be written .* choose another --out or --results"):
        make_queue(tmp_path, [], (0,)).run()


STUBBORN = """
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"told\\n"))
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


def test_signals_reach_the_run_and_the_third_one_kills_it() -> None:
    said: list[str] = []
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, process_group=0)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    with process.stdout, Signals(said.append) as signals:
        signals.told[process] = 0
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            assert process.stdout.readline() == b"told\n"
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.wait_for(process) == -signal.SIGKILL
    assert said == ["stopping: what runs is saved after its step, and no other is begun"]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
def test_the_signals_of_a_cluster_are_one_request_to_end() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGUSR2)
    with Signals(said.append) as signals:
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.count == 1
    assert len(said) == 1
    assert signal.getsignal(signal.SIGUSR2) == before


@pytest.mark.parametrize(
    ("code", "messages", "sentence"),
    [
        (2, "some: data.source 'x' does not exist\n", "data.source 'x' does not exist"),
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried …\n\n", "memory ran out; lower data.batch"),
        (1, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried …", "memory ran out"),
        (-9, "step 1\n", "its process was killed, perhaps because memory ran out"),
        (-11, "", "its process was ended by SIGSEGV"),
        (1, "Traceback\nKeyError: 'x'\n", "KeyError: 'x'"),
        (
            1,
            "torch.AcceleratorError: CUDA error: an illegal …\nFor debugging …\n",
            "torch.AcceleratorError: CUDA error:",
        ),
        (3, "", "its process ended with exit code 3"),
    ],
)
def test_a_failure_is_explained_in_one_sentence(code: int, messages: str, sentence: str) -> None:
    explained = explain_failure(code, messages)
    assert explained.startswith(sentence)
    assert "\n" not in explained


@pytest.mark.parametrize("text", ['{"jobs": ' + "[" * 5000, '{"jobs": 5}', '{"jobs": [5]}', '{"jobs": [{"name": 5}]}'])
def test_a_queue_file_of_any_content_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "queue.json").write_text(text)
    with pytest.raises(ConfigError, match=r"queue.json' is damaged.*; remove it, the runs themselves are whole"):
        make_queue(tmp_path, [], (0,))


def test_figures_of_other_kinds_in_a_queue_file_and_a_record_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Queue, "_train", finish)
    make_queue(tmp_path, [], (0,)).run()
    file = tmp_path / "q" / "queue.json"
    file.write_text(json.dumps({"jobs": [{"name": "A1-seed0", "seconds": "x", "at_once": [2]}]}))
    queue = make_queue(tmp_path, [], (0,))
    assert (queue.turns[0].seconds, queue.turns[0].at_once) == (0.0, None)
    record = json.loads(queue.turns[0].record.read_text())
    queue.turns[0].record.write_text(json.dumps(record | {"middle_layer": {}, "val_loss": [1], "steps": "many"}))
    row = make_queue(tmp_path, [], (0,)).describe()[0]
    assert (row["val_loss"], row["gini"]) == (None, None)
    assert isinstance(row["steps"], int)

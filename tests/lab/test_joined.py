"""Workers that join one queue: each job is claimed once, a dead worker's is taken up again, records stay whole."""

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from some_moe.cli import main
from some_moe.config import ConfigError
from some_moe.lab.jobs import Job, make_jobs
from some_moe.lab.joined import CLAIMS, JoinedQueue, Plan
from some_moe.lab.queue import PLAN, Queue
from some_moe.sinks.display import Display
from some_moe.system.claims import Claims
from some_moe.training.loop import start, train
from some_moe.training.run_folder import RunFolder
from tests.shared.tiny import A1, TINY

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system does not have")
Said = list[str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("some_moe.lab.joined.LONGEST_WAIT", 0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done, of which the stand-in for training makes copies."""
    (job,) = make_jobs([A1], [0], TINY)
    place = tmp_path_factory.mktemp("finished") / "run"
    train(start(job.config, RunFolder(place), Display()))
    return place


@pytest.fixture
def copies(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Queue, Job], tuple[int, str]]:
    """Let jobs be done by copying: result.json comes last, as in training, and never twice."""

    def copy(queue: Queue, job: Job) -> tuple[int, str]:
        folder = RunFolder(queue.out / job.name)
        assert not folder.result_file.exists(), f"{job.name} is done twice"
        shutil.copytree(
            finished, folder.path, dirs_exist_ok=True, ignore=lambda *_: ["result.json", "config.yaml", "checkpoints"]
        )
        job.config.save(folder.config_file)
        os.link(finished / "result.json", folder.result_file)  # refused where it is there
        return 0, ""

    monkeypatch.setattr(Queue, "_train", copy)
    return copy


def join(out: Path, said: Said, seeds: tuple[int, ...] = (0, 1, 2), **options: float) -> JoinedQueue:
    jobs = make_jobs([A1], seeds, TINY)
    plan = Plan.make(jobs, TINY, out, out / "results")
    return JoinedQueue(jobs, plan, out, said.append, **options)  # type: ignore[arg-type]


def claims_of(out: Path) -> dict[str, str]:
    return {path.name: json.loads(path.read_text())["state"] for path in sorted((out / CLAIMS).glob("*.json"))}


def records_of(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "results").iterdir())


def in_a_child(act: Callable[[], object]) -> int:
    """Do something in a forked process; return its number."""
    child = os.fork()
    if child:
        return child
    try:
        act()
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)


def wait_for(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def claim_and_die(out: Path, name: str = "A1-seed0") -> None:
    """What a worker leaves that is killed."""

    def act() -> None:
        claims = Claims(out / CLAIMS)
        claims.open()
        assert claims.take(name, claims.read().get(name)) is not None
        os.kill(os.getpid(), signal.SIGKILL)

    out.mkdir(exist_ok=True)
    assert wait_for(in_a_child(act)) == -signal.SIGKILL


# --- sharing ----------------------------------------------------------------------------------------------


@needs_fork
@pytest.mark.usefixtures("copies")
def test_three_workers_do_each_job_once_and_end_alike(tmp_path: Path) -> None:
    out, seeds = tmp_path / "q", tuple(range(9))

    def work() -> None:
        said: Said = []
        queue = join(out, said, seeds)
        queue.run()
        assert queue.exit_code == 0
        assert [row["state"].split()[0] for row in queue.describe()] == ["done"] * 9
        (tmp_path / f"said-{os.getpid()}").write_text("\n".join(said))

    children = [in_a_child(work) for _ in range(3)]
    assert [wait_for(child) for child in children] == [0, 0, 0]
    assert claims_of(out) == {f"A1-seed{seed}.1.json": "done" for seed in seeds}
    assert records_of(out) == [f"A1-seed{seed}.json" for seed in seeds]
    said = "\n".join(path.read_text() for path in tmp_path.glob("said-*"))
    assert all(said.count(f"seed {seed}: done in") == 1 for seed in seeds)
    states = {job["name"]: job["state"] for job in json.loads((out / "queue.json").read_text())["jobs"]}
    assert states == {f"A1-seed{seed}": "done" for seed in seeds}


@needs_fork
@pytest.mark.usefixtures("copies")
def test_the_job_of_a_worker_that_is_gone_from_this_machine_is_taken_up_at_once(tmp_path: Path) -> None:
    out, said = tmp_path / "q", Said()
    claim_and_die(out)
    queue = join(out, said, (0,))
    queue.run()
    assert queue.exit_code == 0
    assert "taken up again: process" in said[0]
    assert said[0].endswith("is gone")
    assert claims_of(out) == {"A1-seed0.1.json": "lost", "A1-seed0.2.json": "done"}


@needs_fork
def test_a_run_that_is_done_without_a_record_gets_one_and_is_not_run_again(
    tmp_path: Path, copies: Callable[[Queue, Job], tuple[int, str]]
) -> None:
    out = tmp_path / "q"
    claim_and_die(out)
    queue = join(out, said := Said(), (0,))
    (tmp_path / "q" / "results").mkdir()
    copies(queue, queue.turns[0].job)
    queue.run()
    assert said[-1] == "[1/1] A1, seed 0: done already"
    assert records_of(out) == ["A1-seed0.json"]
    (out / "results" / "A1-seed0.json").unlink()  # whoever joins later makes it again
    again = join(out, [], (0,))
    again.run()
    assert (again.exit_code, records_of(out)) == (0, ["A1-seed0.json"])


@pytest.mark.usefixtures("copies")
def test_a_worker_elsewhere_is_dead_after_its_silence_and_not_before(tmp_path: Path) -> None:
    out, said = tmp_path / "q", Said()
    elsewhere = Claims(out / CLAIMS, dead_after=50)
    elsewhere.place = "another machine"
    elsewhere.folder.mkdir(parents=True)
    held = elsewhere.take("A1-seed0", None)
    assert held is not None
    here = Claims(out / CLAIMS)
    now = here.read_clock()
    for silent, dead in ((45, False), (55, True)):
        os.utime(held.path, (now - silent, now - silent))
        assert (here.explain_death(here.read()["A1-seed0"]) is not None) == dead
    queue = join(out, said, (0,))
    queue.run()
    assert "was silent for 55 s" in said[0]
    assert not held.is_held()
    assert not elsewhere.settle(held, state="failed")
    assert claims_of(out) == {"A1-seed0.1.json": "lost", "A1-seed0.2.json": "done"}


def test_a_worker_that_comes_back_after_it_was_counted_dead_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: Callable[[Queue, Job], tuple[int, str]]
) -> None:
    out, said = tmp_path / "q", Said()
    other = Claims(out / CLAIMS)

    def lose(queue: Queue, job: Job) -> tuple[int, str]:
        if job.seed == 0:
            assert other.take(job.name, other.read()[job.name]) is not None
        return copies(queue, job)

    def stop_then(queue: JoinedQueue) -> None:
        queue.stopped = True  # the other worker, which is this test, never ends

    monkeypatch.setattr(Queue, "_train", lose)
    monkeypatch.setattr(JoinedQueue, "_wait", stop_then)
    queue = join(out, said, (0, 1))
    queue.run()
    assert "[1/2] A1, seed 0: another worker has taken it up meanwhile; nothing is recorded here" in said
    assert records_of(out) == ["A1-seed1.json"]
    assert claims_of(out) == {"A1-seed0.1.json": "lost", "A1-seed0.2.json": "running", "A1-seed1.1.json": "done"}
    assert queue.exit_code == 130


def test_a_failed_job_is_tried_again_by_who_joins_later_and_not_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: Callable[[Queue, Job], tuple[int, str]]
) -> None:
    out, tried = tmp_path / "q", Said()

    def fail(queue: Queue, job: Job) -> tuple[int, str]:  # noqa: ARG001
        tried.append(job.name)
        return 1, "some: no such luck\n"

    monkeypatch.setattr(Queue, "_train", fail)
    queue = join(out, [], (0,), at_once=2)
    queue.run()
    assert (tried, queue.exit_code) == (["A1-seed0"], 1)
    assert queue.describe()[0]["reason"] == "no such luck"
    monkeypatch.setattr(Queue, "_train", copies)
    later = join(out, [], (0,))
    later.run()
    assert later.exit_code == 0
    assert claims_of(out) == {"A1-seed0.1.json": "failed", "A1-seed0.2.json": "done"}


def test_a_stopped_worker_leaves_its_job_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: Callable[[Queue, Job], tuple[int, str]]
) -> None:
    out = tmp_path / "q"
    monkeypatch.setattr(Queue, "_train", lambda *_: (130, "some: interrupted at step 1\n"))
    queue = join(out, [], (0, 1))
    queue.run()
    assert queue.exit_code == 130
    assert claims_of(out) == {"A1-seed0.1.json": "interrupted"}
    monkeypatch.setattr(Queue, "_train", copies)
    later = join(out, [], (0, 1))
    later.run()
    assert later.exit_code == 0
    assert claims_of(out) == {
        "A1-seed0.1.json": "interrupted", "A1-seed0.2.json": "done", "A1-seed1.1.json": "done",
    }  # fmt: skip


# --- one plan for all --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("copies")
def test_workers_with_other_runs_are_refused_and_touch_nothing(tmp_path: Path) -> None:
    out = tmp_path / "q"
    join(out, [], (0, 1)).run()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"a queue of other runs \(seeds \[0, 1\], here \[0\]\); join it with"):
        join(out, [], (0,))
    jobs = make_jobs([A1], [0, 1], TINY | {"train.clip": 2.0})
    plan = Plan.make(jobs, TINY, out, out / "results")
    with pytest.raises(ConfigError, match="another version of them, or other data"):
        JoinedQueue(jobs, plan, out, str)
    with pytest.raises(ConfigError, match="is a queue that workers join; add --join"):
        Queue(make_jobs([A1], [0, 1], TINY), out, out / "results", str).run()
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    (out / PLAN).write_text('{"names": []}')
    with pytest.raises(ConfigError, match=r"joined.json' is damaged; remove it"):
        join(out, [], (0, 1))


def test_a_queue_of_one_process_keeps_workers_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("some_moe.lab.joined.PATIENCE", 0)
    out = tmp_path / "q"

    def enter_too(queue: Queue, job: Job) -> tuple[int, str]:  # noqa: ARG001
        with pytest.raises(ConfigError, match="is in use by a queue without --join"):
            join(out, [], (0,)).run()
        return 1, ""

    monkeypatch.setattr(Queue, "_train", enter_too)
    Queue(make_jobs([A1], [0], TINY), out, out / "results", str).run()
    assert not (out / PLAN).exists()


@pytest.mark.usefixtures("copies")
def test_a_worker_without_names_runs_what_the_first_has_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["experiments", "run"]
    assert main([*run, "--join", "--out", "q"]) == 2
    assert "'q' is no queue to join yet; name what to run" in capsys.readouterr().err
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    assert main([*run, "a1", *flags, "--seeds", "0,1", "--out", "q", "--results", "q/measured", "--join"]) == 0
    table = capsys.readouterr().out.partition("\n\n")[2].replace("  done", "  done already")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main([*run, "--join", "--out", "../q"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 are done already" in printed
    rows = [line.split() for line in table.splitlines() if line.startswith("A1 ")]
    assert [line.split() for line in printed.splitlines() if line.startswith("A1 ")] == rows
    assert "results are in ../q/measured" in printed
    for words, sentence in (
        (["--seeds", "1"], "--seeds 1 is said by the queue in '../q'; leave it out, or give names with it"),
        (["--train.clip", "2"], "--train.clip 2 is said by the queue"),
        (["--dead-after", "0.5"], "--dead-after 0.5 is out of range; use 1 to 86,400 seconds"),
    ):
        assert main([*run, "--join", "--out", "../q", *words]) == 2
        assert sentence in capsys.readouterr().err

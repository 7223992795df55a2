"""`some experiments submit`, with stand-ins for SLURM's commands on the path."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from some_moe.cli import main
from some_moe.config import ConfigError
from some_moe.lab.cluster import read_minutes

pytest.importorskip("submitit")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="SLURM's stand-ins are shell scripts")
SUBMIT = ["experiments", "submit"]
TINY = [
    *("--model.d-model", "32", "--model.num-layers", "2", "--model.num-heads", "2", "--model.vocab-size", "512"),
    *("--model.num-experts", "8", "--model.d-ffn", "32", "--model.top-k", "2", "--data.seq-len", "64"),
    *("--data.batch-size", "8", "--data.train-subset-size", "160", "--data.val-subset-size", "4"),
    *("--train.device", "cpu", "--train.sample-tokens", "0", "--train.log-every", "1", "--data", "stories"),
]
STAND_INS = {
    "sbatch": 'cp "$1" "$SLURM_SEEN/script.sh"; echo "Submitted batch job 77"',
    "srun": 'while [ "${1#--}" != "$1" ]; do case "$1" in --output|--error) shift 2;; *) shift;; esac; done; exec "$@"',
    "scontrol": 'echo "$@" >> "$SLURM_SEEN/scontrol.txt"',
}


@pytest.fixture
def seen(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster that keeps what it is given, and runs nothing."""
    monkeypatch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    for name, text in STAND_INS.items():
        put_command(tmp_path / "bin" / name, text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_SEEN", str(tmp_path / "seen"))
    (tmp_path / "seen").mkdir()
    return tmp_path / "seen"


def put_command(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_array_of_workers_is_submitted_and_its_plan_is_in_the_shared_folder(
    seen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["A1", *TINY, "--seeds", "0,1", "--out", "q", "--workers", "3", "--partition", "big", "--gpus", "2"]
    words += ["--time", "1-2:30:00", "--slurm", "account=me"]
    assert main([*SUBMIT, *words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not list(seen.iterdir())
    assert not Path("q").exists()
    assert main([*SUBMIT, *words]) == 0
    assert "submitted as 77: 3 workers for 2 runs in q; what they say is in q/slurm" in capsys.readouterr().out
    script = (seen / "script.sh").read_text()
    assert shown.startswith(script)
    for line in (
        "--array=0-2%3", "--partition=big", "--gpus-per-node=2", "--time=1590", "--account=me", "--requeue",
        "--signal=USR2@120", "--job-name=some",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert f"each task runs: some experiments run --join --out {Path('q').absolute()} --at-once 1\n" in shown
    plan = json.loads(Path("q/joined.json").read_text())
    assert (plan["names"], plan["seeds"], plan["results"]) == (["A1"], [0, 1], "../results")
    assert sorted(path.name for path in Path("q/slurm").glob("*.pkl")) == [f"77_{n}_submitted.pkl" for n in range(3)]
    assert main([*SUBMIT, "--out", "q", "--workers", "2", "--gpus", "0", "--dry-run"]) == 0  # more workers join it
    assert "gpus" not in capsys.readouterr().out


def test_bad_words_and_what_is_missing_are_said_in_one_sentence(
    seen: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str, code: int = 2) -> str:
        assert main([*SUBMIT, *words]) == code
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        return captured.err

    assert "'runs' is no queue to join yet; name what to run: `some experiments submit NAME…" in refused()
    assert "--workers 0 is out of range; use 1 to 10,000" in refused("A1", "--workers", "0")
    assert "--gpus 65 is out of range" in refused("A1", "--gpus", "65")
    assert "--slurm account is not NAME=VALUE" in refused("A1", "--slurm", "account")
    assert "--time 'soon' is no time" in refused("A1", "--time", "soon")
    put_command(seen.parent / "bin" / "sbatch", "echo 'sbatch: error: invalid partition specified: big' >&2; exit 1")
    sentence = refused("A1", *TINY, "--partition", "big", code=1)
    assert "sbatch refuses it: sbatch: error: invalid partition specified: big; mend that" in sentence
    monkeypatch.setenv("PATH", "")
    assert "there is no sbatch here; submit from a machine of a SLURM cluster" in refused("A1", *TINY)
    monkeypatch.setattr("some_moe.lab.cluster.find_spec", lambda _: None)
    assert "needs submitit; run pip install 'submitit>=1.5'" in refused("A1", "--dry-run")


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("90:30", 91), ("4:00:00", 240), ("1-0", 1440), ("1-2:30", 1590), ("1-2:30:01", 1591), ("3", 3)],
)
def test_times_are_read_as_slurm_writes_them(text: str, minutes: int) -> None:
    assert read_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "2", "-5", "1:2:3:4", "1-", "x", "9999-0", "4h"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time of 3 minutes to a year"):
        read_minutes(text)


@pytest.mark.slow
def test_a_task_whose_time_is_over_saves_is_queued_again_and_goes_on(seen: Path) -> None:
    assert main([*SUBMIT, "A1", *TINY, "--out", "q", "--results", "r", "--workers", "2", "--dead-after", "5"]) == 0
    environment = os.environ | {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "0"}

    def begin_task() -> subprocess.Popen[bytes]:
        out = (seen / "out.txt").open("ab")
        with out:
            return subprocess.Popen(
                ["bash", str(seen / "script.sh")], env=environment, stdout=out, stderr=out, process_group=0
            )

    task, log = begin_task(), Path("q/A1-seed0/metrics.jsonl")
    deadline = time.monotonic() + 90
    while not (log.exists() and log.read_bytes().count(b"\n") > 3):
        assert time.monotonic() < deadline, (seen / "out.txt").read_text()
        assert task.poll() is None, (seen / "out.txt").read_text()
        time.sleep(0.01)
    # SLURM tells every process of the task.
    for process in list_tree(task.pid):
        os.kill(process, signal.SIGUSR2)
    task.wait(timeout=90)
    said = (seen / "out.txt").read_text()
    assert "A1, seed 0: interrupted" in said
    assert (seen / "scontrol.txt").read_text() == "requeue 77_0\n", said
    assert list(Path("q/A1-seed0/checkpoints").glob("step-*"))
    assert begin_task().wait(timeout=120) == 0
    assert json.loads(Path("r/A1-seed0.json").read_text())["steps"] == 80
    states = [json.loads(path.read_text())["state"] for path in sorted(Path("q/.claims").glob("*.json"))]
    assert states == ["interrupted", "done"]


def list_tree(root: int) -> list[int]:
    """The processes below a shell, which itself would die of the signal."""
    table = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(line.split()[0]): int(line.split()[1]) for line in table.splitlines()}
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found[1:]

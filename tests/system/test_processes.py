"""A lock keeps others out while its process lives; a child runs nothing but what is installed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import some_moe
from some_moe.errors import ConfigError
from some_moe.system.processes import python_command, python_environment, take_lock

HOLDER = """
import sys, time
from pathlib import Path
from some_moe.system.processes import take_lock
lock = take_lock(Path(sys.argv[1]), "")
print("taken", flush=True)
time.sleep(60)
"""


def test_a_lock_is_held_until_it_is_closed(tmp_path: Path) -> None:
    lock = take_lock(tmp_path / "lock", "no")
    with pytest.raises(ConfigError, match="taken by another"):
        take_lock(tmp_path / "lock", "taken by another")
    lock.release()
    take_lock(tmp_path / "lock", "no").release()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        with pytest.raises(ConfigError, match="no"):
            take_lock(path, "no")
        process.send_signal(signal.SIGKILL)
    take_lock(path, "no").release()


def test_a_file_system_without_locks_is_used_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(lock: int, operation: int) -> None:  # noqa: ARG001
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    take_lock(tmp_path / "lock", "no").release()


def test_children_run_no_file_of_the_current_folder(tmp_path: Path) -> None:
    for name in ("queue", "types", "selectors", "argparse"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w')\n")
    words = python_command("-c", "import queue, types, selectors, argparse, some_moe.cli")
    assert subprocess.run(words, cwd=tmp_path, env=python_environment()).returncode == 0
    (tmp_path / "types.py").unlink()  # `python -m` itself imports it, before any line of ours
    as_module = [sys.executable, "-m", "some_moe", "--help"]
    environment = os.environ | {"PYTHONPATH": str(Path(some_moe.__file__).parents[1])}
    assert subprocess.run(as_module, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    assert not (tmp_path / "executed").exists()

"""A lock keeps others out while its process lives, and is no obstacle afterwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from some_moe.config import ConfigError
from some_moe.training.run_folder import take_lock

HOLDER = """
import sys, time
from pathlib import Path
from some_moe.training.run_folder import take_lock
take_lock(Path(sys.argv[1]), "")
print("taken", flush=True)
time.sleep(60)
"""


def test_a_lock_is_held_until_it_is_closed(tmp_path: Path) -> None:
    lock = take_lock(tmp_path / "lock", "no")
    with pytest.raises(ConfigError, match="taken by another"):
        take_lock(tmp_path / "lock", "taken by another")
    os.close(lock)
    os.close(take_lock(tmp_path / "lock", "no"))


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        with pytest.raises(ConfigError, match="no"):
            take_lock(path, "no")
        process.send_signal(signal.SIGKILL)
    os.close(take_lock(path, "no"))


def test_a_file_system_without_locks_is_used_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(lock: int, operation: int) -> None:  # noqa: ARG001
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    os.close(take_lock(tmp_path / "lock", "no"))

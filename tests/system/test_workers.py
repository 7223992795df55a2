"""A second process answers, tells why it could not, and goes when the first one does."""

import os
import subprocess
from pathlib import Path

import pytest

from some_moe.errors import FailureError
from some_moe.system.processes import python_command, python_environment
from some_moe.system.workers import start_worker


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import nothing from the current folder, which would else be that of these tests."""
    monkeypatch.chdir(tmp_path)


def test_what_is_sent_is_answered() -> None:
    with start_worker("tests.system.test_workers:double") as (send, receive):
        send([1, 2])
        assert receive() == [1, 2, 1, 2]


def test_a_worker_stands_in_no_folder_of_the_users(tmp_path: Path) -> None:
    with start_worker("tests.system.test_workers:tell_place") as (send, receive):
        send(None)
        assert receive() != str(tmp_path)


def test_a_worker_that_fails_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with start_worker("tests.system.test_workers:fail") as (send, receive):
        send(None)
        with pytest.raises(FailureError, match=r"a process of this program has ended .*no such luck.*; run it again"):
            receive()
    assert capfd.readouterr().err == ""


def test_a_worker_ends_with_the_process_that_asked_however_that_ends() -> None:
    script = "import os; from some_moe.system.workers import start_worker\n"
    script += (
        "with start_worker('tests.system.test_workers:wait_for_ever') as (send, _):\n    send(None)\n    os._exit(9)"
    )
    # Its stdout is a pipe that the worker holds open, too: reading it ends when both have ended.
    command = python_command("-c", script)
    done = subprocess.run(command, env=python_environment(), capture_output=True, timeout=60)
    assert done.returncode == 9


def double(receive: object) -> object:
    assert callable(receive)
    return receive() * 2


def tell_place(receive: object) -> str:
    assert callable(receive)
    receive()
    return os.getcwd()


def fail(receive: object) -> None:
    assert callable(receive)
    raise ValueError("no such luck")


def wait_for_ever(receive: object) -> None:
    import threading

    assert callable(receive)
    receive()
    threading.Event().wait()

"""Whoever waits hears what is done, and is heard; what is done soon is done without a word."""

import threading

import pytest

from some_moe.system import progress
from some_moe.system.progress import announce, listen


def test_only_what_takes_long_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with announce(said.append, "reading …"):
        pass
    assert said == []
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    heard = threading.Event()
    with announce(lambda text: said.append(text) or heard.set(), "reading …"):  # type: ignore[func-returns-value]
        assert heard.wait(10)
    assert said == ["reading …"]


def test_work_is_done_in_another_thread_and_gives_its_result_or_its_error() -> None:
    assert listen(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        listen(lambda: 1 // 0)


def test_ctrl_c_is_heard_while_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait(10)

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:  # noqa: ARG001
        begun.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        listen(work)
    end.set()

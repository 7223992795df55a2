"""`some watch` and `some serve` on the command line: bad input in one sentence, warnings, and an end by Ctrl-C."""

import importlib.util
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from some_moe.cli import main
from some_moe.live import server
from some_moe.system.processes import python_command, python_environment
from tests.live.folders import make_run

pytest.importorskip("starlette", reason="needs the extra live")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["watch", "{tmp}/nowhere"], "there is no folder"),
        (["watch", "{tmp}"], "is no run and holds none"),
        (["watch", "{tmp}", "--port", "70000"], "--port 70000 is out of range"),
        (["watch", "{tmp}", "--port", "x"], "invalid int value"),
        (["watch", "{run}", "--host", "no.such.name.invalid"], "cannot be used"),
        (["watch", "--prot", "1"], "is not an option"),
        (["serve", "{tmp}"], "is not a run"),
        (["serve", "{run}"], "has no checkpoint yet"),
        (["serve"], "needs RUN"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs" / "run") if "{run}" in words else tmp_path
    assert main([word.format(tmp=tmp_path, run=run) for word in words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert sentence in said.err
    assert said.err.count("\n") == 1


def test_a_port_that_is_taken_is_refused_and_the_usual_one_gives_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", str(run), "--port", str(port), "--no-browser"]) == 2
        assert f"port {port} of 127.0.0.1 cannot be used" in capsys.readouterr().err
        monkeypatch.setattr(server, "PORT", port)
        with server.bind("127.0.0.1", None) as other:
            assert other.getsockname()[1] != port


def test_missing_packages_are_named_with_their_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(server, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert main(["watch", str(make_run(tmp_path / "run"))]) == 2
    assert "pip install 'some-moe[live]'" in capsys.readouterr().err


def test_other_machines_are_let_in_with_a_warning_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(server, "run_app", lambda *given: ran.append(given))
    said: list[str] = []
    warned: list[str] = []
    run = make_run(tmp_path / "run")
    server.watch([run], port=0, browser=False, say=said.append, warning=warned.append)
    assert warned == []
    assert said[0].startswith("http://127.0.0.1:")
    server.watch([run], host="0.0.0.0", port=0, browser=False, say=said.append, warning=warned.append)
    assert "lets other machines in" in warned[0]
    assert ran[1][0].token in said[1]
    assert ran[0][0].token != ran[1][0].token  # each start has its own


def test_the_browser_is_opened_at_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(server.webbrowser, "open", opened.append)
    monkeypatch.setattr(server, "run_app", lambda app, sockets, started: started())  # noqa: ARG005
    said: list[str] = []
    server.watch([make_run(tmp_path / "run")], port=0, say=said.append)
    assert opened == said


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_ctrl_c_ends_it_in_silence_even_with_a_page_open(tmp_path: Path) -> None:
    words = python_command("-m", "some_moe", "watch", str(make_run(tmp_path / "run")), "--no-browser", "--port", "0")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=python_environment(), **pipes) as process:
        assert process.stdout is not None
        address, _, token = process.stdout.readline().strip().removeprefix("http://").partition("/#")
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port))) as page:
            page.sendall(f"GET /events HTTP/1.1\r\nHost: {address}\r\nx-some-token: {token}\r\n\r\n".encode())
            assert page.recv(100).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGINT)
            _, complaints = process.communicate(timeout=20)
    assert process.returncode == 0
    assert complaints == ""


def test_no_torch_is_loaded_before_a_model_is_asked_for() -> None:
    code = "import sys, some_moe.live.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run(python_command("-c", code), env=python_environment()).returncode == 0


TINY = ["--model.d-model", "32", "--model.num-layers", "2", "--model.num-heads", "2", "--model.num-experts=4",
        "--model.d-ffn", "32", "--model.vocab-size", "400", "--data.seq-len", "64", "--data.train-subset-size", "16",
        "--data.val-subset-size", "4", "--train.epochs", "1", "--train.sample-tokens", "4"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_the_demo_is_watched_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    words = ["demo", "--watch", "--no-browser", "--out", str(tmp_path / "demo"), *TINY]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(python_command("-m", "some_moe", *words), env=python_environment(), **pipes) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        while not any("trigram" in line for line in lines) or not any("/#" in line for line in lines):
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        found = re.search(r"http://((.+?):(\d+))/#([\w-]{32})", "".join(lines))  # two processes print
        assert found is not None
        address, host, port, token = found.groups()
        with socket.create_connection((host, int(port))) as client:
            client.sendall(f"GET /runs HTTP/1.0\r\nHost: {address}\r\nx-some-token: {token}\r\n\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)))


@pytest.mark.slow
def test_the_demo_trains_scores_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    assert main(["demo", "--out", str(tmp_path / "demo"), *TINY]) == 0
    said = capsys.readouterr().out
    assert "test loss" in said
    assert "trigram" in said
    assert main(["demo", "--out", str(tmp_path / "demo"), *TINY]) == 0  # it is finished already
    assert main(["demo", "--nonsense"]) == 2

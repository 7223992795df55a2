"""What a person sees, and what happens when nobody looks any more."""

import os
import sys

import pytest

from some_moe.sinks.display import Display


def test_lines_are_printed_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(speaks=True)
    display.begin(0, 20)
    display.say("hello")
    display.show(10, 1.5, 12345.6, 0.25)
    display.show(20, 1.25, 12345.6, None)
    assert capsys.readouterr().out.splitlines() == [
        "hello",
        "step 10/20  loss 1.5000  12,346 tokens/s  gini 0.250  0:00:00 left",
        "step 20/20  loss 1.2500  12,346 tokens/s",
    ]


def test_the_time_left_follows_from_the_steps_since_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display()
    display.begin(100, 200)
    monkeypatch.setattr("time.monotonic", lambda: display.begun + 3700.0)
    assert display.time_left(150) == "  1:01:40 left"
    assert display.time_left(100) == display.time_left(200) == ""


def test_it_falls_silent_when_the_reader_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    display = Display(speaks=True)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        display.say("into a pipe that is closed")
        assert not display.is_heard
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), write)  # takes what is still buffered
        display.show(1, 1.0, 1.0, None)


def test_a_terminal_has_a_bar_with_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, a terminal
    display = Display(speaks=True)
    with display:
        display.begin(0, 20)
        display.say("hello")
        display.advance(10)
        display.show(10, 1.5, 12345.6, 0.25)
    printed = capsys.readouterr().out
    assert "hello\n" in printed
    assert "10/20" in printed
    assert "loss 1.5000  12,346 tokens/s  gini 0.250" in printed


def test_one_that_does_not_speak_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as display:
        display.begin(0, 20)
        display.say("hello")
        display.show(10, 1.5, 12345.6, 0.25)
    assert capsys.readouterr().out == ""


def test_data_that_takes_long_has_a_line_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    display, clock = Display(speaks=True), iter(range(0, 1000, 8))
    seconds = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    for done in range(100, 200, 20):
        display.track("encoding", done * 10**6, 200 * 10**6)
        seconds[0] = next(clock)
    display.track("", 0, 0)
    assert capsys.readouterr().out == "encoding: 160 of 200 MB  0:00:11 left\n"


def test_data_that_takes_long_has_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, a terminal
    display = Display(speaks=True)
    display.track("encoding", 10**6, 20 * 10**6)
    assert capsys.readouterr().out == ""  # it may be done soon
    display.spoke -= 2
    display.track("encoding", 7 * 10**6, 20 * 10**6)
    display.track("", 0, 0)
    printed = capsys.readouterr().out
    assert "encoding" in printed
    assert "7/20" in printed
    with display:
        display.begin(0, 30)
        display.advance(11)
    assert "11/30" in capsys.readouterr().out

"""What a person sees, and what happens when nobody looks any more."""

import os
import sys

import pytest

from some_moe.sinks.display import PlainDisplay


def test_lines_are_printed_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    display.begin(0, 20)
    display.say("hello")
    display.show(10, 1.5, 12345.6, 0.25)
    display.show(20, 1.25, 12345.6, None)
    assert capsys.readouterr().out.splitlines() == [
        "hello",
        "step 10/20  loss 1.5000  12,346 tokens/s  gini 0.250",
        "step 20/20  loss 1.2500  12,346 tokens/s",
    ]


def test_it_falls_silent_when_the_reader_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    display = PlainDisplay()
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        display.say("into a pipe that is closed")
        assert not display.is_heard
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), write)  # takes what is still buffered
        display.show(1, 1.0, 1.0, None)

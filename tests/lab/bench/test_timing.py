"""Timing: counts, turns and order statistics. The clock itself is a list of numbers here."""

import pytest
import torch

from some_moe.lab.bench.timing import Call, Clock, summarize_times, time_in_turns


class CountingClock(Clock):
    """Every call takes as many milliseconds as it returns."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.turns: list[tuple[object, int]] = []

    def measure(self, call: Call, repeats: int) -> list[float]:
        self.turns.append((call(), repeats))
        return [float(call())] * repeats


def test_quartiles_of_known_times() -> None:
    timing = summarize_times([5.0, 1.0, 2.0, 4.0, 3.0])
    assert timing == {"ms_least": 1.0, "ms_low": 2.0, "ms": 3.0, "ms_high": 4.0, "repeats": 5}
    assert summarize_times([7.0])["ms"] == 7.0


def test_each_call_gets_its_share_of_time_and_slow_ones_at_least_three_calls() -> None:
    clock = CountingClock()
    found = time_in_turns(clock, {"fast": lambda: 2.0, "slow": lambda: 900.0}, seconds=0.1, rounds=5)
    assert (found["fast"]["repeats"], found["slow"]["repeats"]) == (50, 3)
    assert found["slow"]["ms"] == 900.0


def test_calls_take_turns_back_and_forth() -> None:
    clock = CountingClock()
    time_in_turns(clock, {"a": lambda: 1.0, "b": lambda: 2.0}, seconds=0.008, rounds=2)
    assert clock.turns == [(1.0, 3), (2.0, 3), (1.0, 4), (2.0, 2), (2.0, 2), (1.0, 4)]


def test_a_call_is_made_as_often_as_it_is_measured() -> None:
    calls: list[str] = []
    times = Clock(torch.device("cpu")).measure(lambda: calls.append("timed"), 2)
    assert calls == ["timed", "timed"]
    assert len(times) == 2
    assert min(times) >= 0


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock() -> None:
    device = torch.device("cuda")
    x = torch.randn(2048, 2048, device=device)
    clock = Clock(device)
    found = time_in_turns(clock, {"once": lambda: x @ x, "thrice": lambda: x @ x @ x @ x}, seconds=0.05)
    assert 2 < found["thrice"]["ms"] / found["once"]["ms"] < 4

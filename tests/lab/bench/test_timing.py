"""Timing: counts, turns and order statistics. The clock itself is a list of numbers here."""

import pytest
import torch

from some_moe.lab.bench.timing import Clock, Task, Timing, time_in_turns


class CountingClock(Clock):
    """Every call takes as many milliseconds as its task returns."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.turns: list[tuple[object, int]] = []

    def measure(self, task: Task, repeats: int) -> list[float]:
        self.turns.append((task.timed(), repeats))
        return [float(task.timed())] * repeats  # type: ignore[arg-type]


def test_quartiles_of_known_times() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.ms_least, timing.ms_low, timing.ms, timing.ms_high, timing.repeats) == (1.0, 2.0, 3.0, 4.0, 5)
    assert Timing.of([7.0]).ms == 7.0


def test_each_task_gets_its_share_of_time_and_slow_ones_at_least_three_calls() -> None:
    clock = CountingClock()
    found = time_in_turns(clock, {"fast": Task(lambda: 2.0), "slow": Task(lambda: 900.0)}, seconds=0.1, rounds=5)
    assert (found["fast"].repeats, found["slow"].repeats) == (50, 3)
    assert found["slow"].ms == 900.0


def test_tasks_take_turns_back_and_forth() -> None:
    clock = CountingClock()
    time_in_turns(clock, {"a": Task(lambda: 1.0), "b": Task(lambda: 2.0)}, seconds=0.008, rounds=2)
    assert clock.turns == [(1.0, 3), (2.0, 3), (1.0, 4), (2.0, 2), (2.0, 2), (1.0, 4)]


def test_what_comes_before_is_called_every_time() -> None:
    calls: list[str] = []
    task = Task(lambda: calls.append("timed"), before=lambda: calls.append("before"))
    times = Clock(torch.device("cpu")).measure(task, 2)
    assert calls == ["before", "timed", "before", "timed"]
    assert len(times) == 2
    assert min(times) >= 0


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock() -> None:
    device = torch.device("cuda")
    x = torch.randn(2048, 2048, device=device)
    clock = Clock(device)
    found = time_in_turns(clock, {"once": Task(lambda: x @ x), "thrice": Task(lambda: x @ x @ x @ x)}, seconds=0.05)
    assert 2 < found["thrice"].ms / found["once"].ms < 4

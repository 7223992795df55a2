"""Recordings: warmed up, refused where they cannot be made, and the same work again and again."""

from contextlib import nullcontext

import pytest
import torch

from some_moe.lab.bench import timing
from some_moe.lab.bench.timing import UnrecordableError, capture, record, side_stream, warm_up


def test_warming_up_calls_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "waiting_forbidden", nullcontext)
    calls: list[str] = []
    warm_up(lambda: calls.append("timed"))
    assert calls == ["timed"] * 3


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("called a synchronizing CUDA operation", "it waits for the device on its way"),
        ("no memory left\nand more lines", "no memory left"),
        ("", "RuntimeError"),
    ],
)
def test_what_cannot_be_recorded_says_why(message: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "waiting_forbidden", nullcontext)

    def fail() -> None:
        raise RuntimeError(message)

    with pytest.raises(UnrecordableError, match=f"^{reason}$"):
        warm_up(fail)


def assert_usable() -> None:
    """The device takes work, gives memory back, and records, on the stream of always."""
    device = torch.device("cuda")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.cuda.empty_cache()
    x = torch.ones(8, device=device)
    assert float((x + 1).sum()) == 16.0
    replay, doubled = record(lambda: 2 * x, device)
    x.fill_(3.0)
    replay()
    assert doubled.tolist() == [6.0] * 8


@pytest.mark.gpu
def test_replays_compute_anew_from_what_lies_in_the_inputs() -> None:
    assert_usable()


@pytest.mark.gpu
def test_a_backward_pass_is_recorded_with_its_forward_pass() -> None:
    x = torch.ones(8, device="cuda", requires_grad=True)
    replay, grad = record(lambda: torch.autograd.grad((x**3).sum(), x)[0], torch.device("cuda"))
    with torch.no_grad():
        x.fill_(2.0)
    replay()
    assert grad.tolist() == [12.0] * 8


@pytest.mark.gpu
def test_what_waits_is_refused_before_it_is_recorded() -> None:
    x = torch.ones(8, device="cuda")
    with pytest.raises(UnrecordableError, match="it waits for the device"):
        record(lambda: x.nonzero(), torch.device("cuda"))
    assert_usable()


@pytest.mark.gpu
@pytest.mark.parametrize("breaks", ["waits", "raises"])
def test_a_recording_that_breaks_off_leaves_the_device_usable(breaks: str) -> None:
    device = torch.device("cuda")
    x = torch.ones(8, device=device)

    def call() -> float:
        total = (2 * x).sum()
        if breaks == "raises":
            raise ValueError("not today")
        return float(total)

    with torch.cuda.stream(side_stream(device)), pytest.raises(UnrecordableError):
        capture(call, torch.cuda.graph_pool_handle(), side_stream(device))
    torch.cuda.synchronize()
    assert_usable()

"""A step of the optimizer is torch's clipping and torch's AdamW, on a GPU up to rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from some_moe.config import TrainConfig
from some_moe.training.optim import Optimizer, make_optimizer, set_rate

SHAPES = ((70, 100), (3, 5000), (17,), (), (1,))


class Numbers(nn.Module):
    """Parameters of many shapes, the last of which gets no gradient."""

    def __init__(self, device: str) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList(torch.randn(shape, generator=source).to(device) for shape in SHAPES)


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    source = torch.Generator().manual_seed(step)
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=source).to(parameter.device)


def choose_kind(device: str) -> type[Optimizer]:
    """As a machine chooses it."""
    if device == "cpu":
        return Optimizer
    from some_moe.fast.adamw import FusedAdamW

    return FusedAdamW


def make_rate(rate: float, device: str) -> Tensor:
    return torch.tensor(rate, dtype=torch.float64, device=device)


def train(device: str, clip: float | None, *, plainly: bool, steps: int = 4) -> tuple[list[Tensor], list[float]]:
    model = Numbers(device)
    optimizer = make_optimizer(model, TrainConfig(weight_decay=0.1, decay_on="matrices"), choose_kind(device))
    parameters, norms = list(model.parameters()), []
    for step in range(steps):
        give_gradients(parameters, step)
        set_rate(optimizer, make_rate(1e-2 / (step + 1), device))
        if plainly:
            norm = nn.utils.clip_grad_norm_(parameters, clip or float("inf"))
            optimizer.step()
        else:
            norm = optimizer.clip_and_step(clip)
        norms.append(float(norm))
    state = [optimizer.state[p][part] for p in parameters[:-1] for part in ("exp_avg", "exp_avg_sq", "step")]
    return [*(p.detach() for p in parameters), *state], norms


@pytest.mark.parametrize("clip", [None, 1.0, 1e6])
def test_on_a_cpu_it_is_torch_bit_by_bit(clip: float | None) -> None:
    found, expected = train("cpu", clip, plainly=False), train("cpu", clip, plainly=True)
    assert found[1] == expected[1]
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 1.0, 1e6])
def test_on_a_gpu_one_pass_moves_all_as_torch_does(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    kind: Any = choose_kind("cuda")
    plain = kind.step_at_once
    monkeypatch.setattr(kind, "step_at_once", lambda *given: taken.append(plain(*given)) or taken[-1])
    found, expected = train("cuda", clip, plainly=False), train("cuda", clip, plainly=True)
    assert len(taken) == 4
    assert all(norm is not None for norm in taken)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    for a, b in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    again = train("cuda", clip, plainly=False)
    assert all(torch.equal(a, b) for a, b in zip(found[0], again[0], strict=True))


@pytest.mark.gpu
def test_a_captured_step_goes_on_reading_its_own_gradients() -> None:
    model = Numbers("cuda")
    optimizer: Any = make_optimizer(model, TrainConfig(), choose_kind("cuda"))
    parameters, rate = list(model.parameters()), make_rate(6e-4, "cuda")
    set_rate(optimizer, rate)
    for step in range(2):
        give_gradients(parameters, step)
        optimizer.clip_and_step(1.0)
    kept = [p.grad for p in parameters[:-1] if p.grad is not None]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        optimizer.clip_and_step(1.0)
    optimizer.finish_capture()
    expected, _ = train_like(optimizer, parameters)
    for p in parameters:
        p.grad = None  # what the next ordinary step would put elsewhere
    for step in range(2, 4):
        source = torch.Generator().manual_seed(step)
        for grad in kept:
            grad.copy_(torch.randn(grad.shape, generator=source))
        graph.replay()
    for a, b in zip(parameters, expected, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-5, atol=1e-6)


def train_like(optimizer: Optimizer, parameters: list[nn.Parameter]) -> tuple[list[Tensor], Optimizer]:
    """Copies that take steps 2 and 3 by torch, from where the parameters are now."""
    model = Numbers("cuda")
    copies = list(model.parameters())
    other = make_optimizer(model, TrainConfig())
    for mine, its in zip(copies, parameters, strict=True):
        mine.data.copy_(its.data)
        if optimizer.state.get(its):
            other.state[mine] = {name: value.clone() for name, value in optimizer.state[its].items()}
    for step in range(2, 4):
        give_gradients(copies, step)
        nn.utils.clip_grad_norm_(copies, 1.0)
        other.step()
    return [copy.detach() for copy in copies], other


@pytest.mark.gpu
def test_a_gradient_that_is_not_aligned_takes_the_ordinary_way() -> None:
    model = Numbers("cuda")
    optimizer: Any = make_optimizer(model, TrainConfig(), choose_kind("cuda"))
    parameters = list(model.parameters())
    set_rate(optimizer, make_rate(6e-4, "cuda"))
    give_gradients(parameters, 0)
    parameters[2].grad = torch.randn(18, device="cuda")[1:]
    assert optimizer.step_at_once(1.0) is None
    before = parameters[2].detach().clone()
    optimizer.clip_and_step(1.0)
    assert not torch.equal(before, parameters[2].detach())

"""How the CPU path puts experts together, and that the memory it keeps carries nothing from call to call."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from some_moe.experts import choose_kernel
from some_moe.experts.cpu import Batch, plan_batches, schedule_slots

from .test_parity import assert_parity, make_weights, run

LOADS = {
    "even": [10, 9, 10, 10],
    "pairs": [4, 20, 0, 19, 4, 1],
    "one-busy": [0, 0, 60, 1],
    "one-token": [1, 0, 0, 0],
}


def draw_experts(loads: list[int]) -> Tensor:
    """One expert a token, in a mixed order."""
    experts = torch.arange(len(loads)).repeat_interleave(torch.tensor(loads))
    return experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(0))][:, None]


def test_nearly_even_loads_are_one_batch() -> None:
    assert plan_batches(LOADS["even"]) == [Batch(range(4), 10)]


def test_experts_of_nearly_the_same_load_are_paired_and_others_alone() -> None:
    assert plan_batches(LOADS["pairs"]) == [Batch([1, 3], 20), Batch([0, 4], 4), Batch([5], 1)]
    assert plan_batches(LOADS["one-busy"]) == [Batch([2], 60), Batch([3], 1)]


def test_more_than_two_threads_share_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert plan_batches(LOADS["pairs"]) == [
        Batch([expert], load) for expert, load in ((1, 20), (3, 19), (4, 4), (0, 4), (5, 1))
    ]
    assert plan_batches(LOADS["even"]) == [Batch(range(4), 10)]


@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("batched", [False, True])
def test_every_slot_has_a_row_of_its_own_within_its_expert(loads: list[int], batched: bool) -> None:
    experts = draw_experts(loads)
    slots = schedule_slots(experts, len(loads), batched=batched)
    owners = [expert for batch in slots.batches for expert in batch.experts for _ in range(batch.num_rows)]
    assert len(slots.token) == len(owners) == sum(slots.sizes)
    rows = slots.place.flatten()
    assert len(set(rows.tolist())) == len(rows)
    assert torch.equal(torch.tensor(owners)[slots.place], experts)
    assert torch.equal(slots.token[rows], torch.arange(len(rows)))


@pytest.mark.parametrize("kind", ["frozen", "hidden"])
@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
def test_every_way_of_batching_equals_the_reference(loads: list[int], kind: str) -> None:
    torch.manual_seed(0)
    experts = draw_experts(loads)
    x, gates = torch.randn(len(experts), 6, dtype=torch.float64), torch.rand(experts.shape, dtype=torch.float64)
    assert_parity(x, experts, gates, make_weights(kind, len(loads), 6, 9))


def test_no_tokens_make_no_output() -> None:
    none = torch.empty(0, 6, dtype=torch.float64)
    y = choose_kernel("cpu")(none, torch.empty(0, 2, dtype=torch.int64), none[:, :2], make_weights("frozen", 4, 6, 9))
    assert y.shape == (0, 6)


@pytest.mark.parametrize("kind", ["frozen", "hidden"])
def test_layers_between_forward_and_backward_change_nothing(kind: str) -> None:
    torch.manual_seed(0)
    cpu, weights, experts = choose_kernel("cpu"), make_weights(kind, 4, 6, 9), draw_experts(LOADS["even"])
    x = torch.randn(len(experts), 6, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(experts.shape, dtype=torch.float64, requires_grad=True)
    y = cpu(x, experts, gates, weights)
    first = torch.autograd.grad(y.sum(), (x, gates), retain_graph=True)
    kept = [y.detach().clone(), *(grad.clone() for grad in first)]
    with torch.inference_mode():  # whose tensors a later call could not write to
        cpu(torch.randn(99, 6, dtype=torch.float64), torch.randint(4, (99, 1)), torch.rand(99, 1).double(), weights)
    run(cpu, torch.randn(50, 6, dtype=torch.float64), torch.randint(4, (50, 1)), torch.rand(50, 1).double(), weights)
    second = torch.autograd.grad(y.sum(), (x, gates))
    for before, now in zip((*kept, *kept[1:]), (y, *first, *second), strict=True):
        assert torch.equal(before, now)


@pytest.mark.parametrize("stance", ["default", "eager_then_compile"])  # the second runs each frame as it is, once
@pytest.mark.parametrize("name", ["cpu", "reference", "auto"])
def test_compiled_graphs_end_before_the_loop_over_experts_and_serve_every_routing(name: str, stance: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    mix, weights, counter = choose_kernel(name), make_weights("frozen", 4, 6, 9), CompileCounter()
    compiled = torch.compile(lambda x, *rest: mix(2 * x, *rest) + 1, backend=counter, dynamic=False)
    x, gates = torch.randn(40, 6, dtype=torch.float64), torch.rand(40, 1, dtype=torch.float64)
    with torch.compiler.set_stance(stance):
        for loads in ([10, 10, 10, 10], [40, 0, 0, 0], [1, 2, 30, 7], [1, 2, 30, 7]):
            experts = draw_experts(loads)
            assert torch.allclose(compiled(x, experts, gates, weights), mix(2 * x, experts, gates, weights) + 1)
    assert (counter.frame_count, counter.op_count) == (2, 2)  # the product before, the sum behind

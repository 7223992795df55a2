"""The grouped path equals the reference: output, dX, gate and weight gradients, in float32 on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from some_moe.experts import ExpertWeights, LoraWeights, choose_kernel
from some_moe.experts.grouped import ALIGNMENT, MixRows, lay_out, sort_slots

from .test_parity import KINDS, make_weights, run, trained_tensors

TOLERANCE = 1e-5


def convert(weights: ExpertWeights, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    def cast(stack: Tensor | None) -> Tensor | None:
        return None if stack is None else stack.detach().to(dtype).requires_grad_(stack.requires_grad)

    lora = weights.lora
    stacks = {name: cast(getattr(weights, name)) for name in ("up", "up_bias", "down", "down_bias", "gain")}
    if lora is not None:
        names = ("up_in", "up_out", "down_in", "down_out")
        lora = LoraWeights(**{name: cast(getattr(lora, name)) for name in names})
    return ExpertWeights(**stacks, lora=lora)


TRAINED = ("full", "lora", "gain")
ROUTINGS = {
    "uneven": torch.tensor([[0, 2], [2, 5], [5, 2]] * 7 + [[3, 2]]),  # loads 7, 0, 22, 1, 0, 14, 0
    "all-on-one-expert": torch.full((13, 1), 4),
    "all-on-the-last-expert": torch.full((8, 1), 6),
    "one-token": torch.tensor([[1, 5, 0]]),
    "all-experts": torch.rand(11, 7, generator=torch.Generator().manual_seed(0)).argsort(1),
}


def draw_case(experts: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and gates in float64 for a routing (N, K)."""
    torch.manual_seed(len(experts))
    return torch.randn(len(experts), 16, dtype=torch.float64), torch.rand(experts.shape, dtype=torch.float64)


def assert_grouped_equals_the_reference(kind: str, experts: Tensor, num_experts: int) -> None:
    (x, gates), weights = draw_case(experts), make_weights(kind, num_experts, 16, 24)
    expected = run(choose_kernel("reference"), x, experts, gates, weights)
    found = run(choose_kernel("grouped"), x.float(), experts, gates.float(), convert(weights))
    assert len(found) == 3 + len(trained_tensors(weights))
    for left, right in zip(found, expected, strict=True):
        assert (left.double() - right).norm() <= TOLERANCE * right.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "e", "k"), [(13, 5, 2), (7, 4, 4), (9, 6, 1)])
def test_grouped_equals_the_reference(kind: str, n: int, e: int, k: int) -> None:
    torch.manual_seed(n)
    experts = torch.rand(n, e - 1 if k < e else e).topk(k).indices  # the last expert is empty where it may be
    assert_grouped_equals_the_reference(kind, experts, e)


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("experts", ROUTINGS.values(), ids=ROUTINGS)
def test_any_load_is_trained(kind: str, experts: Tensor) -> None:
    assert_grouped_equals_the_reference(kind, experts, 7)


class GroupSizes(TorchDispatchMode):
    """Notes the group sizes of every grouped product that adds up over rows, as weight gradients do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dim() == args[1].dim() == 2:
            self.seen.append(args[2].diff(prepend=args[2].new_zeros(1)).tolist())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "products"), [("full", 4), ("lora", 4), ("gain", 1), ("frozen", 0), ("hidden", 0)])
@pytest.mark.parametrize("experts", ROUTINGS.values(), ids=ROUTINGS)
def test_groups_of_weight_gradients_are_multiples_of_16_bytes_and_never_empty(
    kind: str, products: int, experts: Tensor
) -> None:
    x, gates = draw_case(experts)
    with GroupSizes() as sizes:
        run(choose_kernel("grouped"), x.float(), experts, gates.float(), convert(make_weights(kind, 7, 16, 24)))
    assert len(sizes.seen) == products
    for seen in sizes.seen:
        assert min(seen) > 0
        assert all(size % 8 == 0 for size in seen)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("experts", ROUTINGS.values(), ids=ROUTINGS)
def test_every_slot_has_one_row_among_those_of_its_expert(experts: Tensor, pad: bool) -> None:
    layout, chosen = lay_out(experts, 7, pad=pad), experts.flatten()
    slots = torch.arange(len(chosen))
    assert torch.equal(layout.slot[layout.place], slots)
    assert torch.equal(layout.slot[layout.slot >= 0].sort().values, slots)
    assert torch.equal(layout.expert[layout.place], chosen)
    assert torch.equal(layout.expert.bincount(minlength=7).cumsum(0), layout.ends.long())
    assert len(layout.slot) == (len(chosen) + 7 * ALIGNMENT + -len(chosen) % ALIGNMENT if pad else len(chosen))


@pytest.mark.parametrize("kind", TRAINED)
def test_without_gradients_nothing_is_padded_and_the_output_is_the_same(kind: str) -> None:
    experts, weights = ROUTINGS["uneven"], convert(make_weights(kind, 7, 16, 24))
    x, gates = (tensor.float() for tensor in draw_case(experts))
    y = choose_kernel("grouped")(x, experts, gates, weights)
    with torch.no_grad():
        assert torch.allclose(choose_kernel("grouped")(x, experts, gates, weights), y, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time_and_compiled_in_one_graph(kind: str) -> None:
    torch.compiler.reset()  # every kind is a graph of its own, more than dynamo takes for changes of one
    experts, weights = ROUTINGS["uneven"], convert(make_weights(kind, 7, 16, 24), torch.bfloat16)
    x, gates = (tensor.bfloat16() for tensor in draw_case(experts))  # a compiler lets grouped_mm take nothing else
    mix = choose_kernel("grouped")
    compiled = torch.compile(mix, fullgraph=True, backend="aot_eager", dynamic=False)
    first, *others = (run(kernel, x, experts, gates, weights) for kernel in (mix, mix, compiled))
    for other in others:
        assert all(torch.equal(left, right) for left, right in zip(first, other, strict=True))


def test_float32_gates_weigh_bfloat16_rows_unrounded() -> None:
    torch.manual_seed(0)
    order, _, _ = sort_slots(torch.rand(20, 5).topk(3).indices, 5)
    rows, grad = torch.randn(60, 16).bfloat16().requires_grad_(), torch.randn(20, 16).bfloat16()
    gates = torch.rand(20, 3, requires_grad=True)
    y = MixRows.apply(rows, gates, order, order.argsort())  # type: ignore[no-untyped-call]
    grad_rows, grad_gates = torch.autograd.grad(y, (rows, gates), grad)
    token, gate = order // 3, gates.detach().flatten()[order][:, None]
    back = grad[token].float()
    exact = torch.zeros(20, 16).index_add_(0, token, gate * rows.detach().float())
    assert torch.allclose(y.float(), exact, rtol=2**-8, atol=1e-6)
    assert torch.equal(grad_rows, (gate * back).bfloat16())
    assert torch.allclose(grad_gates.flatten()[order], (rows.detach().float() * back).sum(1), atol=1e-5)


def test_slots_are_sorted_stably_and_ends_count_them() -> None:
    experts = torch.tensor([[2, 0], [0, 2], [3, 2]])
    order, _, ends = sort_slots(experts, 5)
    assert order.tolist() == [1, 2, 0, 3, 5, 4]
    assert ends.tolist() == [2, 2, 5, 6, 6]


@pytest.mark.parametrize("num_experts", [3, 300, 40_000])
def test_slots_of_any_number_of_experts(num_experts: int) -> None:
    experts = torch.randint(num_experts, (50, 2))
    _, expert, ends = sort_slots(experts, num_experts)
    assert torch.equal(expert.long(), experts.flatten().sort().values)
    counts = experts.flatten().bincount(minlength=num_experts)
    assert torch.equal(ends.long(), counts.cumsum(0))

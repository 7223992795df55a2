"""On a GPU, in bf16, the grouped path trains experts of any load: output and all gradients equal float64, norm-wise."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from some_moe.experts import ExpertWeights, MixExperts, choose_kernel

from .test_grouped import ROUTINGS, TRAINED
from .test_parity import make_weights, run, trained_tensors

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-2
D, F, E = 64, 136, 7
LOADS = ROUTINGS | {"many": torch.rand(1001, E - 1, generator=torch.Generator().manual_seed(1)).topk(3).indices}


def convert(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """The same experts on the GPU, scaled so that bf16 holds what they compute."""

    def cast(stack: Tensor) -> Tensor:
        scaled = stack.detach() * stack.shape[-1] ** -0.5
        # Rounded in any case: the reference computes with the very numbers that bf16 holds.
        return scaled.bfloat16().to("cuda", dtype).requires_grad_(stack.requires_grad)

    def cast_all(stacks: object) -> dict[str, Tensor]:
        found = {field.name: getattr(stacks, field.name) for field in fields(stacks)}  # type: ignore[arg-type]
        return {name: cast(stack) for name, stack in found.items() if isinstance(stack, Tensor)}

    lora = None if weights.lora is None else replace(weights.lora, **cast_all(weights.lora))
    return replace(weights, **cast_all(weights), lora=lora)


def draw_case(experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, routing and gates on the GPU."""
    torch.manual_seed(len(experts))
    return torch.randn(len(experts), D).bfloat16().cuda(), experts.cuda(), torch.rand(experts.shape).bfloat16().cuda()


def poison_free_memory() -> None:
    """Leave NaN in the memory that is handed out next: what a kernel does not write must reach no result."""
    blocks = [torch.full((1 << size,), float("nan"), device="cuda") for size in range(8, 24)]
    del blocks


def run_bf16(mix: MixExperts, case: tuple[Tensor, Tensor, Tensor], weights: ExpertWeights) -> list[Tensor]:
    poison_free_memory()
    found = run(mix, *case, weights)
    torch.cuda.synchronize()  # a failed assertion on the device belongs to this test and no other
    return found


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("experts", LOADS.values(), ids=LOADS)
def test_any_load_is_trained_in_bf16(kind: str, experts: Tensor) -> None:
    weights = make_weights(kind, E, D, F)
    x, chosen, gates = draw_case(experts)
    found = run_bf16(choose_kernel("grouped"), (x, chosen, gates), convert(weights, torch.bfloat16))
    expected = run(choose_kernel("reference"), x.double(), chosen, gates.double(), convert(weights, torch.float64))
    assert len(found) == 3 + len(trained_tensors(weights))
    for left, right in zip(found, expected, strict=True):
        assert torch.isfinite(left).all()
        assert (left.double() - right).norm() <= TOLERANCE * right.norm()


@pytest.mark.parametrize("kind", TRAINED)
def test_an_expert_without_tokens_gets_a_gradient_of_exactly_zero(kind: str) -> None:
    weights = convert(make_weights(kind, E, D, F), torch.bfloat16)
    _, _, _, *grads = run_bf16(choose_kernel("grouped"), draw_case(ROUTINGS["uneven"]), weights)
    for grad in grads:
        assert (grad[[1, 4, 6]] == 0).all()


@pytest.mark.parametrize("kind", TRAINED)
def test_the_same_bits_every_time(kind: str) -> None:
    weights, case = convert(make_weights(kind, E, D, F), torch.bfloat16), draw_case(LOADS["many"])
    first, second = (run_bf16(choose_kernel("grouped"), case, weights) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_computes_the_same(kind: str) -> None:
    weights, case = convert(make_weights(kind, E, D, F), torch.bfloat16), draw_case(LOADS["many"])
    mix = choose_kernel("grouped")
    expected = run_bf16(mix, case, weights)
    compiled = torch.compile(mix, fullgraph=True, dynamic=False)
    found, again = (run_bf16(compiled, case, weights) for _ in range(2))
    for left, right, repeated in zip(found, expected, again, strict=True):
        assert (left.double() - right.double()).norm() <= TOLERANCE * right.double().norm()
        assert torch.equal(left, repeated)

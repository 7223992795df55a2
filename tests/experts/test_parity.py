"""The CPU path equals the obvious reference in float64 to 1e-10: output, dX, gate and weight gradients."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from some_moe.experts import ExpertWeights, LoraWeights, MixExperts, choose_kernel, gathered

TOLERANCE = 1e-10
KINDS = ("frozen", "full", "lora", "gain", "hidden", "gated frozen", "gated full", "gated lora", "gated gain")


def make_weights(kind: str, experts: int, d: int, f: int) -> ExpertWeights:
    source = torch.Generator().manual_seed(experts + d + f)

    def draw(*shape: int, trained: bool = False) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=source).requires_grad_(trained)

    gated, kind = kind.startswith("gated"), kind.removeprefix("gated ")
    full, high = kind == "full", 2 * f if gated else f
    base = {"up": draw(experts, high, d, trained=full), "up_bias": draw(experts, high, trained=full)}
    if kind != "hidden":
        base |= {"down": draw(experts, d, f, trained=full), "down_bias": draw(experts, d, trained=full)}
    lora = None
    if kind == "lora":
        lora = LoraWeights(
            up_in=draw(experts, 2, d, trained=True),
            up_out=draw(experts, high, 2, trained=True),
            down_in=draw(experts, 2, f, trained=True),
            down_out=draw(experts, d, 2, trained=True),
        )
    return ExpertWeights(**base, gain=draw(experts, f, trained=True) if kind == "gain" else None, lora=lora)


def trained_tensors(weights: ExpertWeights) -> list[Tensor]:
    stacks = [getattr(weights, field.name) for field in fields(weights)]
    if weights.lora is not None:
        stacks += [getattr(weights.lora, field.name) for field in fields(weights.lora)]
    return [stack for stack in stacks if isinstance(stack, Tensor) and stack.requires_grad]


def run(kernel: MixExperts, x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> list[Tensor]:
    """Output and every gradient, for a fixed random cotangent."""
    inputs = [x.clone().requires_grad_(), gates.clone().requires_grad_()]
    y = kernel(inputs[0], experts, inputs[1], weights)
    cotangent = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad((y * cotangent).sum(), inputs + trained_tensors(weights))]


def assert_parity(x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights) -> None:
    expected = run(choose_kernel("reference"), x, experts, gates, weights)
    found = run(choose_kernel("cpu"), x, experts, gates, weights)
    for left, right in zip(found, expected, strict=True):
        assert torch.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE)


def draw_case(seed: int, n: int, d: int, e: int, k: int, skew: float) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(n, d, dtype=torch.float64)
    # A strong slope over the experts gives skewed loads and leaves some experts empty.
    scores = torch.randn(n, e) - skew * torch.arange(e)
    gates = torch.randn(n, k, dtype=torch.float64).softmax(-1)
    return x, scores.topk(k).indices, gates


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    n=st.integers(1, 40),
    d=st.integers(1, 13),
    f=st.integers(2, 17),
    e=st.integers(1, 9),
    skew=st.sampled_from([0.0, 1.0, 50.0]),
    data=st.data(),
)
def test_cpu_path_equals_reference_on_random_shapes(
    kind: str, seed: int, n: int, d: int, f: int, e: int, skew: float, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, e))
    assert_parity(*draw_case(seed, n, d, e, k, skew), make_weights(kind, e, d, f))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "e", "k", "skew"),
    [(1, 8, 2, 0.0), (33, 5, 5, 0.0), (64, 16, 1, 99.0), (64, 16, 2, 99.0), (3, 64, 4, 0.0)],
    ids=["one-token", "k-equals-E", "all-on-one-expert", "skewed", "empty-experts"],
)
def test_cpu_path_equals_reference_at_the_edges(kind: str, n: int, e: int, k: int, skew: float) -> None:
    assert_parity(*draw_case(0, n, 12, e, k, skew), make_weights(kind, e, 12, 20))


@pytest.mark.parametrize("kind", KINDS)
def test_few_slots_are_gathered_to_the_same_output(kind: str) -> None:
    (x, experts, gates), weights = draw_case(5, 7, 12, 9, 3, 1.0), make_weights(kind, 9, 12, 20)
    expected = choose_kernel("reference")(x, experts, gates, weights)
    assert gathered.can_mix(experts) is False, "training wants gradients"
    with torch.no_grad():
        assert gathered.can_mix(experts)
        assert not gathered.can_mix(experts.repeat(2, 1))
        found = choose_kernel("auto")(x, experts, gates, weights)
    assert torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_frozen_gradients_pass_gradcheck() -> None:
    x, experts, gates = draw_case(3, 5, 3, 4, 2, 0.0)
    weights = make_weights("frozen", 4, 3, 4)
    cpu = choose_kernel("cpu")
    assert torch.autograd.gradcheck(
        lambda x, g: cpu(x, experts, g, weights), (x.requires_grad_(), gates.requires_grad_())
    )


def test_bfloat16_weights_are_computed_in_the_precision_of_x() -> None:
    x, experts, gates = draw_case(0, 20, 8, 4, 2, 0.0)
    weights = make_weights("frozen", 4, 8, 16)
    stored = {name: getattr(weights, name).bfloat16() for name in ("up", "up_bias", "down", "down_bias")}
    exact = {name: stack.double() for name, stack in stored.items()}
    left = choose_kernel("cpu")(x, experts, gates, ExpertWeights(**stored))
    right = choose_kernel("reference")(x, experts, gates, ExpertWeights(**exact))
    assert torch.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE)


def test_frozen_weights_get_no_gradient_and_trained_ones_do() -> None:
    x, experts, gates = draw_case(0, 6, 4, 3, 2, 0.0)
    assert make_weights("frozen", 3, 4, 5).is_frozen
    assert not make_weights("lora", 3, 4, 5).is_frozen
    weights = make_weights("full", 3, 4, 5)
    choose_kernel("cpu")(x, experts, gates, weights).sum().backward()
    assert all(stack.grad is not None and stack.grad.abs().sum() > 0 for stack in trained_tensors(weights))


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(ValueError, match=r"kernel 'cuda9' is unknown; choose one of auto, reference, cpu"):
        choose_kernel("cuda9")

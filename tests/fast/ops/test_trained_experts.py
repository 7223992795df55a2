"""Experts that learn, by Triton: output and every gradient equal the float64 reference, norm-wise, at any load."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from some_moe.experts import ExpertWeights, LoraWeights
from some_moe.training.machine import load_fast_kernel

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
STACKS = ("up", "up_bias", "down", "down_bias")


def draw(num_experts: int, d: int, f: int, *, gated: bool = False, rank: int = 0, gain: bool = False) -> ExpertWeights:
    def stack(*shape: int, scale: float, trained: bool = True) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).requires_grad_(trained)

    wide, full = 2 * f if gated else f, not rank and not gain
    lora = None
    if rank:
        lora = LoraWeights(
            up_in=stack(num_experts, rank, d, scale=d**-0.5),
            up_out=stack(num_experts, wide, rank, scale=0.3),
            down_in=stack(num_experts, rank, f, scale=f**-0.5),
            down_out=stack(num_experts, d, rank, scale=0.3),
        )
    return ExpertWeights(
        up=stack(num_experts, wide, d, scale=d**-0.5, trained=full),
        up_bias=stack(num_experts, wide, scale=0.3, trained=full),
        down=stack(num_experts, d, f, scale=f**-0.5, trained=full),
        down_bias=stack(num_experts, d, scale=0.3, trained=full),
        gain=stack(num_experts, f, scale=1.0) if gain else None,
        lora=lora,
    )


def map_stacks(weights: ExpertWeights, change: Any) -> ExpertWeights:
    """The weights with each stack changed, still wanting a gradient where it did."""

    def apply(stack: Tensor | None) -> Tensor | None:
        return None if stack is None else change(stack.detach()).requires_grad_(stack.requires_grad)

    lora = weights.lora and LoraWeights(**{name: apply(stack) for name, stack in vars(weights.lora).items()})
    return replace(weights, lora=lora, **{name: apply(getattr(weights, name)) for name in (*STACKS, "gain")})


def trained(weights: ExpertWeights) -> dict[str, Tensor]:
    stacks = {name: getattr(weights, name) for name in (*STACKS, "gain")} | (vars(weights.lora) if weights.lora else {})
    return {name: stack for name, stack in stacks.items() if stack is not None and stack.requires_grad}


def run(mix: Any, x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights, back: Tensor) -> dict[str, Tensor]:
    x, gates = x.clone().requires_grad_(), gates.clone().requires_grad_()
    y = mix(x, experts, gates, weights)
    wanted = {"x": x, "gates": gates} | trained(weights)
    return {"y": y.detach()} | dict(
        zip(wanted, torch.autograd.grad(y, [*wanted.values()], back.to(y.dtype)), strict=True)
    )


def assert_equals_reference(
    n: int, d: int, f: int, experts: Tensor, num_experts: int, dtype: torch.dtype = torch.bfloat16, **kind: Any
) -> None:
    weights = draw(num_experts, d, f, **kind)
    x, back = (torch.randn(n, d, device="cuda").to(dtype) for _ in range(2))
    gates = torch.rand(experts.shape, device="cuda")
    found = run(load_fast_kernel("triton"), x, experts, gates, weights, back)
    rounded = map_stacks(weights, lambda stack: stack.to(dtype).double())
    expected = run(load_fast_kernel("reference"), x.double(), experts, gates.double(), rounded, back.double())
    for name, right in expected.items():
        left = found[name]
        assert torch.isfinite(left).all(), name
        assert left.dtype == (dtype if name in ("x", "y") else torch.float32)
        assert (left.double() - right).norm() <= TOLERANCE[dtype] * right.norm(), name


def choose(n: int, num_experts: int, top_k: int) -> Tensor:
    return torch.rand(n, num_experts, device="cuda").topk(top_k).indices


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"rank": 8},
    "gains": {"gain": True},
    "gated": {"gated": True},
    "gated lora": {"gated": True, "rank": 4},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "d", "f", "num_experts", "top_k"),
    [
        (333, 48, 88, 5, 5),
        (1000, 384, 1024, 64, 4),
        (300, 72, 136, 9, 3),
        (1, 64, 64, 4, 2),
        (5000, 128, 256, 6, 2),
        (1600, 256, 512, 16, 2),
    ],
)
def test_bf16_equals_float64(kind: str, n: int, d: int, f: int, num_experts: int, top_k: int) -> None:
    torch.manual_seed(n)
    assert_equals_reference(n, d, f, choose(n, num_experts, top_k), num_experts, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_float32_equals_float64(kind: str) -> None:
    torch.manual_seed(0)
    assert_equals_reference(333, 48, 88, choose(333, 5, 2), 5, torch.float32, **KINDS[kind])


@pytest.mark.parametrize(("d", "f"), [(128, 256), (96, 200)])
@pytest.mark.parametrize("n", [7, 513, 1000])
def test_all_tokens_on_one_expert_and_others_empty(n: int, d: int, f: int) -> None:
    assert_equals_reference(n, d, f, torch.full((n, 1), 3, device="cuda"), 7)


@pytest.mark.parametrize("kind", ["full", "lora", "gated"])
def test_compiled_code_and_later_calls_give_the_same_bits(kind: str) -> None:
    from some_moe.fast.ops import trained_experts

    torch.manual_seed(3)
    weights, experts = draw(8, 128, 128, **KINDS[kind]), choose(900, 8, 2)
    x, back = (torch.randn(900, 128, device="cuda").bfloat16() for _ in range(2))
    arguments = x, experts, torch.rand(900, 2, device="cuda"), weights, back
    plain = trained_experts.mix_experts
    found = run(plain, *arguments)
    for mix in (plain, torch.compile(plain, fullgraph=True, backend="aot_eager")):
        for name, value in run(mix, *arguments).items():
            assert torch.equal(value, found[name]), name


def test_what_is_added_onto_gets_its_gradient() -> None:
    torch.manual_seed(7)
    weights, experts, mix = draw(8, 64, 128), choose(700, 8, 2), load_fast_kernel("triton")
    x, onto = (torch.randn(700, 64, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    gates, back = torch.rand(700, 2, device="cuda"), torch.randn(700, 64, device="cuda").bfloat16()
    y, without = mix(x, experts, gates, weights, onto), mix(x, experts, gates, weights)
    assert (y.double() - (without + onto).double()).norm() <= 4e-3 * y.double().norm()
    (grad,) = torch.autograd.grad(y, onto, back)
    assert torch.equal(grad, back)

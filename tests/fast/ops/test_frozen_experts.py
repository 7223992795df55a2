"""The Triton path equals the float64 reference, norm-wise: output, dX and gate gradient."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from some_moe.experts import ExpertWeights
from some_moe.training.machine import load_fast_kernel

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def draw(num_experts: int, d: int, f: int, dtype: torch.dtype) -> ExpertWeights:
    def stack(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).to(dtype)

    return ExpertWeights(
        up=stack(num_experts, f, d, scale=d**-0.5),
        up_bias=stack(num_experts, f, scale=0.3),
        down=stack(num_experts, d, f, scale=f**-0.5),
        down_bias=stack(num_experts, d, scale=0.3),
    )


def run(kernel: str, x: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights, back: Tensor) -> list[Tensor]:
    x, gates = x.clone().requires_grad_(), gates.clone().requires_grad_()
    y = load_fast_kernel(kernel)(x, experts, gates, weights)
    return [y.detach(), *torch.autograd.grad(y, (x, gates), back.to(y.dtype))]


def widen(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(**{name: getattr(weights, name).double() for name in ("up", "up_bias", "down", "down_bias")})


def assert_close(kernel: str, n: int, d: int, f: int, experts: Tensor, num_experts: int, dtype: torch.dtype) -> None:
    weights = draw(num_experts, d, f, dtype)
    x, back = (torch.randn(n, d, device="cuda").to(dtype) for _ in range(2))
    gates = torch.rand(experts.shape, device="cuda")
    found = run(kernel, x, experts, gates, weights, back)
    expected = run("reference", x.double(), experts, gates.double(), widen(weights), back.double())
    for left, right in zip(found, expected, strict=True):
        assert torch.isfinite(left).all()
        assert (left.double() - right).norm() <= TOLERANCE[dtype] * right.norm()


def choose(n: int, num_experts: int, top_k: int) -> Tensor:
    return torch.rand(n, num_experts, device="cuda").topk(top_k).indices


@pytest.mark.parametrize("kernel", ["triton", "grouped"])
@pytest.mark.parametrize(
    ("n", "d", "f", "num_experts", "top_k"),
    [
        (333, 48, 88, 5, 5), (1000, 384, 1024, 64, 4), (257, 512, 1536, 256, 8), (300, 72, 136, 9, 3),
        (1, 64, 64, 4, 2),
        (2000, 96, 256, 4, 2), (1000, 512, 1024, 16, 4), (5000, 40, 128, 3, 1),  # large tiles: ping-pong
        (1600, 256, 512, 16, 2), (4000, 512, 1024, 64, 4),  # low ones
    ],
)  # fmt: skip
def test_bf16_equals_float64(kernel: str, n: int, d: int, f: int, num_experts: int, top_k: int) -> None:
    torch.manual_seed(n)
    assert_close(kernel, n, d, f, choose(n, num_experts, top_k), num_experts, torch.bfloat16)


def test_adding_onto_rounds_once() -> None:
    torch.manual_seed(7)
    weights, experts = draw(8, 64, 128, torch.bfloat16), choose(700, 8, 2)
    x, onto = (torch.randn(700, 64, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    gates, back = torch.rand(700, 2, device="cuda", requires_grad=True), torch.randn(700, 64, device="cuda").bfloat16()
    mix = load_fast_kernel("triton")
    y = mix(x, experts, gates, weights, onto)
    expected = mix(x, experts, gates, weights)
    assert (y.double() - (expected + onto).double()).norm() <= 4e-3 * y.double().norm()
    found = torch.autograd.grad(y, (x, gates, onto), back)
    for left, right in zip(found, (*torch.autograd.grad(expected, (x, gates), back), back), strict=True):
        assert torch.equal(left, right)
    compiled = torch.compile(mix, fullgraph=True, backend="aot_eager")(x, experts, gates, weights, onto)
    assert torch.equal(compiled, y)
    for left, right in zip(torch.autograd.grad(compiled, (x, gates, onto), back), found, strict=True):
        assert torch.equal(left, right)
    wide = onto.detach().float()
    assert mix(x, experts, gates, weights, wide).dtype == torch.float32


def test_float32_equals_float64() -> None:
    torch.manual_seed(0)
    assert_close("triton", 333, 48, 88, choose(333, 5, 2), 5, torch.float32)


@pytest.mark.parametrize("kernel", ["triton", "grouped"])
def test_all_tokens_on_one_expert_and_others_empty(kernel: str) -> None:
    experts = torch.full((513, 1), 3, device="cuda")
    assert_close(kernel, 513, 96, 200, experts, 7, torch.bfloat16)


@pytest.mark.parametrize(("n", "d", "f", "num_experts", "top_k"), [(4000, 384, 1024, 8, 4), (3000, 104, 384, 16, 2)])
def test_pingpong_equals_float64_and_the_tma_kernels(
    n: int, d: int, f: int, num_experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from some_moe.fast.ops import grouped_gemm, pingpong_gemm

    torch.manual_seed(5)
    weights, experts = draw(num_experts, d, f, torch.bfloat16), choose(n, num_experts, top_k)
    x, back = (torch.randn(n, d, device="cuda").bfloat16() for _ in range(2))
    if torch.cuda.get_device_capability(x.device)[0] != 9:
        pytest.skip("not a Hopper GPU")
    assert pingpong_gemm.can_pingpong(x, grouped_gemm.choose_plan(x.dtype, n * top_k, num_experts).m, f)
    assert_close("triton", n, d, f, experts, num_experts, torch.bfloat16)
    arguments: Any = (x, experts, torch.rand(n, top_k, device="cuda"), weights, back)
    found, again = run("triton", *arguments), run("triton", *arguments)
    monkeypatch.setattr(pingpong_gemm, "can_pingpong", lambda *_: False)
    for left, same, right in zip(found, again, run("triton", *arguments), strict=True):
        assert torch.equal(left, same)
        assert (left.double() - right.double()).norm() <= 4e-3 * right.double().norm()


def test_the_same_bits_every_time() -> None:
    torch.manual_seed(1)
    weights, experts = draw(8, 64, 128, torch.bfloat16), choose(500, 8, 2)
    x = torch.randn(500, 64, device="cuda").bfloat16()
    arguments: Any = (x, experts, torch.rand(500, 2, device="cuda"), weights, torch.randn(500, 64, device="cuda"))
    for left, right in zip(run("triton", *arguments), run("triton", *arguments), strict=True):
        assert torch.equal(left, right)


def test_compiled_code_computes_the_same_bits() -> None:
    from some_moe.fast.ops import frozen_experts

    torch.manual_seed(3)
    weights, experts = draw(8, 64, 128, torch.bfloat16), choose(300, 8, 2)
    x = torch.randn(300, 64, device="cuda").bfloat16().requires_grad_()
    gates, back = torch.rand(300, 2, device="cuda", requires_grad=True), torch.randn(300, 64, device="cuda").bfloat16()
    found = []
    for mix in (
        frozen_experts.mix_experts,
        torch.compile(frozen_experts.mix_experts, fullgraph=True, backend="aot_eager"),
    ):
        y = mix(x, experts, gates, weights)
        found.append([y.detach(), *torch.autograd.grad(y, (x, gates), back)])
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)


def test_cached_descriptors_are_dropped_with_their_weights() -> None:
    from some_moe.fast.ops import frozen_experts, grouped_gemm

    gc.collect()
    before, weights = len(grouped_gemm._DESCRIPTORS), draw(8, 64, 128, torch.bfloat16)
    x = torch.randn(300, 64, device="cuda").bfloat16()
    for _ in range(2):
        frozen_experts.mix_experts(x, choose(300, 8, 2), torch.rand(300, 2, device="cuda"), weights)
    assert len(grouped_gemm._DESCRIPTORS) == before + 2
    del weights
    assert len(grouped_gemm._DESCRIPTORS) == before

"""Top-k routing chooses as float64 does, and its gates and gradients equal float64."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_experts", [50, 150])
def test_nan_queries_still_choose_experts_that_exist(num_experts: int) -> None:
    from some_moe.fast.ops.topk_keys import topk_keys

    query = torch.full((70, 64), float("nan"), device="cuda")
    keys, bias = torch.randn(num_experts, 64, device="cuda"), torch.zeros(num_experts, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        experts, _ = topk_keys(query.to(dtype), keys, bias, 4)
        assert experts.min() >= 0
        assert experts.max() < num_experts


def test_topk_keys_chooses_as_float64_does() -> None:
    from some_moe.fast.ops.topk_keys import topk_keys

    torch.manual_seed(2)
    for n, num_experts, top_k, d in ((1000, 64, 4, 384), (500, 512, 8, 96), (300, 300, 2, 64)):
        query = torch.randn(n, d, device="cuda").bfloat16()
        keys, bias = torch.randn(num_experts, d, device="cuda"), torch.randn(num_experts, device="cuda")
        experts, scores = topk_keys(query, keys, bias, top_k)
        exact = query.double() @ keys.double().T
        assert torch.equal(experts, (exact + bias).topk(top_k).indices)
        assert torch.allclose(scores.double(), exact.gather(1, experts), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.3, 1.0, None])
@pytest.mark.parametrize(
    ("n", "num_experts", "top_k", "d"), [(1000, 64, 4, 384), (500, 512, 8, 96), (3001, 20, 3, 1100)]
)
def test_gates_and_the_gradient_of_queries_equal_float64(
    n: int, num_experts: int, top_k: int, d: int, temperature: float | None, dtype: torch.dtype
) -> None:
    """Without a temperature, scores."""
    from some_moe.fast.ops.topk_keys import topk_keys

    torch.manual_seed(n)
    query = (torch.randn(n, d, device="cuda") / d**0.5).to(dtype).requires_grad_()
    keys, bias = torch.randn(num_experts, d, device="cuda"), torch.randn(num_experts, device="cuda")
    back = torch.randn(n, top_k, device="cuda")
    experts, gates = topk_keys(query, keys, bias, top_k, temperature)
    (grad,) = torch.autograd.grad(gates, query, back)
    wide = query.detach().double().requires_grad_()
    expected = (wide @ keys.double().T).gather(1, experts)
    if temperature is not None:
        expected = (expected / temperature).softmax(-1)
        assert gates.sum(1).sub(1).abs().max() < 1e-6
    (expected_grad,) = torch.autograd.grad(expected, wide, back.double())
    torch.testing.assert_close(gates.double(), expected, rtol=1e-4, atol=1e-5)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(grad.double(), expected_grad, rtol=rounding, atol=1e-4)

"""The cross-entropy kernel equals torch's own in float64: nats, gradient, and the same bits when compiled.

Beside the gradient of the logits it makes that of the bias within them.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from some_moe.config import ModelConfig
from some_moe.model.transformer import SomeLM, token_nats

pytestmark = pytest.mark.gpu
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5}  # of a gradient, relative


@pytest.fixture
def kernels() -> Any:
    return pytest.importorskip("some_moe.fast.ops.nats")


def draw(n: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (n, V), targets (n,) and the gradient of their nats (n,)."""
    torch.manual_seed(n + vocabulary)
    logits = (4 * torch.randn(n, vocabulary, device="cuda")).to(dtype).requires_grad_()
    return logits, torch.randint(vocabulary, (n,), device="cuda"), torch.rand(n, device="cuda")


def assert_equals_float64(kernels: Any, logits: Tensor, targets: Tensor, back: Tensor) -> None:
    nats, lse = kernels.token_nats(logits, targets)
    (grad,) = torch.autograd.grad(nats, logits, back)
    wide = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="none")
    (expected_grad,) = torch.autograd.grad(expected, wide, back.double())
    assert nats.dtype == lse.dtype == torch.float32
    assert grad.dtype == logits.dtype
    torch.testing.assert_close(nats.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wide.logsumexp(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=ROUNDING[logits.dtype], atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("n", "vocabulary"),
    [(1, 1), (3, 2), (33, 37), (257, 8192), (64, 8191), (17, 8200), (9, 50257), (5, 65536), (2, 100_003), (9001, 40)],
)
def test_nats_and_gradient_equal_float64(kernels: Any, n: int, vocabulary: int, dtype: torch.dtype) -> None:
    assert_equals_float64(kernels, *draw(n, vocabulary, dtype))


def test_logits_far_from_zero_and_minus_infinity(kernels: Any) -> None:
    logits, targets, back = draw(8, 20_000, torch.float32)
    with torch.no_grad():
        logits[0] += 1000
        logits[1] -= 1000
        logits[2, :9000] = -torch.inf
        logits[3, 10_000:] = -torch.inf
    targets[2], targets[3] = 9000, 0
    nats, _ = kernels.token_nats(logits, targets)
    (grad,) = torch.autograd.grad(nats, logits, back)
    expected = F.cross_entropy(logits.detach().double(), targets, reduction="none")
    torch.testing.assert_close(nats.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(grad).all()
    assert (grad[2, :9000] == 0).all()


def test_rows_beyond_two_to_the_31_logits(kernels: Any) -> None:
    logits = torch.zeros(2**15 + 8, 2**16, dtype=torch.bfloat16, device="cuda")
    targets = torch.zeros(len(logits), dtype=torch.int64, device="cuda")
    logits[-1, 5] = 20.0
    targets[-1] = 5
    nats, _ = kernels.token_nats(logits.requires_grad_(), targets)
    (grad,) = torch.autograd.grad(nats.sum(), logits)
    expected = F.cross_entropy(logits.detach()[-1:].double(), targets[-1:])
    torch.testing.assert_close(nats[-1].double(), expected, rtol=1e-3, atol=1e-6)
    assert grad[-1, 0] > 0 > grad[-1, 5]
    assert grad[-2, 0] == -1.0


def test_a_target_of_minus_100_counts_nothing(kernels: Any) -> None:
    logits, targets, back = draw(6, 300, torch.bfloat16)
    targets[2] = -100
    assert_equals_float64(kernels, logits, targets, back)
    nats, _ = kernels.token_nats(logits, targets)
    assert nats[2] == 0
    assert (torch.autograd.grad(nats.sum(), logits)[0][2] == 0).all()


def test_a_target_beyond_the_vocabulary_is_no_number(kernels: Any) -> None:
    logits, targets, _ = draw(6, 300, torch.bfloat16)
    targets[1] = 300
    nats, _ = kernels.token_nats(logits, targets)
    assert nats.isnan().tolist() == [False, True, False, False, False, False]


def test_no_tokens_give_no_nats(kernels: Any) -> None:
    logits, targets, _ = draw(0, 300, torch.bfloat16)
    nats, _ = kernels.token_nats(logits, targets)
    assert nats.shape == (0,)
    assert torch.autograd.grad(nats.sum(), logits)[0].shape == (0, 300)


def test_strided_logits(kernels: Any) -> None:
    logits, targets, back = draw(40, 512, torch.bfloat16)
    strided = logits.detach().t().contiguous().t().requires_grad_()
    assert_equals_float64(kernels, strided, targets, back)


def draw_biased(n: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with a bias (V,) that is part of the logits, and a gradient that does not add up to nothing."""
    logits, targets, back = draw(n, vocabulary, dtype)
    return logits, targets, torch.randn(vocabulary, device="cuda", requires_grad=True), back


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("n", "vocabulary"), [(0, 300), (1, 1), (33, 37), (9001, 40), (1025, 8192), (700, 8191), (261, 8200), (70, 50257)]
)
def test_the_gradient_of_the_bias_equals_float64(kernels: Any, n: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits, targets, bias, back = draw_biased(n, vocabulary, dtype)
    targets[::5] = -100
    nats, _ = kernels.token_nats(logits, targets, bias)
    grad, grad_bias = torch.autograd.grad(nats, (logits, bias), back)
    unbiased, _ = kernels.token_nats(logits, targets)
    assert torch.equal(nats, unbiased)
    assert torch.equal(grad, torch.autograd.grad(unbiased, logits, back)[0])
    wide = logits.detach().double().requires_grad_()
    wide_nats = F.cross_entropy(wide, targets, reduction="none")
    (expected,) = torch.autograd.grad(wide_nats, wide, back.double())
    assert grad_bias.dtype == bias.dtype
    assert grad_bias.shape == bias.shape
    # An error for each element that was added: that of float32, not that of bf16.
    assert ((grad_bias.double() - expected.sum(0)).abs() <= 1e-5 * expected.abs().sum(0) + 1e-9).all()


def test_the_gradient_of_the_bias_has_the_same_bits_each_time(kernels: Any) -> None:
    logits, targets, bias, back = draw_biased(3000, 1500, torch.bfloat16)
    left, right = (torch.autograd.grad(kernels.token_nats(logits, targets, bias)[0], bias, back)[0] for _ in range(2))
    assert torch.equal(left, right)


def test_the_gradient_of_the_bias_comes_in_its_own_type(kernels: Any) -> None:
    logits, targets, bias, back = draw_biased(100, 24, torch.bfloat16)
    (wide,) = torch.autograd.grad(kernels.token_nats(logits, targets, bias)[0], bias, back)
    narrow = bias.detach().bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(kernels.token_nats(logits, targets, narrow)[0], narrow, back)
    assert torch.equal(grad, wide.bfloat16())


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_the_models_head_learns_as_in_float64(backend: str | None) -> None:
    config = ModelConfig(d_model=32, num_heads=2, num_layers=1, num_experts=4, top_k=2, d_ffn=32, vocab_size=500)
    torch.manual_seed(0)
    model = SomeLM(config, device="cuda")
    x = torch.randn(3, 130, 32, device="cuda", requires_grad=True)
    targets, back = torch.randint(500, (3, 130), device="cuda"), 1 + torch.rand(3, 130, device="cuda")
    score = model.score_targets if backend is None else torch.compile(model.score_targets, backend=backend)
    leaves = (x, model.head.weight, model.head.bias)
    with torch.autocast("cuda", torch.bfloat16):
        nats = score(x, targets)
    found = (nats, *torch.autograd.grad(nats, leaves, back))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wide_nats = F.cross_entropy(F.linear(*wide).flatten(0, 1), targets.flatten(), reduction="none").view(3, 130)
    expected = (wide_nats, *torch.autograd.grad(wide_nats, wide, back.double()))
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == torch.float32
        assert (left.double() - right).norm() <= 1e-2 * right.norm()


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_compiled_gives_the_same_bits() -> None:
    logits, targets, back = draw(2 * 65, 1000, torch.bfloat16)
    logits, targets, back = logits.detach().view(2, 65, -1).requires_grad_(), targets.view(2, 65), back.view(2, 65)
    plain = token_nats(logits, targets)
    compiled = torch.compile(token_nats, fullgraph=True, backend="aot_eager")(logits, targets)
    assert torch.equal(plain, compiled)
    (left,), (right,) = (torch.autograd.grad(nats, logits, back) for nats in (plain, compiled))
    assert torch.equal(left, right)


def test_the_model_uses_the_kernel(kernels: Any) -> None:
    logits, targets, _ = draw(2 * 65, 1000, torch.bfloat16)
    expected, _ = kernels.token_nats(logits, targets)
    nats = token_nats(logits.view(2, 65, -1), targets.view(2, 65))
    assert torch.equal(nats.flatten(), expected)
    assert token_nats(logits.double().view(2, 65, -1), targets.view(2, 65)).dtype == torch.float64

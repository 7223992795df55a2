"""The kernel of the training loss equals torch's own in float64: per-token losses, loss, and all gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from some_moe import ModelConfig, SomeLM, accelerate
from some_moe.fast.casts import cast_maps

pytestmark = pytest.mark.gpu
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5}  # of a gradient, relative
WEIGHTS = {
    "none": lambda n: None,  # noqa: ARG005
    "bool": lambda n: torch.rand(n, device="cuda") < 0.6,
    "float": lambda n: torch.rand(n, device="cuda"),
}


@pytest.fixture
def kernels() -> Any:
    return pytest.importorskip("some_moe.fast.ops.cross_entropy")


def draw(n: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (n, V), targets (n,), the detached bias (V,) of the logits, and a denominator ()."""
    torch.manual_seed(n + vocabulary)
    logits = (4 * torch.randn(n, vocabulary, device="cuda")).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, device="cuda", requires_grad=True)
    return logits, torch.randint(vocabulary, (n,), device="cuda"), bias, torch.full((), 0.7 * n + 1, device="cuda")


def assert_equals_float64(
    kernels: Any, logits: Tensor, targets: Tensor, bias: Tensor, denominator: Tensor, weights: Tensor | None,
    factor: float = 1.0,
) -> None:  # fmt: skip
    loss, losses = kernels.find_loss(logits, targets, weights, denominator, bias)
    grad, grad_bias = torch.autograd.grad(factor * loss, (logits, bias))
    wide = logits.detach().double().requires_grad_()
    wide_losses = F.cross_entropy(wide, targets, reduction="none")
    weighed = wide_losses if weights is None else wide_losses * weights.double()
    expected = weighed.sum() / denominator.double()
    (expected_grad,) = torch.autograd.grad(factor * expected, wide)
    assert losses.dtype == loss.dtype == torch.float32
    assert (grad.dtype, grad_bias.dtype) == (logits.dtype, bias.dtype)
    assert (loss.shape, losses.shape, grad_bias.shape) == ((), targets.shape, bias.shape)
    assert loss.requires_grad
    assert not losses.requires_grad
    torch.testing.assert_close(losses.double(), wide_losses.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    # It is rounded once more where it is scaled. Near zero its error is that of a softmax, weighed as the gradient is.
    roundings, smallest = (1 if factor == 1 else 2), 3e-6 * abs(factor) / float(denominator)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=roundings * ROUNDING[logits.dtype], atol=smallest)
    # An error for each element that was added: that of float32, not that of bf16.
    assert ((grad_bias.double() - expected_grad.sum(0)).abs() <= 1e-5 * expected_grad.abs().sum(0) + smallest).all()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("n", "vocabulary"),
    [
        (1, 1),
        (3, 2),
        (33, 37),
        (9001, 40),
        (3000, 512),
        (1025, 8192),
        (264, 8192),
        (700, 8191),
        (530, 5000),
        (77, 4104),
    ],
)
def test_loss_and_gradients_equal_float64(
    kernels: Any, n: int, vocabulary: int, dtype: torch.dtype, weights: str
) -> None:
    assert_equals_float64(kernels, *draw(n, vocabulary, dtype), WEIGHTS[weights](n))


@pytest.mark.parametrize("factor", [0.0, 1.0, -2.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "vocabulary"), [(1, 8), (33, 37), (2000, 2048), (257, 8192)])
def test_whatever_the_loss_is_multiplied_by_goes_into_the_gradients(
    kernels: Any, n: int, vocabulary: int, dtype: torch.dtype, factor: float
) -> None:
    logits, targets, bias, denominator = draw(n, vocabulary, dtype)
    assert_equals_float64(kernels, logits, targets, bias, denominator, None, factor)


def test_a_gradient_is_given_once(kernels: Any) -> None:
    logits, targets, bias, denominator = draw(20, 64, torch.bfloat16)
    loss, _ = kernels.find_loss(logits, targets, None, denominator, bias)
    (3 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="given its gradient away"):
        loss.backward()


def test_logits_far_from_zero_and_minus_infinity(kernels: Any) -> None:
    logits, targets, bias, denominator = draw(8, 8000, torch.float32)
    with torch.no_grad():
        logits[0] += 1000
        logits[1] -= 1000
        logits[2, :4000] = -torch.inf
        logits[3, 5000:] = -torch.inf
    targets[2], targets[3] = 4000, 0
    loss, losses = kernels.find_loss(logits, targets, None, denominator, bias)
    grad, grad_bias = torch.autograd.grad(loss, (logits, bias))
    expected = F.cross_entropy(logits.detach().double(), targets, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.detach().double(), expected.sum() / denominator.double(), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(grad).all()
    assert torch.isfinite(grad_bias).all()
    assert (grad[2, :4000] == 0).all()


def test_rows_beyond_two_to_the_31_logits(kernels: Any) -> None:
    logits = torch.zeros(2**18 + 8, 8192, dtype=torch.bfloat16, device="cuda")
    targets = torch.zeros(len(logits), dtype=torch.int64, device="cuda")
    logits[-1, 5] = 20.0
    targets[-1] = 5
    one = torch.ones((), device="cuda")
    loss, losses = kernels.find_loss(logits.requires_grad_(), targets, None, one)
    (grad,) = torch.autograd.grad(2 * loss, logits)
    expected = F.cross_entropy(logits.detach()[-1:].double(), targets[-1:])
    torch.testing.assert_close(losses[-1].double(), expected, rtol=1e-3, atol=1e-6)
    assert grad[-1, 0] > 0 > grad[-1, 5]
    assert grad[-2, 0] == -2.0


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_target_of_minus_100_counts_nothing(kernels: Any, weights: str) -> None:
    logits, targets, bias, denominator = draw(600, 304, torch.bfloat16)
    targets[::5] = -100
    drawn = WEIGHTS[weights](600)
    assert_equals_float64(kernels, logits, targets, bias, denominator, drawn)
    loss, losses = kernels.find_loss(logits, targets, drawn, denominator, bias)
    assert (losses[::5] == 0).all()
    assert (torch.autograd.grad(loss, logits)[0][::5] == 0).all()


def test_a_target_beyond_the_vocabulary_gives_nan(kernels: Any) -> None:
    logits, targets, bias, denominator = draw(6, 300, torch.bfloat16)
    targets[1] = 300
    loss, losses = kernels.find_loss(logits, targets, None, denominator, bias)
    assert losses.isnan().tolist() == [False, True, False, False, False, False]
    assert loss.isnan()


def test_no_tokens_give_no_loss(kernels: Any) -> None:
    logits, targets, bias, denominator = draw(0, 304, torch.bfloat16)
    loss, losses = kernels.find_loss(logits, targets, None, denominator, bias)
    assert (float(loss.detach()), losses.shape) == (0.0, (0,))
    grad, grad_bias = torch.autograd.grad(loss, (logits, bias))
    assert grad.shape == (0, 304)
    assert torch.equal(grad_bias, torch.zeros_like(bias))


def test_strided_logits_targets_and_weights(kernels: Any) -> None:
    logits, targets, bias, denominator = draw(40, 512, torch.bfloat16)
    strided = logits.detach().t().contiguous().t().requires_grad_()
    pairs = torch.stack((targets, targets), 1)
    weights = torch.rand(40, 3, device="cuda")
    assert_equals_float64(kernels, strided, pairs[:, 0], bias, denominator, weights[:, 1])


def test_the_same_bits_each_time(kernels: Any) -> None:
    logits, targets, bias, denominator = draw(3000, 1504, torch.bfloat16)
    found = []
    for _ in range(2):
        loss, losses = kernels.find_loss(logits, targets, targets % 3 == 0, denominator, bias)
        found.append((loss, losses, *torch.autograd.grad(loss, (logits, bias))))
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_the_gradient_of_the_bias_comes_in_its_own_type(kernels: Any) -> None:
    logits, targets, bias, denominator = draw(100, 24, torch.bfloat16)
    (wide,) = torch.autograd.grad(kernels.find_loss(logits, targets, None, denominator, bias)[0], bias)
    narrow = bias.detach().bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(kernels.find_loss(logits, targets, None, denominator, narrow)[0], narrow)
    assert torch.equal(grad, wide.bfloat16())


def test_the_logits_are_free_when_the_loss_is_there(kernels: Any) -> None:
    _, targets, bias, denominator = draw(4096, 4096, torch.bfloat16)
    x = torch.randn(4096, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4096, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def find() -> Tensor:
        return kernels.find_loss(F.linear(x, weight), targets, None, denominator, bias)[0]

    find().backward()  # type: ignore[no-untyped-call]  # leaves the GEMMs' workspace, and gradients to add to
    before, size = torch.cuda.memory_allocated(), 2 * 4096 * 4096
    loss = find()
    assert size <= torch.cuda.memory_allocated() - before < 1.1 * size  # the gradient is there, the logits are not
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.cuda.memory_allocated() - before < 0.1 * size


def make_model(vocabulary: int) -> SomeLM:
    torch.manual_seed(0)
    config = ModelConfig(d_model=32, num_heads=2, num_layers=1, num_experts=4, top_k=2, d_ffn=32, vocab_size=vocabulary)
    return accelerate(SomeLM(config, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize("vocabulary", [504, 8192, 500, 8200])  # by this kernel, and by torch's own
@pytest.mark.parametrize("weighed", [False, True])
def test_the_models_head_learns_as_in_float64(vocabulary: int, weighed: bool) -> None:
    model = make_model(vocabulary)
    x = torch.randn(3, 130, 32, device="cuda", requires_grad=True)
    targets = torch.randint(vocabulary, (3, 130), device="cuda")
    weights = torch.rand(3, 130, device="cuda") < 0.5 if weighed else None
    leaves, denominator = (x, model.head.weight, model.head.bias), torch.full((), 300.0, device="cuda")
    with model.computing():
        casts, _ = cast_maps(model, torch.bfloat16)
        loss = model.find_loss(x, casts["head"], targets, weights, denominator)
    found = (loss, *torch.autograd.grad(loss, leaves))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wide_losses = F.cross_entropy(F.linear(*wide).flatten(0, 1), targets.flatten(), reduction="none").view(3, 130)
    wide_loss = (wide_losses if weights is None else wide_losses * weights).sum() / 300
    expected = (wide_loss, *torch.autograd.grad(wide_loss, wide))
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == torch.float32
        assert left.shape == right.shape
        assert (left.double() - right).norm() <= 1e-2 * right.norm()


@pytest.mark.parametrize("vocabulary", [504, 8192])
def test_the_model_uses_the_kernel_where_it_learns(vocabulary: int) -> None:
    model = make_model(vocabulary)
    tokens = torch.randint(vocabulary, (3, 33), device="cuda")
    inputs, targets, denominator = tokens[:, :-1], tokens[:, 1:], torch.full((), 96.0, device="cuda")
    learning = model.loss(inputs, targets, denominator=denominator).loss
    with torch.no_grad():
        idle = model.loss(inputs, targets, denominator=denominator).loss
    assert "CrossEntropy" in type(learning.grad_fn).__name__
    assert idle.grad_fn is None
    torch.testing.assert_close(learning, idle, rtol=1e-5, atol=1e-5)


def test_a_captured_graph_follows_its_inputs(kernels: Any) -> None:
    logits, targets, bias, denominator = draw(500, 2048, torch.bfloat16)
    weights = torch.ones(500, dtype=torch.bool, device="cuda")

    def learn() -> tuple[Tensor, Tensor, Tensor]:
        loss, _ = kernels.find_loss(logits, targets, weights, denominator, bias)
        return loss.detach(), *torch.autograd.grad(loss, (logits, bias))

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        learn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = learn()
    weights[::3] = False
    denominator.fill_(77.0)
    targets.copy_(targets.flip(0))
    graph.replay()
    for left, right in zip(captured, learn(), strict=True):
        assert torch.equal(left, right)

"""Fused residual add and LayerNorm equal torch's in float64, gradients too."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from some_moe import ModelConfig, SomeLM, accelerate

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SHAPES = [(1, 64), (77, 48), (33, 77), (500, 512), (3000, 384), (5, 1000), (70, 2048), (40, 8192), (9, 4)]


def draw(n: int, d: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs x, x2 (bf16), weight, bias (float32), all wanting gradients; and the gradients of both outputs."""
    torch.manual_seed(n)
    rows = [torch.randn(2, n, d, device="cuda").bfloat16() for _ in range(4)]
    vectors = [torch.randn(d, device="cuda") for _ in range(2)]
    return [tensor.requires_grad_() for tensor in (rows[0], rows[1], *vectors)], rows[2:]


def expected(inputs: list[Tensor], grads: list[Tensor], with_x2: bool) -> list[Tensor]:
    x, x2, weight, bias = (tensor.detach().double().requires_grad_() for tensor in inputs)
    # The sum is rounded before it is normed, as it is stored.
    total = x + (x + x2).bfloat16().double().detach() - x.detach() if with_x2 else x * 1
    y = F.layer_norm(total, (x.shape[-1],), weight, bias)
    found = torch.autograd.grad((total, y), (x, weight, bias), [grad.double() for grad in grads])
    return [total.detach(), y.detach(), *found]


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for left, right in zip(found, wanted, strict=True):
        assert (left.double() - right).norm() <= 6e-3 * right.norm()


@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_residual_norm_equals_float64(n: int, d: int) -> None:
    from some_moe.fast.ops.layer_norm import ResidualNorm

    (x, _, weight, bias), grads = draw(n, d)
    same, y = ResidualNorm.apply(x, weight, bias, 1e-5)  # type: ignore[no-untyped-call]
    assert torch.equal(same, x)
    found = [same.detach(), y.detach(), *torch.autograd.grad((same, y), (x, weight, bias), grads)]
    assert_close(found, expected([x, x, weight, bias], grads, with_x2=False))


@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_add_norm_equals_float64(n: int, d: int) -> None:
    from some_moe.fast.ops.layer_norm import AddNorm

    (x, x2, weight, bias), grads = draw(n, d)
    total, y, normed_2 = AddNorm.apply(x, x2, weight, bias, 1e-5, None)  # type: ignore[no-untyped-call]
    assert torch.equal(y, normed_2)
    halves = [grads[0], grads[1] / 4, grads[1] * 0.75]  # exact in bf16, or nearly
    grad_x, grad_x2, *rest = torch.autograd.grad((total, y, normed_2), (x, x2, weight, bias), halves)
    assert torch.equal(grad_x, grad_x2)
    assert torch.equal(total, x + x2)
    assert_close([total.detach(), y.detach(), grad_x, *rest], expected([x, x2, weight, bias], grads, with_x2=True))


@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_the_fused_dbias_equals_float64(n: int, d: int) -> None:
    from some_moe.fast.ops.layer_norm import AddNorm

    (x, x2, weight, bias), grads = draw(n, d)
    leaves = (x, x2, weight, bias)
    halves = [grads[0] + 0.5, grads[1] / 4, grads[1] * 0.75]  # does not add up to nothing
    x2_bias = torch.randn(d, device="cuda", requires_grad=True)
    plain = AddNorm.apply(*leaves, 1e-5, None)  # type: ignore[no-untyped-call]
    outputs = AddNorm.apply(*leaves, 1e-5, x2_bias)  # type: ignore[no-untyped-call]
    *found, dbias = torch.autograd.grad(outputs, (*leaves, x2_bias), halves)
    for left, right in zip(outputs, plain, strict=True):
        assert torch.equal(left, right)
    for left, right in zip(found, torch.autograd.grad(plain, leaves, halves), strict=True):
        # Another kernel, which may contract multiply-adds in another way.
        assert (left.double() - right.double()).norm() <= 1e-6 * right.double().norm() or torch.equal(left, right)
    of_y = halves[1].double() + halves[2].double()
    wide = expected(list(leaves), [halves[0], of_y], with_x2=True)[2].flatten(0, 1)
    assert dbias.dtype == x2_bias.dtype
    # An error for each row that was added: that of float32, not that of bf16.
    assert ((dbias.double() - wide.sum(0)).abs() <= 1e-5 * (1 + wide.abs()).sum(0)).all()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attentions_output_bias_learns_the_same_with_and_without_the_kernel(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from some_moe.fast import model as fast_model

    config = ModelConfig(
        d_model=64, num_heads=2, num_layers=2, ffn="dense", dense_width=128, vocab_size=50, dropout=dropout
    )
    torch.manual_seed(0)
    model = accelerate(SomeLM(config, dtype=torch.bfloat16, device="cuda").train())
    tokens, targets = torch.randint(50, (2, 3, 70), device="cuda")
    biases = [block.attention.out.bias for block in model.blocks]
    grads = []
    for can_fuse in (fast_model.can_fuse_norm, lambda _: False):
        monkeypatch.setattr(fast_model, "can_fuse_norm", can_fuse)
        loss = model.loss(tokens, targets, denominator=torch.full((), 210.0, device="cuda")).loss
        grads.append(torch.autograd.grad(loss, biases))
    for left, right in zip(*grads, strict=True):
        assert left.dtype == torch.float32
        assert (left - right).norm() <= 3e-2 * right.norm()


def test_compiled_code_computes_the_same_bits() -> None:
    from some_moe.fast.ops.layer_norm import AddNorm, ResidualNorm

    def both(x: Tensor, x2: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, y = ResidualNorm.apply(x, weight, bias, 1e-5)  # type: ignore[no-untyped-call]
        total, z, normed_2 = AddNorm.apply(x, y + x2, weight, bias, 1e-5, None)  # type: ignore[no-untyped-call]
        out: Tensor = total * z + normed_2.sin()
        return out

    inputs, grads = draw(300, 96)
    found = []
    for call in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        y = call(*inputs)
        found.append([y.detach(), *torch.autograd.grad(y, inputs, grads[0])])
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)

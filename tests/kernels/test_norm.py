"""LayerNorm beside the residual stream: the fused kernels equal torch's in float64, gradients too."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def draw(n: int, d: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs x, addend (bf16), weight, bias (float32), all wanting gradients; and the gradients of both outputs."""
    torch.manual_seed(n)
    rows = [torch.randn(2, n, d, device="cuda").bfloat16() for _ in range(4)]
    vectors = [torch.randn(d, device="cuda") for _ in range(2)]
    return [tensor.requires_grad_() for tensor in (rows[0], rows[1], *vectors)], rows[2:]


def expected(inputs: list[Tensor], grads: list[Tensor], with_addend: bool) -> list[Tensor]:
    x, addend, weight, bias = (tensor.detach().double().requires_grad_() for tensor in inputs)
    # The sum is rounded before it is normed, as it is stored.
    total = x + (x + addend).bfloat16().double().detach() - x.detach() if with_addend else x * 1
    y = F.layer_norm(total, (x.shape[-1],), weight, bias)
    found = torch.autograd.grad((total, y), (x, weight, bias), [grad.double() for grad in grads])
    return [total.detach(), y.detach(), *found]


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for left, right in zip(found, wanted, strict=True):
        assert (left.double() - right).norm() <= 6e-3 * right.norm()


@pytest.mark.parametrize(("n", "d"), [(1, 64), (77, 48), (500, 512), (3000, 384), (5, 1000)])
def test_norm_beside_equals_float64(n: int, d: int) -> None:
    from some_moe.kernels.norm import NormBeside

    (x, _, weight, bias), grads = draw(n, d)
    same, y = NormBeside.apply(x, weight, bias, 1e-5)  # type: ignore[no-untyped-call]
    assert torch.equal(same, x)
    found = [same.detach(), y.detach(), *torch.autograd.grad((same, y), (x, weight, bias), grads)]
    assert_close(found, expected([x, x, weight, bias], grads, with_addend=False))


@pytest.mark.parametrize(("n", "d"), [(1, 64), (77, 48), (500, 512), (3000, 384), (5, 1000)])
def test_add_norm_equals_float64(n: int, d: int) -> None:
    from some_moe.kernels.norm import AddNorm

    (x, addend, weight, bias), grads = draw(n, d)
    total, y, again = AddNorm.apply(x, addend, weight, bias, 1e-5)  # type: ignore[no-untyped-call]
    assert torch.equal(y, again)
    halves = [grads[0], grads[1] / 4, grads[1] * 0.75]  # exact in bf16, or nearly
    grad_x, grad_addend, *rest = torch.autograd.grad((total, y, again), (x, addend, weight, bias), halves)
    assert torch.equal(grad_x, grad_addend)
    assert torch.equal(total, x + addend)
    assert_close(
        [total.detach(), y.detach(), grad_x, *rest], expected([x, addend, weight, bias], grads, with_addend=True)
    )


def test_compiled_code_computes_the_same_bits() -> None:
    from some_moe.kernels.norm import AddNorm, NormBeside

    def both(x: Tensor, addend: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, y = NormBeside.apply(x, weight, bias, 1e-5)  # type: ignore[no-untyped-call]
        total, z, again = AddNorm.apply(x, y + addend, weight, bias, 1e-5)  # type: ignore[no-untyped-call]
        out: Tensor = total * z + again.sin()
        return out

    inputs, grads = draw(300, 96)
    found = []
    for call in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        y = call(*inputs)
        found.append([y.detach(), *torch.autograd.grad(y, inputs, grads[0])])
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)

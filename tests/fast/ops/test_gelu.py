"""The GELU kernel equals torch's own in float64, element by element, and gives the same bits when compiled.

Beside x's gradient it makes that of the bias within x.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.experts import activate, linear_gelu

pytestmark = pytest.mark.gpu
# Of value and of slope: the fast form's own error and that of the hardware's tanh, up to 2⁻¹¹, come before bf16 rounds.
VALUE = {torch.bfloat16: {"rtol": 2.0**-8, "atol": 2e-3}, torch.float32: {"rtol": 1e-5, "atol": 2e-6}}
SLOPE = {torch.bfloat16: {"rtol": 2.0**-8, "atol": 4e-3}, torch.float32: {"rtol": 1e-5, "atol": 2e-6}}


@pytest.fixture
def kernels() -> Any:
    return pytest.importorskip("some_moe.fast.ops.gelu")


def both_ways(x: Tensor, y: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    return y.detach(), torch.autograd.grad(y, x, back)[0]


def assert_equals_float64(kernels: Any, x: Tensor) -> None:
    x = x.detach().requires_grad_()
    back = torch.randn(x.shape, device="cuda").to(x.dtype)
    wide = x.detach().double().requires_grad_()
    found, expected = both_ways(x, kernels.gelu(x), back), both_ways(wide, F.gelu(wide), back.double())
    assert all(part.dtype == x.dtype and part.shape == x.shape for part in found)
    torch.testing.assert_close(found[0].double(), expected[0], **VALUE[x.dtype])
    scale = 1 + back.double().abs()  # the gradient's error grows with what comes from behind
    torch.testing.assert_close(found[1].double() / scale, expected[1] / scale, **SLOPE[x.dtype])
    for left, right in zip(found, expected, strict=True):
        assert (left.double() - right).norm() <= 2.0**-8 * right.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (7,), (2047,), (2048,), (2, 33, 129), (1023, 1536), (3, 0, 8)])
def test_value_and_gradient_equal_float64(kernels: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(len(shape))
    assert_equals_float64(kernels, (3 * torch.randn(shape, device="cuda")).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_values_pass_or_vanish(kernels: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 20.0, 1e4, 1e19, -20.0, -1e4, -1e19], device="cuda", dtype=dtype)
    x.requires_grad_()
    y, grad = both_ways(x, kernels.gelu(x), torch.ones_like(x))
    assert torch.equal(y[:4], x.detach()[:4])
    assert (y[4:] == 0).all()
    assert grad.tolist() == [0.5, 1, 1, 1, 0, 0, 0]


def test_strided_input(kernels: Any) -> None:
    assert_equals_float64(kernels, torch.randn(65, 48, device="cuda").bfloat16().t())


def test_the_model_uses_the_kernel_in_bf16_alone(kernels: Any) -> None:
    x = torch.randn(1000, device="cuda")
    assert torch.equal(activate(x.bfloat16()), kernels.gelu(x.bfloat16()))
    assert torch.equal(activate(x), F.gelu(x))


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_compiled_gives_the_same_bits() -> None:
    x = torch.randn(3, 65, 40, device="cuda").bfloat16().requires_grad_()
    back = torch.randn_like(x)
    plain = both_ways(x, activate(x), back)
    compiled = both_ways(x, torch.compile(activate, fullgraph=True, backend="aot_eager")(x), back)
    for left, right in zip(plain, compiled, strict=True):
        assert torch.equal(left, right)


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_compiled_gives_the_same_bits_with_a_bias(kernels: Any) -> None:
    x, bias, back = draw_summed((3, 65, 40), torch.bfloat16)

    def add_one(x: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = kernels.gelu(x, bias) + 1
        return y

    values = add_one(x, bias), torch.compile(add_one, fullgraph=True, backend="aot_eager")(x, bias)
    assert torch.equal(*values)
    for left, right in zip(*(torch.autograd.grad(y, (x, bias), back) for y in values), strict=True):
        assert torch.equal(left, right)


def draw_summed(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (…, width), the bias within it, and a gradient of y that does not add up to nothing."""
    torch.manual_seed(shape[-1])
    x = (3 * torch.randn(shape, device="cuda")).to(dtype).requires_grad_()
    return x, torch.randn(shape[-1], device="cuda", requires_grad=True), (1 + torch.randn_like(x)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(7,), (1, 1), (63, 33), (2, 65, 40), (129, 257), (1023, 1536), (3, 0, 8)])
def test_the_gradient_of_the_bias_equals_float64(kernels: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, bias, back = draw_summed(shape, dtype)
    y = kernels.gelu(x, bias)
    grad, grad_bias = torch.autograd.grad(y, (x, bias), back)
    assert torch.equal(y, kernels.gelu(x))
    torch.testing.assert_close(grad, both_ways(x, kernels.gelu(x), back)[1], rtol=2.0**-7, atol=1e-6)
    wide = x.detach().double().requires_grad_()
    expected = both_ways(wide, F.gelu(wide), back.double())[1].view(-1, shape[-1])
    assert grad_bias.dtype == bias.dtype
    assert grad_bias.shape == bias.shape
    # An error for each element that was added: of the fast form in bf16, of float32's rounding otherwise.
    bound = (4e-3 if dtype == torch.bfloat16 else 1e-5) * (1 + back.double().abs()).view(-1, shape[-1]).sum(0)
    assert ((grad_bias.double() - expected.sum(0)).abs() <= bound).all()
    stored = grad.double().view(-1, shape[-1])
    assert ((grad_bias.double() - stored.sum(0)).abs() <= 2.0**-8 * stored.abs().sum(0) + 1e-6).all()


def test_the_gradient_of_the_bias_has_the_same_bits_each_time(kernels: Any) -> None:
    x, bias, back = draw_summed((5000, 96), torch.bfloat16)
    left, right = (torch.autograd.grad(kernels.gelu(x, bias), bias, back)[0] for _ in range(2))
    assert torch.equal(left, right)


def test_the_gradient_of_the_bias_comes_in_its_own_type(kernels: Any) -> None:
    x, bias, back = draw_summed((100, 24), torch.bfloat16)
    (wide,) = torch.autograd.grad(kernels.gelu(x, bias), bias, back)
    narrow = bias.detach().bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(kernels.gelu(x, narrow), narrow, back)
    assert torch.equal(grad, wide.bfloat16())


def run_layer(
    layer: nn.Linear, x: Tensor, back: Tensor, run: Callable[[Tensor, nn.Linear], Tensor] = linear_gelu
) -> list[Tensor]:
    """GELU after a layer, in bf16 by autocast: its value, and the gradients of x, weight and bias."""
    with torch.autocast("cuda", torch.bfloat16):
        y = run(x, layer)
    assert y.dtype == torch.bfloat16
    return [y.detach(), *torch.autograd.grad(y, (x, layer.weight, layer.bias), back)]


def test_a_layer_with_gelu_equals_float64() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 200, device="cuda"), torch.randn(3, 65, 64, device="cuda", requires_grad=True)
    back = (1 + torch.randn(3, 65, 200, device="cuda")).bfloat16()
    wide, wide_x = nn.Linear(64, 200, device="cuda").double(), x.detach().double().requires_grad_()
    wide.load_state_dict(layer.state_dict())
    y = F.gelu(wide(wide_x))
    expected = [y.detach(), *torch.autograd.grad(y, (wide_x, wide.weight, wide.bias), back.double())]
    for left, right in zip(run_layer(layer, x, back), expected, strict=True):
        assert (left.double() - right).norm() <= 1e-2 * right.norm()
    assert run_layer(layer, x, back)[3].dtype == torch.float32


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_with_gelu_equals_a_plain_one(backend: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 200, device="cuda"), torch.randn(3, 65, 64, device="cuda", requires_grad=True)
    back = (1 + torch.randn(3, 65, 200, device="cuda")).bfloat16()
    compiled = torch.compile(linear_gelu, fullgraph=True, backend=backend)
    for left, right in zip(run_layer(layer, x, back), run_layer(layer, x, back, compiled), strict=True):
        # The products may add in another order, and so round otherwise.
        assert (left.double() - right.double()).norm() <= 1e-3 * left.double().norm()


def test_a_layer_without_bias_and_one_in_float32_take_the_plain_way() -> None:
    torch.manual_seed(0)
    x = torch.randn(65, 64, device="cuda")
    for layer in (nn.Linear(64, 40, device="cuda"), nn.Linear(64, 40, bias=False, device="cuda")):
        assert torch.equal(linear_gelu(x, layer), F.gelu(layer(x)))
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(linear_gelu(x, layer), activate(layer(x)))

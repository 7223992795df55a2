"""The rotary kernel equals the plain rotation in float64, leaves the values where they are, and compiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from some_moe import accelerate
from some_moe.config import ModelConfig
from some_moe.fast.casts import cast_maps
from some_moe.model.attention import Attention, make_geometry, rotary_angles, rotate

pytestmark = pytest.mark.gpu
MODEL = ModelConfig(d_model=128, num_heads=4)
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5}
Rotate = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


@pytest.fixture
def kernels() -> Any:
    return pytest.importorskip("some_moe.fast.ops.rotary")


def rotate_plainly(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    return rotate(q, (cos, sin)), rotate(k, (cos, sin)), v


def draw(
    batch: int, time: int, num_heads: int, width: int, dtype: torch.dtype, rows: int = 1
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    torch.manual_seed(time)
    qkv = torch.randn(batch, time, 3 * num_heads * width, device="cuda").to(dtype).requires_grad_()
    return qkv, rotary_angles(torch.randint(0, 1000, (rows, time), device="cuda"), width)


def draw_backs(batch: int, time: int, num_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of q, k, v, in whatever layout attention leaves them; they do not add up to nothing."""
    backs = [(1 + torch.randn(batch, num_heads, time, width, device="cuda")).to(dtype) for _ in range(3)]
    backs[1] = backs[1].transpose(1, 2).contiguous().transpose(1, 2)
    backs[2] = backs[2].transpose(2, 3).contiguous().transpose(2, 3)
    return backs


SHAPES = pytest.mark.parametrize(
    ("batch", "time", "num_heads", "width", "rows"),
    [(2, 65, 8, 64, 1), (3, 31, 8, 48, 3), (1, 1, 1, 2, 1), (2, 7, 3, 10, 2), (4, 512, 12, 64, 4)],
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@SHAPES
def test_parts_and_gradient_equal_float64(
    kernels: Any, batch: int, time: int, num_heads: int, width: int, rows: int, dtype: torch.dtype
) -> None:
    qkv, angles = draw(batch, time, num_heads, width, dtype, rows)
    wide, wide_angles = qkv.detach().double().requires_grad_(), [angle.double() for angle in angles]
    found = kernels.rotate_qkv(qkv, *angles, num_heads)
    expected = rotate_plainly(wide, *wide_angles, num_heads)
    backs = draw_backs(batch, time, num_heads, width, dtype)
    (grad,) = torch.autograd.grad(found, qkv, backs)
    (expected_grad,) = torch.autograd.grad(expected, wide, [back.double() for back in backs])
    for left, right in zip((*found, grad), (*expected, expected_grad), strict=True):
        assert left.dtype == dtype
        torch.testing.assert_close(left.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@SHAPES
def test_detached_biases_get_the_column_sums_of_the_gradient(
    kernels: Any, batch: int, time: int, num_heads: int, width: int, rows: int, dtype: torch.dtype
) -> None:
    qkv, angles = draw(batch, time, num_heads, width, dtype, rows)
    backs = draw_backs(batch, time, num_heads, width, dtype)
    biases = tuple(torch.zeros(num_heads * width, device="cuda", requires_grad=True) for _ in range(3))
    found = torch.autograd.grad(kernels.rotate_qkv(qkv, *angles, num_heads, biases), (qkv, *biases), backs)
    wide, wide_angles = qkv.detach().double().requires_grad_(), [angle.double() for angle in angles]
    expected = rotate_plainly(wide, *wide_angles, num_heads)
    (grad,) = torch.autograd.grad(expected, wide, [back.double() for back in backs])
    sums = torch.cat(found[1:])
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), grad.sum((0, 1)), rtol=1e-5, atol=1e-4 * (batch * time) ** 0.5)
    again = torch.autograd.grad(kernels.rotate_qkv(qkv, *angles, num_heads, biases), (qkv, *biases), backs)
    assert all(torch.equal(left, right) for left, right in zip(found, again, strict=True))


def project_both_ways(attention: Attention, x: Tensor, backs: list[Tensor], *, bf16: bool) -> tuple[Tensor, ...]:
    """Queries, keys and values, and the gradients of x and of the three weights and biases."""
    geometry = make_geometry(MODEL, torch.arange(x.shape[1], device="cuda")[None])
    if bf16:
        fast = accelerate(attention)
        casts, _ = cast_maps(fast, torch.bfloat16)
        parts = fast.project_cast(x.bfloat16(), geometry, casts["qkv"])
    else:
        parts = attention.place_heads(attention.query(x), attention.key(x), attention.value(x), geometry)
    maps = (attention.query, attention.key, attention.value)
    weights = [parameter for one in maps for parameter in (one.weight, one.bias)]
    grads = torch.autograd.grad(parts, (x, *weights), [back.to(parts[0].dtype) for back in backs])
    assert all(grad.dtype == weight.dtype for grad, weight in zip(grads, (x, *weights), strict=True))
    return (*parts, *grads)


def test_attention_in_bf16_equals_attention_in_float64() -> None:
    torch.manual_seed(0)
    attention = Attention(MODEL, 0).cuda()
    wide = Attention(MODEL, 0).cuda()
    wide.load_state_dict(attention.state_dict())
    x = torch.randn(2, 65, 128, device="cuda", requires_grad=True)
    backs = draw_backs(2, 65, 4, 32, torch.bfloat16)
    found = project_both_ways(attention, x, backs, bf16=True)
    expected = project_both_ways(wide.double(), x.detach().double().requires_grad_(), backs, bf16=False)
    for left, right in zip(found, expected, strict=True):
        assert (left.double() - right).norm() <= 1e-2 * right.norm()


def test_values_are_not_copied(kernels: Any) -> None:
    qkv, angles = draw(2, 16, 4, 32, torch.bfloat16)
    q, k, v = kernels.rotate_qkv(qkv, *angles, 4)
    places = [part.untyped_storage().data_ptr() for part in (q, k, v)]
    assert places[2] == qkv.untyped_storage().data_ptr()
    assert len(set(places)) == 3


def attend(rotation: Rotate, x: Tensor, weight: Tensor, bias: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    q, k, v = rotation(F.linear(x, weight, bias.to(x.dtype)), *angles, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def draw_attention() -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(2, 64, 128, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(3 * 128, 128, device="cuda") / 11).bfloat16().requires_grad_()
    bias = torch.randn(3 * 128, device="cuda", requires_grad=True)
    return x, weight, bias, rotary_angles(torch.arange(64, device="cuda")[None], 32)


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_plain(kernels: Any, backend: str) -> None:
    x, weight, bias, angles = draw_attention()
    back = torch.randn(2, 64, 128, device="cuda").bfloat16()
    plain = attend(kernels.rotate_qkv, x, weight, bias, angles)
    compiled = torch.compile(attend, fullgraph=True, backend=backend)(kernels.rotate_qkv, x, weight, bias, angles)
    pairs = [(plain, compiled)]
    pairs += zip(*(torch.autograd.grad(y, (x, weight, bias), back) for y in (plain, compiled)), strict=True)
    for left, right in pairs:
        # Attention's own backward adds in no fixed order.
        assert (left.double() - right.double()).norm() <= 1e-2 * left.double().norm()


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_compiled_gives_the_same_bits(kernels: Any) -> None:
    qkv, angles = draw(2, 33, 4, 48, torch.bfloat16)
    backs = [torch.randn(2, 4, 33, 48, device="cuda").bfloat16() for _ in range(3)]

    def add_up(qkv: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(part + 1 for part in kernels.rotate_qkv(qkv, *angles, 4))

    plain = add_up(qkv, angles)
    compiled = torch.compile(add_up, fullgraph=True, backend="aot_eager")(qkv, angles)
    assert all(torch.equal(left, right) for left, right in zip(plain, compiled, strict=True))
    grads = [torch.autograd.grad(parts, qkv, backs) for parts in (plain, compiled)]
    assert all(torch.equal(left, right) for left, right in zip(*grads, strict=True))

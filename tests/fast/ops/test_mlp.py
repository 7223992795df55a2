"""An MLP with GELU fused into its GEMMs equals float64, compiled or not, whatever the number of rows."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.fast.casts import Casts, cast_maps
from some_moe.model.linear import Linear

SHAPES = [(4096, 384, 768), (1500, 104, 256), (1027, 72, 80), (1024, 64, 16)]  # the last two: no width of whole blocks


@pytest.fixture
def mlp() -> Any:
    return pytest.importorskip("some_moe.fast.ops.mlp")


def make(d: int, f: int) -> tuple[nn.Linear, nn.Linear]:
    return Linear(d, f, device="cuda"), Linear(f, d, device="cuda")


def gelu_mlp(x: Tensor, expand: nn.Linear, project: nn.Linear, casts: Casts) -> Tensor:
    from some_moe.fast.model import mlp

    return mlp(x, expand, project, casts)


def both_ways(y: Tensor, inputs: list[Tensor], back: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, inputs, back.to(y.dtype))]


def run(layers: tuple[nn.Linear, nn.Linear], x: Tensor, back: Tensor, way: Any = gelu_mlp) -> list[Tensor]:
    inputs = [x, *layers[0].parameters(), *layers[1].parameters()]
    casts, _ = cast_maps(nn.ModuleDict({"expand": layers[0], "project": layers[1]}), torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        y = way(x, *layers, casts)
    assert y.dtype == torch.bfloat16
    return both_ways(y, inputs, back)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d", "f"), SHAPES)
def test_it_equals_float64_both_ways(mlp: Any, n: int, d: int, f: int) -> None:
    torch.manual_seed(n)
    layers = make(d, f)
    x = torch.randn(3, n // 3 + 1, d, device="cuda").bfloat16().requires_grad_()
    back = torch.randn_like(x)
    assert mlp.can_run(x, layers[0].weight)
    found = run(layers, x, back)
    wide = [part.detach().double().requires_grad_() for part in (x, *layers[0].parameters(), *layers[1].parameters())]
    exact = F.linear(F.gelu(F.linear(wide[0], wide[1], wide[2])), wide[3], wide[4])
    for left, right in zip(found, both_ways(exact, wide, back), strict=True):
        assert left.shape == right.shape
        assert (left.double() - right).norm() <= 6e-3 * right.norm()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_compiled_code_computes_the_same_bits() -> None:
    torch.manual_seed(0)
    layers, x = make(384, 768), torch.randn(2, 700, 384, device="cuda").bfloat16().requires_grad_()
    back = torch.randn_like(x)
    compiled = torch.compile(gelu_mlp, fullgraph=True, backend="aot_eager")
    for left, right in zip(run(layers, x, back), run(layers, x, back, compiled), strict=True):
        assert torch.equal(left, right)


@pytest.mark.gpu
def test_accumulators_beyond_the_largest_f16_saturate(mlp: Any) -> None:
    x = torch.zeros(1024, 64, device="cuda").bfloat16()
    x[:, 0] = torch.tensor([0.0, 20.0, 300.0, 2e4, 1e5, -20.0, -300.0, -2e4, -1e5, 1.0] * 102 + [0.0] * 4)
    up = torch.zeros(128, 64, device="cuda").bfloat16()
    up[:, 0] = 1
    hidden, dgelu = mlp.gemm_gelu(x, up, up.new_zeros(128))
    exact = F.gelu(x[:10, 0].double()).clamp(max=65504)
    torch.testing.assert_close(hidden[:10, 5].double(), exact, rtol=2.0**-8, atol=2e-3)
    grad, dbias = mlp.gemm_dgelu(x.new_ones(1024, 64), up.new_ones(64, 128) / 64, dgelu)
    assert torch.allclose(dbias, grad.float().sum(0), rtol=4e-3)
    expected_dgelu = [0.5, 1, 1, 1, 1, 0, 0, 0, 0, 1.0833]
    torch.testing.assert_close(grad[:10, 5].double().cpu(), torch.tensor(expected_dgelu).double(), rtol=0, atol=0.006)


@pytest.mark.gpu
def test_nan_stays_nan(mlp: Any) -> None:
    torch.manual_seed(0)
    x, up = torch.randn(1024, 64, device="cuda").bfloat16(), torch.randn(128, 64, device="cuda").bfloat16()
    x[3, 5] = float("nan")
    hidden, _ = mlp.gemm_gelu(x, up, up.new_zeros(128))
    assert hidden[3].isnan().all()
    assert not hidden[:3].isnan().any()
    assert not hidden[4:].isnan().any()

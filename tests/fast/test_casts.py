"""Casts of all weights at once leave the gradients where they belong, and round no more than they must."""

import pytest
import torch
from torch import nn

from some_moe import SomeLM
from some_moe.fast.casts import below, cast_maps, embed, linear, list_maps
from some_moe.model.linear import Linear
from tests.shared.variants import BASE, MODELS, make_config


@pytest.mark.parametrize("kind", MODELS)
def test_every_linear_map_is_cast_once(kind: str) -> None:
    model = SomeLM(make_config(kind))
    maps = list_maps(model)
    layers = [layer for parts in maps.values() for layer in parts]
    assert len(layers) == len(set(layers))
    assert set(layers) == {module for module in model.modules() if isinstance(module, nn.Linear)}
    casts, _ = cast_maps(model, torch.bfloat16)
    assert casts.keys() == maps.keys()
    for name, parts in maps.items():
        assert torch.equal(casts[name].weight, torch.cat([part.weight for part in parts]).bfloat16()), name
        assert torch.equal(casts[name].bias, torch.cat([part.bias for part in parts]).bfloat16()), name
    assert len(below(casts, "blocks.1.attention")) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_map_computes_by_its_cast_and_learns_by_itself(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x, back = Linear(8, 4), torch.randn(5, 7, 8), torch.randn(5, 7, 4)
    with torch.no_grad():
        layer.bias.normal_()
    casts, _ = cast_maps(nn.ModuleDict({"map": layer}), dtype)
    y = linear(x.to(dtype), layer, casts["map"])
    assert torch.equal(y, layer(x.to(dtype)))
    found = torch.autograd.grad(y, (layer.weight, layer.bias), back.to(dtype))
    rows, grads = x.to(dtype).flatten(0, 1).double(), back.to(dtype).flatten(0, 1).double()
    # The weight's gradient is made in the type of the pass; the bias's is added up in float32.
    assert torch.allclose(found[0].double(), grads.T @ rows, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4)
    assert torch.allclose(found[1].double(), grads.sum(0), rtol=1e-5)
    assert found[0].dtype == found[1].dtype == torch.float32


def test_a_map_that_was_not_used_has_no_gradient() -> None:
    maps = nn.ModuleDict({"first": Linear(8, 4), "second": Linear(8, 4)})
    casts, _ = cast_maps(maps, torch.bfloat16)
    linear(torch.randn(3, 8, dtype=torch.bfloat16), maps["first"], casts["first"]).sum().backward()
    assert all(parameter.grad is not None for parameter in maps["first"].parameters())
    assert all(parameter.grad is None for parameter in maps["second"].parameters())


def test_casts_of_one_pass_serve_several_micro_batches() -> None:
    torch.manual_seed(0)
    layer, x = Linear(8, 4), torch.randn(2, 3, 8).bfloat16()
    casts, _ = cast_maps(nn.ModuleDict({"map": layer}), torch.bfloat16)
    alone = [
        torch.autograd.grad(linear(part, layer, casts["map"]).sum(), layer.weight, retain_graph=True) for part in x
    ]
    for part in x:
        linear(part, layer, casts["map"]).sum().backward(retain_graph=True)
    assert torch.equal(layer.weight.grad, alone[0][0] + alone[1][0])


def test_embedded_rows_are_those_of_the_cast_and_their_gradient_is_not_rounded() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(300, 64)
    tokens = (300 * torch.rand(1, 500) ** 4).long()  # a few of them very often
    _, rows = cast_maps(nn.ModuleDict({"map": Linear(8, 4)}), torch.bfloat16, embedding)
    x = embed(tokens, embedding, rows)
    assert torch.equal(x, embedding(tokens).bfloat16())
    assert torch.equal(embed(tokens, embedding, None), embedding(tokens))
    back = torch.randn(1, 500, 64).bfloat16()
    (found,) = torch.autograd.grad(x, embedding.weight, back)
    exact = torch.zeros(300, 64, dtype=torch.float64).index_add(0, tokens[0], back[0].double())
    assert found.dtype == torch.float32
    assert (found.double() - exact).norm() <= 5e-6 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1000, 3072, 3073, 20_000])
def test_on_a_gpu_the_gradient_of_an_embedding_is_not_rounded(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    embedding = nn.Embedding(300, 64).cuda()
    tokens = (300 * torch.rand(num_tokens, device="cuda") ** 4).long()[None]
    back = torch.randn(1, num_tokens, 64, device="cuda").bfloat16()
    x = embed(tokens, embedding, embedding.weight.detach().bfloat16())
    (found,) = torch.autograd.grad(x, embedding.weight, back)
    exact = torch.zeros(300, 64, dtype=torch.float64, device="cuda").index_add(0, tokens[0], back[0].double())
    assert found.dtype == torch.float32
    assert (found.double() - exact).norm() <= 5e-6 * exact.norm()


def test_maps_of_a_plain_model_are_named_as_its_modules_are() -> None:
    names = set(list_maps(SomeLM(BASE)))
    assert {"head", "blocks.0.attention.qkv", "blocks.0.attention.out", "blocks.2.ffn.query.expand"} <= names

"""Whatever is timed computes the reference's function: output, gradients of x, gates and trained weights."""

import importlib
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from some_moe.config import ConfigError
from some_moe.experts import ExpertWeights, choose_kernel
from some_moe.lab.bench import variants
from some_moe.lab.bench.problem import Problem, make_problem, make_weights, trained_tensors
from some_moe.lab.bench.shapes import LayerShape
from some_moe.lab.bench.variants import (
    PEERS,
    UnavailableError,
    Variant,
    list_variants,
    make_transformers_grouped,
    our_kernel,
)

CPU = torch.device("cpu")
SHAPE = LayerShape(name="tiny", d_model=16, d_ffn=24, num_experts=6, top_k=2)
VARIANTS = [variant for variant in list_variants(CPU, "none") if variant.same_function]


def run(mix: variants.Mix, problem: Problem, weights: ExpertWeights) -> list[Tensor]:
    wanted = [problem.x, problem.gates, *trained_tensors(weights).values()]
    y = mix(problem.x, problem.experts, problem.gates)
    return [y, *torch.autograd.grad(y, wanted, problem.grad_y)]


def build(variant: Variant, weights: ExpertWeights) -> variants.Mix:
    try:
        return variant.build(weights, SHAPE.top_k)
    except UnavailableError as reason:
        # transformers is installed for the tests: only what it does not offer at all may be left out.
        if "no low-rank" not in str(reason):
            raise
        pytest.skip(str(reason))


@pytest.mark.parametrize("trainability", ["frozen", "full", "lora"])
@pytest.mark.parametrize("routing", ["balanced", "skewed"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_equals_the_reference(variant: Variant, routing: str, trainability: str) -> None:
    weights = make_weights(SHAPE, CPU, torch.float32, trainability, lora_rank=8)
    problem = make_problem(SHAPE, 40, routing, CPU, torch.float32)
    reference = choose_kernel("reference")
    expected = run(lambda x, experts, gates: reference(x, experts, gates, weights), problem, weights)
    found = run(build(variant, weights), problem, weights)
    for left, right in zip(found, expected, strict=True):
        assert float((left - right).detach().norm() / right.detach().norm()) < 1e-5


def test_an_expert_that_nobody_chose_disturbs_no_variant() -> None:
    weights = make_weights(SHAPE, CPU, torch.float32)
    problem = make_problem(SHAPE, 8, "balanced", CPU, torch.float32)
    problem.experts[:] = torch.tensor([0, 4])
    expected = None
    for variant in VARIANTS:
        found = run(build(variant, weights), problem, weights)[0]
        expected = found if expected is None else expected
        assert torch.allclose(found, expected, atol=1e-5)


def test_peers_compute_with_the_given_weights_and_no_copy() -> None:
    weights = make_weights(SHAPE, CPU, torch.float32)
    mix = build(next(variant for variant in PEERS if variant.name == "transformers-grouped"), weights)
    assert isinstance(mix, torch.nn.Module)
    places = {parameter.data_ptr() for parameter in mix.parameters()}
    assert places == {getattr(weights, f.name).data_ptr() for f in fields(weights) if f.name not in ("gain", "lora")}


def test_the_dense_ceiling_is_k_experts_side_by_side() -> None:
    weights = make_weights(SHAPE, CPU, torch.float32)
    problem = make_problem(SHAPE, 8, "balanced", CPU, torch.float32)
    found = variants.Dense(weights, 2)(problem.x, problem.experts, problem.gates)
    up, up_bias, down, down_bias = variants.matrices(weights)
    parts = [F.linear(F.gelu(F.linear(problem.x, up[e], up_bias[e])), down[e]) for e in range(2)]
    assert torch.allclose(found, parts[0] + parts[1] + down_bias[0], atol=1e-5)


def test_without_transformers_its_peer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(UnavailableError, match="transformers and its experts interface are not there"):
        make_transformers_grouped(make_weights(SHAPE, CPU, torch.float32), 2)


def test_a_kernel_that_cannot_run_here_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("Triton's kernel can run here")
    with pytest.raises(UnavailableError, match="it needs a CUDA GPU and the triton package"):
        our_kernel("triton").build(make_weights(SHAPE, CPU, torch.float32), 2)


def test_variants_are_chosen_by_name_and_compiled_where_asked() -> None:
    names = [variant.name for variant in list_variants(CPU, "all", ("some cpu", "dense"))]
    assert names == ["some cpu", "dense", "some cpu, compiled", "dense, compiled"]
    assert not any(variant.is_ours and variant.compiled for variant in list_variants(CPU, "peers"))
    on_gpu = [variant.name for variant in list_variants(torch.device("cuda"), "all", ("some grouped", "torch-grouped"))]
    assert on_gpu == ["some grouped", "torch-grouped", "some grouped, compiled", "torch-grouped, compiled"]
    with pytest.raises(ConfigError, match="--variants 'fast' is not known on cpu; choose from some cpu"):
        list_variants(CPU, "none", ("fast",))

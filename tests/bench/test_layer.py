"""The layer benchmark: right first, then timed; what fails is a row and not a crash."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from some_moe.bench import layer
from some_moe.bench.checks import relative_error
from some_moe.bench.layer import LayerSettings, bench_layer, compare_with_peers, rate, roofline
from some_moe.bench.shapes import Chip, LayerShape
from some_moe.bench.variants import Variant, list_variants, our_kernel
from some_moe.kernels import ExpertWeights, choose_kernel

CPU = torch.device("cpu")
SHAPE = LayerShape(name="tiny", d_model=16, d_ffn=24, num_experts=6, top_k=2)


def settings(**changes: Any) -> LayerSettings:
    return LayerSettings(**{"shapes": [SHAPE], "tokens": [32], "routings": ["balanced"], "seconds": 0.002} | changes)


def spoiled(name: str, spoil: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Variant:
    """The reference with something done to it. spoil (y, x, gates) → y."""
    kernel = choose_kernel("reference")

    def make(weights: ExpertWeights, top_k: int) -> Any:  # noqa: ARG001
        return lambda x, experts, gates: spoil(kernel(x, experts, gates, weights), x, gates)

    return Variant(name=name, make=make)


def raise_memory_error(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")


def raise_error(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no such instruction\nand more lines")


@pytest.mark.parametrize("trainability", ["frozen", "full", "lora"])
@pytest.mark.parametrize("which", ["forward", "backward", "both"])
def test_every_variant_is_checked_and_timed(which: str, trainability: str) -> None:
    variants = list_variants(CPU, "none", ("some cpu", "torch-grouped", "loop", "dense"))
    (case,) = bench_layer(settings(which=which, trainability=trainability), variants, CPU)
    rows = {row["name"]: row for row in case["rows"]}
    if trainability == "lora":
        assert rows.pop("dense")["status"] == "unavailable"
    assert {row["status"] for row in rows.values()} == {"ok"}
    for row in rows.values():
        assert 0 < row["ms_least"] <= row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["tflops"] == pytest.approx(case["flops"] / row["ms"] / 1e9)
        assert row["share_of_peak"] is None
    checked = rows["some cpu"]["errors"]
    assert ("grad_gates" in checked) == (which != "forward")
    assert ("grad_up" in checked) == (which != "forward" and trainability == "full")
    assert ("grad_down_in" in checked) == (which != "forward" and trainability == "lora")
    assert json.loads(json.dumps(case)) == case


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y, x, gates: y * 1.001,  # noqa: ARG005
        lambda y, x, gates: y + 0.01 * (x - x.detach()),  # noqa: ARG005
        lambda y, x, gates: y + 0.01 * (gates - gates.detach()).sum(-1, keepdim=True),  # noqa: ARG005
        lambda y, x, gates: y * float("nan"),  # noqa: ARG005
    ],
    ids=["output", "gradient of x", "gradient of the gates", "not a number"],
)
def test_a_wrong_variant_is_marked_and_never_timed(spoil: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    (case,) = bench_layer(settings(), [spoiled("wrong", spoil), our_kernel("cpu")], CPU)
    wrong, right = case["rows"]
    assert wrong["status"] == "wrong"
    assert "more than 1e-04" in wrong["reason"]
    assert "ms" not in wrong
    assert right["status"] == "ok"
    assert right["speed_to_fastest_peer"] is None


def test_wrong_weight_gradients_are_found() -> None:
    def make(weights: ExpertWeights, top_k: int) -> Any:  # noqa: ARG001
        kernel = choose_kernel("reference")
        return lambda x, e, g: kernel(x, e, g, weights) + 0.01 * (weights.up - weights.up.detach()).sum()

    (case,) = bench_layer(settings(trainability="full"), [Variant(name="wrong", make=make)], CPU)
    (row,) = case["rows"]
    assert row["status"] == "wrong"
    assert row["errors"]["grad_x"] < 1e-5 < row["errors"]["grad_up"]


def test_what_fails_is_a_row_that_says_why() -> None:
    variants = [spoiled("big", raise_memory_error), spoiled("broken", raise_error), our_kernel("cpu")]
    cases = list(bench_layer(settings(routings=["balanced", "skewed"]), variants, CPU))
    for case in cases:
        big, broken, ours = case["rows"]
        assert (big["status"], big["reason"]) == ("out of memory", "CUDA out of memory. Tried to allocate 2.00 GiB.")
        assert (broken["status"], broken["reason"]) == ("failed", "RuntimeError: no such instruction")
        assert ours["status"] == "ok"


def test_a_shape_that_does_not_fit_is_a_case_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "make_weights", raise_memory_error)
    (case,) = bench_layer(settings(), [our_kernel("cpu")], CPU)
    assert case["failure"] == "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert case["rows"] == []
    monkeypatch.setattr(layer, "make_weights", raise_error)
    with pytest.raises(RuntimeError, match="no such instruction"):
        list(bench_layer(settings(), [our_kernel("cpu")], CPU))


def test_speed_is_relative_to_the_fastest_peer_of_the_same_function() -> None:
    def row(ms: float | None, is_ours: bool, same: bool = True) -> dict[str, Any]:
        return {"is_ours": is_ours, "same_function": same} | ({} if ms is None else {"ms": ms})

    rows = [row(1.0, True), row(2.0, False), row(3.0, False), row(0.5, False, same=False), row(None, False)]
    compare_with_peers(rows)
    assert [r.get("speed_to_fastest_peer") for r in rows] == [2.0, 1.0, pytest.approx(2 / 3), 4.0, None]


def test_rates_and_roofline_by_hand() -> None:
    chip = Chip(flops=1e12, bandwidth=1e11)
    assert rate(2 * 10**9, 4.0, chip) == {"tflops": 0.5, "share_of_peak": 0.5}
    assert roofline(10**9, 5 * 10**8, chip) == {"flops_ms": 1.0, "bytes_ms": 5.0, "ms": 5.0}
    assert roofline(10**9, 5 * 10**8, None) is None


def test_relative_error_is_of_norms() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")


@pytest.mark.slow
def test_compiled_variants_report_their_compilation_apart() -> None:
    variants = list_variants(CPU, "peers", ("dense", "torch-grouped"))
    cases = list(bench_layer(settings(routings=["balanced", "skewed"]), variants, CPU))
    first, second = ({row["name"]: row for row in case["rows"]}["dense, compiled"] for case in cases)
    assert first["status"] == second["status"] == "ok"
    assert first["compile_seconds"] > 10 * first["ms"] / 1e3
    assert second["compile_seconds"] is None

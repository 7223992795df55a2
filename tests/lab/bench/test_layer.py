"""The layer benchmark: right first, then timed; what fails is a row and not a crash."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from some_moe.experts import ExpertWeights, choose_kernel
from some_moe.lab.bench import layer
from some_moe.lab.bench.checks import relative_error
from some_moe.lab.bench.layer import LayerSettings, bench_layer, compare_with_peers, rate, roofline
from some_moe.lab.bench.recording import UnrecordableError
from some_moe.lab.bench.shapes import Chip, LayerShape
from some_moe.lab.bench.tables import describe_layer_case, layer_summary, layer_table
from some_moe.lab.bench.timing import Task
from some_moe.lab.bench.variants import Variant, list_variants, our_kernel

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
        assert (row["recorded"], row["ms_recorded"], row["ms_eager"]) == (False, None, row["ms"])
    checked = rows["some cpu"]["errors"]
    assert ("grad_gates" in checked) == (which != "forward")
    assert ("grad_up" in checked) == (which != "forward" and trainability == "full")
    assert ("grad_down_in" in checked) == (which != "forward" and trainability == "lora")
    assert json.loads(json.dumps(case)) == case


@pytest.mark.parametrize(("trainability", "multiple"), [("frozen", 1), ("full", 8), ("lora", 8)])
def test_loads_of_trained_experts_are_multiples_of_8_and_the_case_says_so(trainability: str, multiple: int) -> None:
    loads: list[int] = []

    def make(weights: ExpertWeights, top_k: int) -> Any:  # noqa: ARG001
        kernel = choose_kernel("reference")

        def mix(x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
            loads.extend(experts.flatten().bincount().tolist())
            return kernel(x, experts, gates, weights)

        return mix

    (case,) = bench_layer(settings(trainability=trainability), [Variant(name="watched", make=make)], CPU)
    assert case["rows"][0]["status"] == "ok"
    assert all(load % 8 == 0 for load in loads) == (multiple == 8)
    assert case["load_multiple"] == multiple
    assert ("loads are multiples of 8" in describe_layer_case(case)[1]) == (multiple == 8)


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


# --- recorded and eager -----------------------------------------------------------------------------------


def timed_row(recorded: float | None, eager: float | None, is_ours: bool, same: bool = True) -> dict[str, Any]:
    times = {"ms": recorded or eager, "ms_recorded": recorded, "ms_eager": eager}
    return {"is_ours": is_ours, "same_function": same, **times}


def test_speed_is_relative_to_the_fastest_peer_of_the_same_function() -> None:
    rows = [
        timed_row(None, 1.0, True),
        timed_row(None, 2.0, False),
        timed_row(None, 3.0, False),
        timed_row(None, 0.5, False, same=False),
        {"is_ours": False, "same_function": True},
    ]
    compare_with_peers(rows)
    assert [r.get("speed_to_fastest_peer") for r in rows] == [2.0, 1.0, pytest.approx(2 / 3), 4.0, None]


def test_recordings_are_compared_with_recordings_and_eager_calls_with_eager_ones() -> None:
    rows = [timed_row(1.0, 6.0, True), timed_row(2.0, 4.0, False), timed_row(None, 3.0, False)]
    compare_with_peers(rows)
    assert [r["speed_to_fastest_peer"] for r in rows] == [2.0, 1.0, None]
    assert [r["eager_speed_to_fastest_peer"] for r in rows] == [0.5, 0.75, 1.0]


class PretendedRecorder:
    """Stands in for `record`, which needs a GPU: one way for each task, in turn. A replay is the call itself."""

    def __init__(self, ways: Iterable[str]) -> None:
        self.ways = iter(ways)

    def __call__(self, task: Task, device: torch.device) -> tuple[Task, Any]:
        assert device == CPU
        way = next(self.ways)
        if way == "waits":
            raise UnrecordableError("it waits for the device on its way")
        if task.before is not None:
            task.before()
        y, grads = task.timed()
        return replace(task), (2 * y if way == "wrong" else y, grads)


@pytest.mark.parametrize("launch", ["recorded", "both"])
@pytest.mark.parametrize("which", ["forward", "backward", "both"])
def test_what_can_be_recorded_is_and_the_others_say_why(
    which: str, launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "record", PretendedRecorder(["well", "wrong", "well", "waits", "well"]))
    variants = list_variants(CPU, "none", ("some cpu", "some grouped", "torch-grouped", "loop", "dense"))
    (case,) = bench_layer(settings(which=which, launch=launch), variants, CPU)
    ours, wrong, peer, loop, dense = case["rows"]
    assert [row["recorded"] for row in case["rows"]] == [True, False, True, False, True]
    for row in (ours, peer, dense):
        assert row["ms"] == row["ms_recorded"] > 0
        assert (row["ms_eager"] is not None) == (launch == "both")
    for row in (wrong, loop):
        assert row["ms"] == row["ms_eager"] > 0
        assert row["status"] == "ok"
        assert row["ms_recorded"] is row["speed_to_fastest_peer"] is None
    assert wrong["not_recorded"] == "its replay is wrong: relative error 1.0e+00 of y, more than 1e-04"
    assert ours["speed_to_fastest_peer"] == peer["ms"] / ours["ms"]
    assert json.loads(json.dumps(case)) == case


def test_tables_set_recordings_beside_eager_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "record", PretendedRecorder(["well", "well", "waits"]))
    variants = list_variants(CPU, "none", ("some cpu", "torch-grouped", "loop"))
    (case,) = bench_layer(settings(launch="both"), variants, CPU)
    assert "ms: recorded once as a CUDA graph and replayed" in describe_layer_case(case)[1]
    columns, lines = layer_table(case)
    cells = {line[0]: dict(zip([column.header for column in columns], line, strict=True)) for line in lines}
    ours, peer, loop = (row for row in case["rows"])
    assert cells["some cpu"]["ms"] == f"{ours['ms_recorded']:.3f}"
    assert cells["some cpu"]["eager ms"] == f"{ours['ms_eager']:.3f}"
    assert (cells["loop"]["ms"], cells["loop"]["quartiles"], cells["loop"]["FLOP/s"]) == ("–", "", "")
    assert cells["loop"]["eager ms"] == f"{loop['ms_eager']:.3f}"
    assert cells["loop"]["note"] == "not recorded: it waits for the device on its way"
    columns, (line,) = layer_summary([case])
    summary = dict(zip([column.header for column in columns], line, strict=True))
    eager_peer = min(peer["ms_eager"], loop["ms_eager"])
    assert summary["speed"] == f"{peer['ms_recorded'] / ours['ms_recorded']:.2f}×"
    assert summary["eager speed"] == f"{eager_peer / ours['ms_eager']:.2f}×"


def test_tables_of_eager_calls_have_one_time() -> None:
    (case,) = bench_layer(settings(), list_variants(CPU, "none", ("some cpu", "loop")), CPU)
    for columns, _ in (layer_table(case), layer_summary([case])):
        headers = [column.header for column in columns]
        assert "ms" in headers
        assert not any("eager" in header for header in headers)
    assert "CUDA graph" not in describe_layer_case(case)[1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainability", ["frozen", "full", "lora"])
@pytest.mark.parametrize("which", ["forward", "backward", "both"])
def test_all_but_the_loop_are_recorded_on_a_gpu(which: str, trainability: str) -> None:
    device = torch.device("cuda")
    shape = LayerShape(name="small", d_model=64, d_ffn=128, num_experts=8, top_k=2)
    asked = settings(shapes=[shape], tokens=[512], which=which, trainability=trainability, launch="both")
    (case,) = bench_layer(asked, list_variants(device, "all"), device)
    rows = {row["name"]: row for row in case["rows"] if row["status"] == "ok"}
    ours = {"some grouped", "some grouped, compiled", "some triton", "some triton, compiled"}
    assert {*ours, "torch-grouped", "torch-grouped, compiled", "torch-grouped-add", "loop"} <= set(rows)
    for name, row in rows.items():
        assert row["recorded"] == (name != "loop"), (name, row["not_recorded"])
        assert row["ms_eager"] > 0
    torch.cuda.empty_cache()  # refused where a recording was left open


# --- numbers ----------------------------------------------------------------------------------------------


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

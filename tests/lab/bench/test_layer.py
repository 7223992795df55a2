"""The layer benchmark: right first, then timed; what fails is a row and not a crash."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from some_moe.config import ModelConfig, RunConfig
from some_moe.experts import ExpertWeights, choose_kernel
from some_moe.lab.bench import layer
from some_moe.lab.bench.layer import bench_layer, compare_with_peers
from some_moe.lab.bench.tables import Part, describe_layer_case, summarize_layers
from some_moe.lab.bench.timing import Call, UnrecordableError
from some_moe.lab.bench.variants import Variant, list_variants, make_torch_grouped, our_kernel

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"d_model": 16, "num_heads": 2, "d_ffn": 24, "num_experts": 6, "top_k": 2}


def run(variants: list[Variant], **changes: Any) -> list[dict[str, Any]]:
    """The cases of a small layer, one unless more routings are asked for."""
    model = ModelConfig(**SIZES, trainability=changes.pop("trainability", "frozen"))
    options = {"routings": ["balanced"], "device": CPU, "seconds": 0.002, "records": False} | changes
    return list(bench_layer([RunConfig(name="tiny", model=model)], [32], variants=variants, **options))


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
def test_every_variant_is_checked_and_timed(trainability: str) -> None:
    variants = list_variants(CPU, False, ("some cpu", "torch-grouped", "loop", "dense"))
    (case,) = run(variants, trainability=trainability)
    rows = {row["name"]: row for row in case["rows"]}
    if trainability == "lora":
        assert rows.pop("dense")["status"] == "unavailable"
    assert {row["status"] for row in rows.values()} == {"ok"}
    for row in rows.values():
        assert 0 < row["ms_least"] <= row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["tflops"] == pytest.approx(case["flops"] / row["ms"] / 1e9)
        assert row["share_of_peak"] is None
        assert row["recorded"] is False
    checked = rows["some cpu"]["errors"]
    assert {"y", "grad_x", "grad_gates"} <= set(checked)
    assert ("grad_up" in checked) == (trainability == "full")
    assert ("grad_down_in" in checked) == (trainability == "lora")
    assert case["shape"] == {"name": "tiny", "d_model": 16, "d_ffn": 24, "num_experts": 6, "top_k": 2}
    assert json.loads(json.dumps(case)) == case


def test_a_known_chip_has_a_share_of_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "describe_device", lambda device: "NVIDIA H200")  # noqa: ARG005
    (case,) = run([our_kernel("cpu")])
    (row,) = case["rows"]
    assert row["share_of_peak"] == pytest.approx(row["tflops"] / 989)


@pytest.mark.parametrize(("trainability", "multiple"), [("frozen", 1), ("full", 8), ("lora", 8)])
def test_loads_of_trained_experts_are_multiples_of_8_and_the_case_says_so(trainability: str, multiple: int) -> None:
    loads: list[int] = []

    def make(weights: ExpertWeights, top_k: int) -> Any:  # noqa: ARG001
        kernel = choose_kernel("reference")

        def mix(x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
            loads.extend(experts.flatten().bincount().tolist())
            return kernel(x, experts, gates, weights)

        return mix

    (case,) = run([Variant(name="watched", make=make)], trainability=trainability)
    assert case["rows"][0]["status"] == "ok"
    assert all(load % 8 == 0 for load in loads) == (multiple == 8)
    assert case["load_multiple"] == multiple
    assert ("loads are multiples of 8" in describe_layer_case(case).facts) == (multiple == 8)


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
    (case,) = run([spoiled("wrong", spoil), our_kernel("cpu")])
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

    (case,) = run([Variant(name="wrong", make=make)], trainability="full")
    (row,) = case["rows"]
    assert row["status"] == "wrong"
    assert row["errors"]["grad_x"] < 1e-5 < row["errors"]["grad_up"]


def test_what_fails_is_a_row_that_says_why() -> None:
    variants = [spoiled("big", raise_memory_error), spoiled("broken", raise_error), our_kernel("cpu")]
    for case in run(variants, routings=["balanced", "skewed"]):
        big, broken, ours = case["rows"]
        assert (big["status"], big["reason"]) == ("out of memory", "CUDA out of memory. Tried to allocate 2.00 GiB.")
        assert (broken["status"], broken["reason"]) == ("failed", "RuntimeError: no such instruction")
        assert ours["status"] == "ok"


def test_a_shape_that_does_not_fit_is_a_case_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "make_weights", raise_memory_error)
    (case,) = run([our_kernel("cpu")])
    assert case["failure"] == "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert case["rows"] == []
    monkeypatch.setattr(layer, "make_weights", raise_error)
    with pytest.raises(RuntimeError, match="no such instruction"):
        run([our_kernel("cpu")])


def test_memory_that_ends_while_timing_is_a_case_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "time_in_turns", raise_memory_error)
    (case,) = run([our_kernel("cpu")])
    assert case["failure"].startswith("out of memory: CUDA out of memory.")
    assert describe_layer_case(case).facts.endswith(case["failure"])


# --- recorded and eager -----------------------------------------------------------------------------------


def test_speed_is_relative_to_the_fastest_peer_of_the_same_function() -> None:
    kinds = [(1.0, True, True), (2.0, False, True), (3.0, False, True), (0.5, False, False)]
    rows: list[dict[str, Any]] = [{"ms": ms, "is_ours": ours, "same_function": same} for ms, ours, same in kinds]
    rows.append({"is_ours": False, "same_function": True})
    compare_with_peers(rows)
    assert [r.get("speed_to_fastest_peer") for r in rows] == [2.0, 1.0, pytest.approx(2 / 3), 4.0, None]


class PretendedRecorder:
    """Stands in for `record`, which needs a GPU: one way for each call, in turn. A replay is the call itself."""

    def __init__(self, ways: Iterable[str]) -> None:
        self.ways = iter(ways)

    def __call__(self, call: Call, device: torch.device) -> tuple[Call, Any]:
        assert device == CPU
        way = next(self.ways)
        if way == "waits":
            raise UnrecordableError("it waits for the device on its way")
        found = call()
        return call, found | {"y": 2 * found["y"] if way == "wrong" else found["y"]}


def test_what_can_be_recorded_is_and_the_others_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "record", PretendedRecorder(["well", "wrong", "well", "waits", "well"]))
    variants = list_variants(CPU, False, ("some cpu", "some grouped", "torch-grouped", "loop", "dense"))
    (case,) = run(variants, records=True)
    ours, wrong, peer, loop, _ = case["rows"]
    assert case["launch"] == "recorded"
    assert [row["recorded"] for row in case["rows"]] == [True, False, True, False, True]
    assert all(row["status"] == "ok" and row["ms"] > 0 for row in case["rows"])
    assert wrong["not_recorded"] == "its replay is wrong: relative error 1.0e+00 of y, more than 1e-04"
    assert loop["not_recorded"] == "it waits for the device on its way"
    assert ours["speed_to_fastest_peer"] == min(peer["ms"], loop["ms"]) / ours["ms"]
    assert json.loads(json.dumps(case)) == case


def cells_of(part: Part) -> list[dict[str, str]]:
    headers = [column.header for column in part.table.columns]
    return [dict(zip(headers, row, strict=True)) for row in part.table.rows]


def test_tables_say_what_was_recorded_and_what_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "record", PretendedRecorder(["well", "well", "waits"]))
    (case,) = run(list_variants(CPU, False, ("some cpu", "torch-grouped", "loop")), records=True)
    assert "ms: recorded once as a CUDA graph and replayed" in describe_layer_case(case).facts
    cells = {row["variant"]: row for row in cells_of(describe_layer_case(case))}
    ours, peer, loop = case["rows"]
    assert cells["some cpu"]["ms"] == f"{ours['ms']:.3f}"
    assert cells["loop"]["ms"] == f"{loop['ms']:.3f}"
    assert cells["loop"]["note"] == "launched from Python, not recorded: it waits for the device on its way"
    (summary,) = cells_of(summarize_layers([case]))
    fastest = min(peer, loop, key=lambda row: row["ms"])
    assert (summary["variant"], summary["the peer"]) == ("some cpu", fastest["name"])
    assert summary["× fastest peer"] == f"{fastest['ms'] / ours['ms']:.2f}"


def test_tables_of_eager_calls_speak_of_no_recording() -> None:
    (case,) = run(list_variants(CPU, False, ("some cpu", "loop")))
    part = describe_layer_case(case)
    assert "CUDA graph" not in part.facts
    assert [column.header for column in part.table.columns][-1] == "error"  # no note


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainability", ["frozen", "full", "lora"])
def test_all_but_the_loop_are_recorded_on_a_gpu(trainability: str) -> None:
    device = torch.device("cuda")
    model = ModelConfig(d_model=64, num_heads=2, d_ffn=128, num_experts=8, top_k=2, trainability=trainability)
    config = RunConfig(name="small", model=model)
    variants = list_variants(device, True)
    (case,) = bench_layer([config], [512], ["balanced"], variants, device, seconds=0.002, records=True)
    rows = {row["name"]: row for row in case["rows"] if row["status"] == "ok"}
    ours = {"some grouped", "some grouped, compiled", "some triton", "some triton, compiled"}
    assert {*ours, "torch-grouped", "torch-grouped, compiled", "loop"} <= set(rows)
    for name, row in rows.items():
        assert row["recorded"] == (name != "loop"), (name, row["not_recorded"])
        assert row["ms"] > 0
    torch.cuda.empty_cache()  # refused where a recording was left open


@pytest.mark.slow
def test_compiled_variants_report_their_compilation_apart() -> None:
    cases = run(list_variants(CPU, True, ("dense", "torch-grouped")), routings=["balanced", "skewed"])
    first, second = ({row["name"]: row for row in case["rows"]}["dense, compiled"] for case in cases)
    assert first["status"] == second["status"] == "ok"
    assert first["compile_seconds"] > 10 * first["ms"] / 1e3
    assert second["compile_seconds"] is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainability", ["frozen", "full", "lora"])
def test_the_torch_idiom_is_one_graph(trainability: str) -> None:
    model = ModelConfig(**SIZES, trainability=trainability)
    weights = layer.make_weights(model, CPU, torch.bfloat16)
    problem = layer.make_problem(model, weights.up, 64, "balanced", 8)
    mix = make_torch_grouped(weights, 2)
    compiled = torch.compile(mix, dynamic=False, backend="aot_eager", fullgraph=True)
    expected, found = (call(problem.x, problem.experts, problem.gates) for call in (mix, compiled))
    assert torch.equal(found, expected)

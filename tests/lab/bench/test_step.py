"""The step benchmark: the training step itself, timed, with an uneven load where asked, and the longest kernels."""

import json
from typing import Any

import pytest
import torch

from some_moe.config import ConfigError, RunConfig
from some_moe.lab.bench.step import TOTAL_STEPS, bench_step, make_batch, make_step, prepare_config, profile_steps
from some_moe.lab.registry.presets import find_preset
from some_moe.training.machine import choose_machine


def tiny(**changes: Any) -> RunConfig:
    options: dict[str, Any] = {"batch": 2, "seq_len": 32, "kernel": "auto", "compile_model": False, "device": "cpu"}
    return prepare_config(find_preset("smoke"), **options | changes)


def test_a_record_says_what_was_measured() -> None:
    record = bench_step(tiny(num_experts=4), steps=2, profile=True)
    assert record["failure"] is None
    assert record["repeats"] == 2
    assert record["tokens_per_second"] == pytest.approx(64 / record["ms"] * 1e3)
    assert record["tflops"] == pytest.approx(record["tokens_per_second"] * record["flops_per_token"] / 1e12)
    assert (record["mfu"], record["peak_bytes"], record["compile_seconds"]) == (None, None, None)
    assert record["model"]["num_experts"] == 4
    assert record["model"]["expert_dtype"] == "float32"
    kernels = record["profile"]["kernels"]
    assert "aten::mm" in {kernel["kernel"] for kernel in kernels}
    assert 0.5 < sum(kernel["share"] for kernel in kernels) <= 1 + 1e-9
    assert len(kernels) == 20
    assert json.loads(json.dumps(record)) == record


def test_a_skewed_load_reaches_its_gini() -> None:
    config = tiny(seq_len=128, batch=4)
    even, skewed = (bench_step(config, steps=1, routing=routing) for routing in ("natural", "skewed"))
    assert max(even["gini"]) < 0.4
    assert sum(skewed["gini"]) / 2 == pytest.approx(0.72, abs=0.05)  # 0.96 of what 2 of 8 experts allow


def test_a_balanced_preset_refuses_to_be_skewed() -> None:
    config = prepare_config(find_preset("demo"), batch=1, seq_len=16, kernel="auto", compile_model=False, device="cpu")
    with pytest.raises(ConfigError, match=r"gravity.balance_rate 0.01 work against each other"):
        bench_step(config, steps=1, routing="skewed")


def test_steps_follow_one_another_and_learn() -> None:
    config = tiny()
    machine = choose_machine(config.train)
    stepper = machine.make_stepper(machine.make_model(config), config, TOTAL_STEPS)
    step = make_step(stepper)
    batch = make_batch(config, machine)
    assert batch.real.all()
    assert batch.inputs.shape == (2, 32)
    rates = []
    for _ in range(4):
        step(batch)
        rates.append(stepper.optimizer.param_groups[0]["lr"])
    # The rate is warming up, so the number of the step goes up with every call.
    assert rates[3] > rates[2] > rates[0]


def test_a_profile_lists_the_longest_first_a_step() -> None:
    x = torch.randn(256, 256)
    found = profile_steps(lambda: (x @ x @ x).relu(), torch.device("cpu"))
    kernels = {kernel["kernel"]: kernel for kernel in found["kernels"]}
    assert (kernels["aten::mm"]["calls"], kernels["aten::clamp_min"]["calls"]) == (2, 1)
    times = [kernel["ms"] for kernel in found["kernels"]]
    assert times == sorted(times, reverse=True)
    assert sum(times) == pytest.approx(found["ms"])
    assert sum(kernel["share"] for kernel in found["kernels"]) == pytest.approx(1)


@pytest.mark.gpu
def test_a_profile_on_a_gpu_is_of_kernels_replayed_ones_too() -> None:
    device = torch.device("cuda")
    x = torch.randn(256, 256, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.relu()

    def step() -> None:
        with torch.profiler.record_function("a range"):
            graph.replay()

    found = profile_steps(step, device)
    assert [kernel["calls"] for kernel in found["kernels"]] == [1]
    assert found["ms"] > 0

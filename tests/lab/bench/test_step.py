"""The step benchmark: the training step itself, timed, with an uneven load where asked, and a profile that adds up."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Kernel

from some_moe.config import ConfigError, ModelConfig, RunConfig
from some_moe.lab.bench.profile import Work, classify, device_work, summarize
from some_moe.lab.bench.step import TOTAL_STEPS, bench_step, make_batch, make_step, prepare_config
from some_moe.lab.registry.presets import find_preset
from some_moe.training.machine import choose_machine

MODEL = ModelConfig(d_model=384, num_layers=8, num_experts=64, d_ffn=1024, vocab_size=8192)


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
    classes = {entry["class"]: entry["share"] for entry in record["profile"]["classes"]}
    assert sum(classes.values()) == pytest.approx(1)
    assert {"experts", "attention", "optimizer", "gravity and routing", "cross-entropy and head"} <= set(classes)
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


@pytest.mark.parametrize(
    ("kernel", "operation", "shapes", "expected"),
    [
        ("up_gelu_kernel", "some_moe::frozen_experts", (), "experts"),
        ("void cutlass::device_kernel<GroupProblemShape>", "aten::_grouped_mm", (), "experts"),
        ("DeviceRadixSortOnesweepKernel", "aten::sort some_moe::frozen_experts", (), "experts"),
        ("pytorch_flash::flash_fwd_kernel", "aten::_scaled_dot_product_flash_attention", (), "attention"),
        ("multi_tensor_apply_kernel", "aten::_fused_adamw_ Optimizer.step#AdamW.step", (), "optimizer"),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", "", (), "cross-entropy and head"),
        ("nvjet_tst_128x256", "aten::mm", ((24576, 384), (384, 8192)), "cross-entropy and head"),
        ("nvjet_tst_128x256", "aten::mm", ((24576, 384), (384, 384)), "other matmuls"),
        ("sgemm", "aten::mm", ((24576, 384), (384, 64)), "gravity and routing"),
        ("gatherTopK", "aten::topk", (), "gravity and routing"),
        ("elementwise_kernel", "aten::add gravity", (), "gravity and routing"),
        ("DeviceRadixSort", "aten::embedding_dense_backward", (), "elementwise and other"),
        ("embedding_segment_sum_kernel", "", (), "elementwise and other"),
        ("triton_poi_fused_add_7", "", (), "elementwise and other"),
        ("multi_tensor_apply_kernel", "aten::_foreach_copy_ CopyTensorsBackward", (), "elementwise and other"),
        ("up_gelu_kernel", "some_moe::gemm_gelu", (), "other matmuls"),
        ("grouped_gemm_kernel", "", (), "experts"),
        ("clip_coef_kernel", "", (), "optimizer"),
        ("nats_kernel", "some_moe::token_nats", (), "cross-entropy and head"),
        ("cross_entropy_kernel", "", (), "cross-entropy and head"),
        ("column_sum_kernel", "some_moe::cross_entropy_and_grad", (), "cross-entropy and head"),
        ("routing_stats_partial_kernel", "some_moe::sum_by_expert", (), "gravity and routing"),
        ("gather_samples_kernel", "some_moe::sum_layers", (), "gravity and routing"),
    ],
)
def test_kernels_are_sorted_into_classes(kernel: str, operation: str, shapes: Any, expected: str) -> None:
    assert classify(Work(kernel, operation, shapes, 1.0), MODEL, num_tokens=24576) == expected


def test_tokens_as_many_as_the_vocabulary_are_not_taken_for_the_head() -> None:
    work = Work("gemm", "aten::mm", ((8192, 384), (384, 384)), 1.0)
    assert classify(work, MODEL, num_tokens=8192) == "other matmuls"


def test_a_profile_adds_up_by_class_and_kernel() -> None:
    work = [Work("mm_a", "aten::mm", (), 3000.0), Work("mm_a", "aten::mm", (), 1000.0), Work("relu", "", (), 4000.0, 2)]
    found = summarize(work, 2, MODEL, num_tokens=1)
    assert found["ms"] == 4.0
    assert {entry["class"]: entry["ms"] for entry in found["classes"]} == {
        "other matmuls": 2.0, "elementwise and other": 2.0,
    }  # fmt: skip
    assert [(entry["kernel"], entry["calls"], entry["ms"]) for entry in found["kernels"]] == [
        ("mm_a", 1.0, 2.0), ("relu", 1.0, 2.0),
    ]  # fmt: skip


def test_device_work_counts_each_kernel_once_and_no_annotation() -> None:
    def event(name: str, us: float = 0.0, *, on_gpu: bool = True, **more: Any) -> Any:
        given = {"cpu_parent": None, "input_shapes": [], "kernels": [], "is_user_annotation": False} | more
        device = DeviceType.CUDA if on_gpu else DeviceType.CPU
        return SimpleNamespace(
            name=name, device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: us), **given
        )

    scope = event("Optimizer.step#AdamW.step", on_gpu=False)
    events = [
        scope,
        event("aten::mm", on_gpu=False, kernels=[Kernel("gemm", 0, 5.0)], input_shapes=[[4, 2], [2, 3], []]),
        event("aten::_fused_adamw_", on_gpu=False, kernels=[Kernel("adam", 0, 2.0)], cpu_parent=scope),
        event("gemm", 5.0),
        event("adam", 2.0),
        event("replayed", 3.0),  # launched by a graph: no operation owns it
        event("replayed", 4.0),
        event("Optimizer.step#AdamW.step", 2.0, is_user_annotation=True),
    ]
    assert list(device_work(events)) == [
        Work("gemm", "aten::mm", ((4, 2), (2, 3), ()), 5.0),
        Work("adam", "aten::_fused_adamw_ Optimizer.step#AdamW.step", (), 2.0),
        Work("replayed", "", (), 7.0, 2),
    ]

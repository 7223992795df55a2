"""The kernels of one recorded training step on an H200, and the losses on the way to it, kept in h200.json.

python tests/golden/h200.py [A1 A4 …]    prints {shape: its kernels and losses} as JSON; one process a shape is fair
python tests/golden/h200.py --check      says where this code launches other kernels than h200.json, exit code 1

What must be equal where: on an H200 with the torch of h200.json the recorded step launches the same kernels or fewer,
and the losses agree to LOOSE (bf16; atomics nowhere, but compilers may order sums anew).
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from some_moe.lab.bench.step import TOTAL_STEPS, make_batch, make_step, prepare_config
from some_moe.lab.registry.presets import find_preset
from some_moe.training.machine import choose_machine

HERE = Path(__file__).parent
SHAPES = ("A1", "A4", "A6", "B3")
STEPS = 12
LOOSE = 2e-2
RENAMED = {  # kernels as h200.json has them, and as they are called now
    "adam_kernel": "adamw_kernel",
    "clip_kernel": "clip_coef_kernel",
    "count_kernel": "permute_count_kernel",
    "down_backward_kernel": "down_dgelu_kernel",
    "embedding_join_kernel": "embedding_reduce_kernel",
    "embedding_order_kernel": "embedding_sort_kernel",
    "embedding_sum_kernel": "embedding_segment_sum_kernel",
    "fill_kernel": "fill_experts_kernel",
    "finish_kernel": "routing_stats_finalize_kernel",
    "mark_kernel": "routing_stats_multi_hot_kernel",
    "merge_kernel": "topk_keys_merge_kernel",
    "mix_kernel": "combine_kernel",
    "nats_loss_kernel": "cross_entropy_kernel",
    "nearest_backward_kernel": "topk_keys_backward_kernel",
    "nearest_kernel": "topk_keys_kernel",
    "norm_backward_kernel": "layer_norm_backward_kernel",
    "norm_kernel": "layer_norm_kernel",
    "partial_sums_kernel": "routing_stats_partial_kernel",
    "place_kernel": "permute_index_kernel",
    "plain_kernel": "grouped_gemm_kernel",
    "rotate_back_kernel": "rotary_backward_kernel",
    "rotate_kernel": "rotary_kernel",
    "samples_kernel": "gather_samples_kernel",
    "scale_nats_kernel": "cross_entropy_scale_kernel",
    "scan_kernel": "permute_scan_kernel",
    "split_kernel": "split_bf16_kernel",
    "spread_backward_kernel": "combine_backward_kernel",
    "spread_kernel": "dispatch_kernel",
    "squares_kernel": "grad_norm_kernel",
    "sum_rows_kernel": "column_sum_kernel",
    "total_sums_kernel": "routing_stats_reduce_kernel",
    "up_kernel": "up_gelu_kernel",
}


def record_shape(name: str) -> dict[str, Any]:
    """Twelve steps on random tokens, as `some bench step --shape NAME` takes them, and what the last one launches."""
    config = prepare_config(find_preset(name), batch=32, seq_len=768, kernel="auto", compile_model=None, device="cuda")
    machine = choose_machine(config.train)
    batch, model = make_batch(config, machine), machine.make_model(config)
    step = make_step(machine.make_stepper(model, config, TOTAL_STEPS))
    losses = [float(step(batch).loss) for _ in range(STEPS)]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiler:
        step(batch)
        torch.cuda.synchronize()
    on_device = [event for event in profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = Counter(event.name for event in on_device)
    return {"losses": losses, "num_kernels": sum(kernels.values()), "kernels": dict(sorted(kernels.items()))}


def describe_machine() -> dict[str, str]:
    return {"torch": torch.__version__, "device": torch.cuda.get_device_name()}


def translate(kernels: dict[str, int]) -> Counter[str]:
    """Launches by the kernels' present names."""
    launches: Counter[str] = Counter()
    for name, number in kernels.items():
        launches[RENAMED.get(name, name)] += number
    return launches


def check(found: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """What is worse than the golden: more launches, or other losses."""
    faults = []
    for name, shape in found.items():
        golden = kept[name]
        if shape["num_kernels"] > golden["num_kernels"]:
            more = Counter(shape["kernels"]) - translate(golden["kernels"])
            faults.append(f"{name}: {shape['num_kernels']} launches, {golden['num_kernels']} before; new: {dict(more)}")
        gap = max(abs(a - b) for a, b in zip(shape["losses"], golden["losses"], strict=True))
        if gap > LOOSE:
            faults.append(f"{name}: losses differ by {gap:.4f}")
    return faults


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if not word.startswith("-")] or list(SHAPES)
    shapes = {name: record_shape(name) for name in names}
    if "--check" in sys.argv:
        faults = check(shapes, json.loads((HERE / "h200.json").read_text())["shapes"])
        print("\n".join(faults) or "the same kernels or fewer, the same losses")
        sys.exit(bool(faults))
    print(json.dumps({"machine": describe_machine(), "shapes": shapes}, indent=1))

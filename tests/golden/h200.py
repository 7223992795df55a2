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


def record_shape(name: str) -> dict[str, Any]:
    """Twelve steps on random tokens, as `some bench step --shape NAME` takes them, and what the last one launches."""
    config = prepare_config(find_preset(name), batch=32, seq_len=768, kernel="auto", compile_model=None, device="cuda")
    machine = choose_machine(config.train)
    batch, model = make_batch(config, machine), machine.make_model(config)
    step = make_step(machine.make_stepper(model, config, TOTAL_STEPS))
    losses = [float(step(batch).loss) for _ in range(STEPS)]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step(batch)
        torch.cuda.synchronize()
    on_device = [event for event in profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = Counter(event.name for event in on_device)
    return {"losses": losses, "num_kernels": sum(kernels.values()), "kernels": dict(sorted(kernels.items()))}


def describe_machine() -> dict[str, str]:
    return {"torch": torch.__version__, "device": torch.cuda.get_device_name()}


def check(found: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """What is worse than the golden: more launches, or other losses."""
    faults = []
    for name, shape in found.items():
        golden = kept[name]
        if shape["num_kernels"] > golden["num_kernels"]:
            more = Counter(shape["kernels"]) - Counter(golden["kernels"])
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

"""What a run will cost, before it starts and without a step of it: parameters, memory, and roughly the time.

Writes nothing, and imports torch for a GPU alone, so that it answers at once.
"""

import os
import platform
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from some_moe.config import RunConfig
from some_moe.config.parameters import count_parameters
from some_moe.lab.bench.shapes import PEAK_FLOPS, step_flops_per_token
from some_moe.memory import available_bytes, disk_bytes, format_bytes, free_disk, needed_bytes

MEASURED_SECONDS = 0.2
PRODUCT_SIZE = 384  # of the matrices that are multiplied to learn how fast this machine is
# A step beside its matrix products, as it was on two cores: norms, sorting and softmaxes; then calls, a layer.
SLOWER, LAYER_SECONDS = 1.3, 0.01
GPU_SHARE = 0.3  # of a GPU's peak in a whole step: 0.30 to 0.38 in benchmarks/RESULTS.md


@dataclass(frozen=True)
class Place:
    """Where a run would compute, as far as its cost depends on it."""

    device: str
    description: str
    bf16: bool

    @classmethod
    def find(cls, config: RunConfig) -> "Place":
        """Resolve `auto` and refuse what is not there; where no GPU can be, without torch."""
        name = config.train.device
        if name == "cpu" or (name == "auto" and not may_have_gpu()):
            return cls("cpu", f"{platform.machine()} CPU, {os.cpu_count()} cores", config.train.precision == "bf16")
        from some_moe.training.machine import choose_machine

        machine = choose_machine(config.train)
        return cls(str(machine.device), machine.describe(), machine.bf16)

    def settle(self, config: RunConfig) -> RunConfig:
        """As `training.machine.settle_experts` does."""
        if config.model.expert_dtype != "auto":
            return config
        halves = self.bf16 and config.model.trainability != "full"
        return config.override({"model.expert_dtype": "bfloat16" if halves else "float32"})


def may_have_gpu() -> bool:
    """Whether torch need be asked: on Linux a GPU has a device file."""
    return os.name == "nt" or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")))


def estimate(config: RunConfig, out: str | Path = "runs") -> str:
    """Return what `some train --dry-run` prints: the config as a run in `out` would save it, and its cost."""
    place = Place.find(config)
    config = place.settle(config)
    count, steps = count_parameters(config.model), config.known_steps
    memory, free = needed_bytes(config, training=True), available_bytes(place.device)
    room = "" if free is None else f", of which {format_bytes(free)} are free"
    warning = "" if free is None or memory <= free else "; make the model or the batch smaller, or use a larger machine"
    return (
        config.to_yaml() + "\n"
        f"parameters: {count.trainable:,} trained of {count.total:,} ({count.trainable / count.total:.2%})\n"
        f"memory: about {format_bytes(memory)} on {place.description}{room}{warning}\n"
        f"disk: {describe_disk(config, out)}\n"
        f"steps: {'known once the data is read' if steps is None else format(steps, ',')}\n"
        f"time: {describe_time(config, estimate_step(config, place))}\n"
    )


def describe_disk(config: RunConfig, out: str | Path) -> str:
    (one, needed), free = disk_bytes(config, config.known_steps), free_disk(out)
    kind = {"all": "", "weights": " of weights alone", "best": " of weights alone, kept in memory until the end"}
    warning = "" if needed <= free else "; make room, lower train.keep_last, or set train.checkpoints"
    each = f"{format_bytes(one)} each{kind[config.train.checkpoints]}"
    return f"checkpoints take up to {format_bytes(needed)}, {each}; {format_bytes(free)} are free in {out}{warning}"


def describe_time(config: RunConfig, seconds: float | None) -> str:
    if seconds is None:
        return "not known for this GPU; `some bench step` measures it"
    steps = config.known_steps
    total = "" if steps is None else f", about {describe_seconds(seconds * steps)} for the run, evaluation apart"
    step = f"roughly {describe_seconds(seconds)} for a step of {config.rows_a_step} full rows"
    return f"{step}{total}; it may be half or twice as much"


def estimate_job(config: RunConfig) -> dict[str, int | float | None]:
    """The same of one job of a queue, as numbers."""
    place = Place.find(config)
    config = place.settle(config)
    step, steps = estimate_step(config, place), config.known_steps
    return {
        "trainable_parameters": count_parameters(config.model).trainable,
        "total_parameters": count_parameters(config.model).total,
        "memory_bytes": needed_bytes(config, training=True),
        "free_bytes": available_bytes(place.device),
        "disk_bytes": disk_bytes(config, steps)[1],
        "estimated_seconds": None if steps is None or step is None else steps * step,
    }


def count_step_flops(config: RunConfig) -> int:
    """Of one step of full rows."""
    flops = config.rows_a_step * config.data.seq_len * step_flops_per_token(config.model, config.data.seq_len)
    return flops * 4 // 3 if config.train.checkpoint_activations else flops


def estimate_step(config: RunConfig, place: Place) -> float | None:
    """Seconds of one step, roughly: its products at this machine's speed, and what stands beside them."""
    flops = count_step_flops(config)
    if place.device == "cpu":
        return SLOWER * flops / measure_flops() + LAYER_SECONDS * config.model.num_layers
    peak = PEAK_FLOPS.get(place.description)
    return None if peak is None else flops / (GPU_SHARE * peak) + 1e-3


@cache
def measure_flops() -> float:
    """Operations a second of matrix products on this CPU, as busy as it is now; measured once."""
    import numpy as np

    matrix = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), dtype=np.float32)
    matrix @ matrix
    products, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < MEASURED_SECONDS:
        matrix @ matrix
        products += 1
    return 2 * PRODUCT_SIZE**3 * products / passed


def describe_seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 172_800 else f"{seconds / 86_400:,.0f} days"

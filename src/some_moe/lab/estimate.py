"""What a run will cost, before it starts: parameters, memory, and time by timing a step. Writes nothing."""

import time

import torch

from some_moe.config import RunConfig
from some_moe.config.parameters import count_parameters
from some_moe.data.batches import Batch
from some_moe.training.machine import Machine, choose_machine

GIB = 1 << 30
TIMED_STEPS = 2


def estimate(config: RunConfig) -> str:
    """Return the lines that `some train --dry-run` prints below the config, which `settle_experts` has settled."""
    machine = choose_machine(config.train)
    count = count_parameters(config.model)
    memory = estimate_memory(config, count.trainable, count.total, machine)
    steps, room = config.known_steps, available_memory(machine)
    if memory > 0.8 * room:
        pace = f"not measured, for only {room / GIB:.1f} GiB are there; make the model or the batch smaller"
    else:
        seconds = time_step(config, machine)
        total = "" if steps is None else f", about {describe_seconds(seconds * steps)} for the run, evaluation apart"
        pace = f"{seconds:.3f} s for a full step of {config.rows_a_step} rows{total}"
    return (
        f"parameters: {count.trainable:,} trained of {count.total:,} ({count.trainable / count.total:.2%})\n"
        f"memory: about {memory / GIB:.1f} GiB on {machine.describe()}\n"
        f"steps: {'known once the data is read' if steps is None else format(steps, ',')}\n"
        f"time: {pace}\n"
    )


def estimate_memory(config: RunConfig, trainable: int, total: int, machine: Machine) -> float:
    """Bytes for weights, gradients, optimizer and the activations of one batch."""
    model = config.model
    tokens = config.data.batch_size * config.data.seq_len
    width = 2 if machine.bf16 else 4
    slots = model.top_k * (2 * model.d_ffn + 2 * model.d_model) if model.ffn == "some" else 2 * model.dense_width
    per_layer = 14 * model.d_model + slots + (2 * model.num_experts if model.ffn == "some" else 0)
    layers = 1 if config.train.checkpoint_activations else model.num_layers
    activations = tokens * (layers * per_layer * width + model.vocab_size * (4 + 2 * width))
    frozen = (total - trainable) * (2 if model.expert_dtype == "bfloat16" else 4)
    return 16.0 * trainable + frozen + activations


def available_memory(machine: Machine) -> float:
    if machine.device.type == "cuda":
        return float(torch.cuda.mem_get_info(machine.device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return float(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 8.0 * GIB


def time_step(config: RunConfig, machine: Machine) -> float:
    """Seconds for one full step on random tokens; the first step, which warms up, is not counted."""
    stepper = machine.make_stepper(machine.make_model(config), config, total_steps=1000)
    shape = (config.rows_a_step, config.data.seq_len)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = Batch(inputs=tokens, targets=tokens, real=torch.ones(shape, dtype=torch.bool), rows=torch.arange(shape[0]))
    for step in range(1 + TIMED_STEPS):
        if step == 1:
            started = time.perf_counter()
        stepper.run_eager(batch, step)
        if machine.device.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - started) / TIMED_STEPS


def describe_seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

"""A whole training step on full rows of random tokens: forward, backward, clip, optimizer, gravity."""

import math
import os
import statistics
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity

from some_moe.config import ConfigError, RunConfig
from some_moe.config.parameters import count_parameters
from some_moe.data.batches import Batch
from some_moe.lab.bench.problem import halve, log_popularity, reachable_gini
from some_moe.lab.bench.shapes import PEAK_FLOPS, step_flops_per_token
from some_moe.lab.bench.timing import first_line, mark, milliseconds, summarize_times, wait_for
from some_moe.memory import refuse_too_large
from some_moe.metrics.usage import gini
from some_moe.model.gravity import set_bias
from some_moe.model.transformer import SomeLM
from some_moe.training.machine import Machine, choose_machine, settle_experts
from some_moe.training.step import Stepper, StepResult

TOTAL_STEPS = 10_000  # of the imagined run, for the learning rate's schedule
WARMUP_STEPS = 5  # until a kind of step is compiled and captured
PROFILED_STEPS = 3
LONGEST_KERNELS = 20


def prepare_config(
    config: RunConfig,
    *,
    batch: int,
    seq_len: int,
    kernel: str,
    compile_model: bool | None,
    device: str,
    num_experts: int | None = None,
) -> RunConfig:
    """The same model and optimizer on full rows: nothing padded, one batch a step, k experts from the start."""
    changes = {
        "data.batch_size": batch,
        "data.seq_len": seq_len,
        "data.batching": "padded",
        "model.num_experts": config.model.num_experts if num_experts is None else num_experts,
        "train.kernel": kernel,
        "train.compile": compile_model,
        "train.device": device,
        "train.global_batch_tokens": None,
        "train.top_k_warmup": 0.0,
        "train.top_k_ramp": 0.0,
    }
    return settle_experts(config.override(changes))


def make_batch(config: RunConfig, machine: Machine) -> Batch:
    """Rows of random tokens, all real, on the host: bringing them to the device is part of a step."""
    shape = (config.data.batch_size, config.data.seq_len)
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.model.vocab_size, (shape[0], shape[1] + 1), generator=source)
    batch = Batch(
        inputs=tokens[:, :-1].contiguous(),
        targets=tokens[:, 1:].contiguous(),
        real=torch.ones(shape, dtype=torch.bool),
        rows=torch.arange(shape[0]),
    )
    return batch.pin() if machine.device.type == "cuda" else batch


def make_step(stepper: Stepper) -> Callable[[Batch], StepResult]:
    """The training loop's own step, as a function of the batch alone."""
    numbers = count()
    return lambda batch: stepper(batch, next(numbers))


def bench_step(config: RunConfig, *, steps: int, routing: str = "natural", profile: bool = False) -> dict[str, Any]:
    """Measure one config and return a plain record, ready for JSON."""
    machine, size = choose_machine(config.train), count_parameters(config.model)
    if machine.device.type == "cpu":  # a GPU says so itself; here the system would end the process
        refuse_too_large(config, machine.device, training=True)
    record: dict[str, Any] = {
        "name": config.name,
        "model": config.model.model_dump(mode="json"),
        "batch_size": config.data.batch_size,
        "seq_len": config.data.seq_len,
        "kernel": config.train.kernel,
        "compiled": bool(config.train.compile),
        "precision": "bf16" if machine.bf16 else "fp32",
        "routing": routing,
        "trainable_parameters": size.trainable,
        "total_parameters": size.total,
        "flops_per_token": step_flops_per_token(config.model, config.data.seq_len),
        "failure": None,
    }
    try:
        return record | measure_step(config, machine, record["flops_per_token"], steps, routing, profile)
    except torch.OutOfMemoryError as error:
        return record | {"failure": f"out of memory: {first_line(error)}"}


def measure_step(
    config: RunConfig, machine: Machine, flops_per_token: int, steps: int, routing: str, profile: bool
) -> dict[str, Any]:
    """Compile, warm up, time `steps` steps, and profile a few more where asked."""
    device = machine.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        # From here on: a replayed step allocates nothing, so its memory shows only while it is recorded.
        torch.cuda.reset_peak_memory_stats(device)
    batch, model = make_batch(config, machine), machine.make_model(config)
    if routing == "skewed":
        skew_selection(model, batch, config, machine)
    stepper = machine.make_stepper(model, config, TOTAL_STEPS)
    step = partial(make_step(stepper), batch)
    # Until all is compiled and recorded that ever will be: steps with and without gravity are two kinds.
    time_steps(step, WARMUP_STEPS * config.gravity.every if machine.fast else 2, device)
    times, result = time_steps(step, steps, device)
    timing = summarize_times(times)
    tokens_per_second = batch.inputs.numel() / (timing["ms"] / 1e3)
    flops, peak = tokens_per_second * flops_per_token, PEAK_FLOPS.get(machine.describe())
    return {
        **timing,
        "tokens_per_second": tokens_per_second,
        "tflops": flops / 1e12,
        "mfu": peak and flops / peak,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "compile_seconds": stepper.compile_seconds if stepper.compiled else None,
        "loss": float(result.loss),
        "gini": [gini(routing.counts) for routing in result.routings],
        "profile": profile_steps(step, device) if profile else None,
    }


def profile_steps(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Milliseconds a step of the longest kernels; on a CPU of operations, without those that they call."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it announces its start and stop
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        wait_for(device)
    spent = []
    for event in profiler.key_averages():
        is_range = event.is_user_annotation or event.key.startswith("## Call")
        if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU) and not is_range:
            us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            spent.append((us / 1e3 / PROFILED_STEPS, event.count / PROFILED_STEPS, event.key))
    total = sum(ms for ms, _, _ in spent)
    longest = sorted(spent, reverse=True)[:LONGEST_KERNELS]
    kernels = [{"kernel": name, "calls": calls, "ms": ms, "share": ms / (total or 1.0)} for ms, calls, name in longest]
    return {"steps": PROFILED_STEPS, "ms": total, "kernels": kernels}


def time_steps(step: Callable[[], StepResult], steps: int, device: torch.device) -> tuple[list[float], StepResult]:
    """Milliseconds of each of `steps` steps, one after the other without waiting, and the last result."""
    wait_for(device)
    marks = [mark(device)]
    for _ in range(steps):
        result = step()
        marks.append(mark(device))
    wait_for(device)
    return [milliseconds(start, end) for start, end in pairwise(marks)], result


@torch.no_grad()
def skew_selection(model: SomeLM, batch: Batch, config: RunConfig, machine: Machine) -> None:
    """Make the load uneven, as a collapsing run's is: a power law in the selection bias, scaled to the wanted gini.

    The bias chooses experts and never weighs them, so the work is that of a real step with such a load.
    """
    states = [layer.state for layer in model.layers if layer.state is not None]
    if not states:
        raise ConfigError("--routing skewed needs a model with keys to choose by; leave it out for this one")
    if config.gravity.balance_rate:
        raise ConfigError(
            f"--routing skewed and gravity.balance_rate {config.gravity.balance_rate} work against each other; "
            "choose a shape without balancing"
        )
    target = reachable_gini(config.model.num_experts, config.model.top_k)
    shape = log_popularity(config.model.num_experts, 1.0).to(machine.device)

    def measure(exponent: float) -> float:
        for state in states:
            set_bias(state, exponent * shape)
        routings = model(batch.inputs.to(machine.device)).routings
        return statistics.fmean(gini(routing.counts) for routing in routings)

    # Scores spread by some power of ten that the model alone knows: search the exponent on the logarithmic scale.
    _, high = halve(lambda middle: measure(math.exp(middle)) < target, math.log(1e-4), math.log(1e4), times=14)
    measure(math.exp(high))

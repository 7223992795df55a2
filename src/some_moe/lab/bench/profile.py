"""Where a step's time goes: the profiler's kernels, sorted into a few classes with names that mean something."""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from some_moe.config import ModelConfig
from some_moe.lab.bench.timing import wait_for

NUM_TOP = 20
OTHER = "elementwise and other"
# The first pattern found in "operation kernel" names the class. Order matters: the particular before the general.
CLASSES = (
    (OTHER, r"embedding|GatherRows|CopyTensors"),
    ("other matmuls", r"gemm_d?gelu"),  # the query network's, by kernels that the experts have too
    ("experts", r"frozen_?experts|grouped_?mm|up_gelu_kernel|down_dgelu_kernel|grouped_gemm_kernel|dispatch_kernel"
     r"|combine_kernel|combine_backward_kernel|mix_experts|FrozenExperts|tile_kernel|group_?gemm|GroupProblem"),
    ("optimizer", r"[Oo]ptimizer|adam|grad_norm_kernel|clip_coef_kernel|multi_tensor_apply|foreach|clip_grad"),
    ("attention", r"flash|fmha|sdpa|attention|rotate|rotary"),
    ("cross-entropy and head", r"log_softmax|nll_loss|cross_entropy|logsumexp|nats"),
    ("gravity and routing", r"gravity|sum_by_expert|sum_layers|routing_stats|samples|smallest|topk"
     r"|top_k|gatherTop|sort|scatter|histogram|histc|bincount|searchsorted|radix"),
    ("other matmuls", r"\bmm\b|addmm|\bbmm\b|matmul|linear|gemm|cutlass|nvjet|splitK|wgmma|einsum|mkldnn"),
)  # fmt: skip
MATMULS = "other matmuls"
HEAD = "cross-entropy and head"
ROUTING = "gravity and routing"


@dataclass(frozen=True)
class Work:
    """One piece of device work: its kernel, the operation that launched it, and that operation's input shapes."""

    kernel: str
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    us: float
    calls: int = 1


def classify(work: Work, model: ModelConfig, num_tokens: int) -> str:
    """The class of one piece of work. Products are told apart by shape: the head's have V, the key scores' E."""
    text = f"{work.operation} {work.kernel}"
    found = next((name for name, pattern in CLASSES if re.search(pattern, text)), OTHER)
    if found == MATMULS:
        sizes = {size for shape in work.shapes for size in shape}
        sizes -= {num_tokens, model.d_model, model.query_width, model.d_ffn}
        if model.vocab_size in sizes:
            return HEAD
        if model.num_experts in sizes:
            return ROUTING
    return found


def profile_steps(
    step: Callable[[], object], steps: int, model: ModelConfig, num_tokens: int, device: torch.device
) -> dict[str, Any]:
    """Run some steps under the profiler and return milliseconds a step, by class and by kernel."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it announces its start and stop
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(steps):
            step()
        wait_for(device)
    events = profiler.events() or []
    work = list(device_work(events) if device.type == "cuda" else host_work(events))
    return summarize(work, steps, model, num_tokens)


def summarize(work: Iterable[Work], steps: int, model: ModelConfig, num_tokens: int) -> dict[str, Any]:
    """Add work up by class and by (class, kernel), in milliseconds a step."""
    classes: dict[str, float] = defaultdict(float)
    kernels: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for piece in work:
        name = classify(piece, model, num_tokens)
        classes[name] += piece.us
        kernels[name, piece.kernel] += piece.us
        calls[name, piece.kernel] += piece.calls
    total = sum(classes.values()) or 1.0

    def spend(us: float) -> dict[str, float]:
        return {"ms": us / 1e3 / steps, "share": us / total}

    longest = sorted(kernels, key=lambda place: -kernels[place])[:NUM_TOP]
    return {
        "steps": steps,
        "ms": total / 1e3 / steps,
        "classes": [{"class": name, **spend(us)} for name, us in sorted(classes.items(), key=lambda item: -item[1])],
        "kernels": [
            {"class": place[0], "kernel": place[1], "calls": calls[place] / steps, **spend(kernels[place])}
            for place in longest
        ],
    }


def host_work(events: Iterable[FunctionEvent]) -> Iterable[Work]:
    """On a CPU an operation is its own kernel; time spent in the operations it calls is theirs."""
    for event in events:
        if event.self_cpu_time_total > 0:
            yield Work(event.name, _scope(event), _shapes(event), event.self_cpu_time_total)


def device_work(events: Iterable[FunctionEvent]) -> Iterable[Work]:
    """Kernels with the operation that launched them; what no operation owns (graph replays) by name alone."""
    events = list(events)
    unclaimed: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        is_range = getattr(event, "is_user_annotation", False) or event.name.startswith(("ProfilerStep", "## Call"))
        if event.device_type == DeviceType.CUDA and not is_range:
            unclaimed[event.name][0] += event.time_range.elapsed_us()  # type: ignore[no-untyped-call]
            unclaimed[event.name][1] += 1
    for event in events:
        if event.device_type == DeviceType.CPU:
            for kernel in event.kernels:
                yield Work(kernel.name, _scope(event), _shapes(event), kernel.duration)
                unclaimed[kernel.name][0] -= kernel.duration
                unclaimed[kernel.name][1] -= 1
    for name, (us, calls) in unclaimed.items():
        if calls > 0 and us > 0:
            yield Work(name, "", (), us, round(calls))


def _scope(event: FunctionEvent) -> str:
    """The operation and the ones around it, innermost first."""
    names = []
    here: FunctionEvent | None = event
    while here is not None:
        names.append(here.name)
        here = here.cpu_parent
    return " ".join(names)


def _shapes(event: FunctionEvent) -> tuple[tuple[int, ...], ...]:
    shapes: Any = event.input_shapes or ()
    return tuple(tuple(shape) for shape in shapes if isinstance(shape, list | tuple))

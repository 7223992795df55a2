"""One layer's experts, every variant in the same run: right first, then timed in turns.

`bench_layer` yields one plain record a case (shape × tokens × routing), ready for JSON, as soon as it is measured.
"""

import gc
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from some_moe.config import ConfigError
from some_moe.experts import ExpertWeights
from some_moe.experts.grouped import ALIGNMENT, round_up
from some_moe.lab.bench.checks import Judge
from some_moe.lab.bench.problem import Problem, make_problem, make_weights, reachable_gini, trained_tensors
from some_moe.lab.bench.recording import UnrecordableError, first_line, record
from some_moe.lab.bench.shapes import Chip, LayerShape, find_chip, layer_bytes, layer_flops
from some_moe.lab.bench.timing import Clock, Task, Timing, time_in_turns, wait_for
from some_moe.lab.bench.variants import Mix, UnavailableError, Variant
from some_moe.metrics.usage import count_selections, summarize_usage
from some_moe.training.environment import describe_device


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What one layer benchmark covers."""

    shapes: Sequence[LayerShape]
    tokens: Sequence[int]
    routings: Sequence[str] = ("balanced", "skewed")
    which: str = "both"  # the pass: forward, backward, or both in one
    trainability: str = "frozen"
    lora_rank: int = 8
    launch: str = "eager"  # eager: from Python; recorded: replayed, on a GPU, where that is possible; or both
    seconds: float = 1.0  # of timing for each variant, launch and case
    seed: int = 0

    def __post_init__(self) -> None:
        for tokens in self.tokens:
            if tokens % self.load_multiple:
                raise ConfigError(
                    f"--tokens {tokens} with --trainability {self.trainability} is not a multiple of "
                    f"{self.load_multiple}, which the peers' weight gradients need; use {round_up(tokens)}"
                )

    @property
    def load_multiple(self) -> int:
        """What every expert's load is a multiple of: the peers can train no others on a GPU."""
        return 1 if self.trainability == "frozen" else ALIGNMENT


def compute_dtype(device: torch.device) -> torch.dtype:
    """bf16 is what a GPU is fast in; fp32 is what a CPU is fast in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def bench_layer(settings: LayerSettings, variants: Sequence[Variant], device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure every case; a shape that does not fit the memory is a record that says so."""
    clock, dtype = Clock(device), compute_dtype(device)
    for shape in settings.shapes:
        try:
            weights = make_weights(shape, device, dtype, settings.trainability, lora_rank=settings.lora_rank)
        except RuntimeError as error:
            reason = describe_memory_error(error)
            for tokens, routing in product(settings.tokens, settings.routings):
                yield describe_case(shape, tokens, routing, settings) | {"failure": reason, "rows": []}
            continue
        for tokens in settings.tokens:
            # Compiled code is of one shape: forget the last one's, and compile anew for all routings of this one.
            torch.compiler.reset()
            contenders = [Contender(variant, weights, shape.top_k) for variant in variants]
            for routing in settings.routings:
                yield run_case(shape, tokens, routing, settings, weights, contenders, clock)
            del contenders
            free_memory()
        del weights
        free_memory()


def describe_case(shape: LayerShape, tokens: int, routing: str, settings: LayerSettings) -> dict[str, Any]:
    return {
        "shape": asdict(shape),
        "tokens": tokens,
        "routing": routing,
        "pass": settings.which,
        "trainability": settings.trainability,
        "launch": settings.launch,
        "load_multiple": settings.load_multiple,
        "flops": layer_flops(shape, tokens, settings.which, settings.trainability, settings.lora_rank),
    }


class Contender:
    """A variant in one case after another, until it fails."""

    def __init__(self, variant: Variant, weights: ExpertWeights, top_k: int) -> None:
        self.variant, self.weights = variant, weights
        self.mix: Mix | None = None
        self.compile_seconds: float | None = None
        self.status, self.reason = "ok", ""
        try:
            with quiet_compiler():
                self.mix = variant.build(weights, top_k)
        except UnavailableError as error:
            self.status, self.reason = "unavailable", str(error)

    def make_task(self, problem: Problem, which: str) -> Task:
        """What is timed: a pass that returns its output, and the gradients by name, of which the forward has none."""
        mix, wanted = self.mix, {"x": problem.x}
        assert mix is not None
        if self.variant.same_function:
            wanted |= {"gates": problem.gates, **trained_tensors(self.weights)}
        else:  # a dense network: it has no gates, and weights of its own
            assert isinstance(mix, nn.Module)
            wanted |= {name: weight for name, weight in mix.named_parameters() if weight.requires_grad}

        def forward() -> Tensor:
            return mix(problem.x, problem.experts, problem.gates)

        def backward(y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            grads = torch.autograd.grad(y, list(wanted.values()), problem.grad_y)
            return y.detach(), dict(zip(wanted, grads, strict=True))

        if which == "forward":
            return Task(torch.no_grad()(lambda: (forward(), {})))
        if which == "both":
            return Task(lambda: backward(forward()))
        outputs: list[Tensor] = []
        # Taken out, so that no autograd graph outlives its call: recordings would stumble over it.
        return Task(lambda: backward(outputs.pop()), before=lambda: outputs.append(forward()))


def run_case(
    shape: LayerShape,
    tokens: int,
    routing: str,
    settings: LayerSettings,
    weights: ExpertWeights,
    contenders: Sequence[Contender],
    clock: Clock,
) -> dict[str, Any]:
    """Check and time every contender on one problem."""
    case = describe_case(shape, tokens, routing, settings)
    dtype, chip = compute_dtype(clock.device), find_chip(describe_device(clock.device))
    try:
        problem = make_problem(shape, tokens, routing, clock.device, dtype, settings.seed, settings.load_multiple)
        judge = Judge(problem, weights, with_gradients=settings.which != "forward")
    except RuntimeError as error:
        return case | {"failure": describe_memory_error(error), "rows": []}
    rows: dict[str, dict[str, Any]] = {}
    tasks: dict[tuple[str, str], Task] = {}
    for contender in contenders:
        name = contender.variant.name
        row = rows[name] = prepare(contender, problem, judge, settings.which, clock)
        if row["status"] == "ok":
            task = contender.make_task(problem, settings.which)
            replays = None if settings.launch == "eager" else record_variant(row, task, judge, clock)
            if replays is not None:
                tasks[name, "recorded"] = replays
            if replays is None or settings.launch == "both":
                tasks[name, "eager"] = task
    timings: dict[tuple[str, str], Timing] = {}
    try:
        timings = time_in_turns(clock, tasks, settings.seconds)
    except RuntimeError as error:  # should the memory end meanwhile, the rows say so instead of the run dying
        for name, _ in tasks:
            rows[name]["status"], rows[name]["reason"] = describe_failure(error)
    for name, row in rows.items():
        row |= describe_times(timings.get((name, "recorded")), timings.get((name, "eager")), case["flops"], chip)
    compare_with_peers(list(rows.values()))
    usage = summarize_usage(count_selections(problem.experts, shape.num_experts))
    usage["target_gini"] = 0.0 if routing == "balanced" else reachable_gini(shape.num_experts, shape.top_k)
    num_bytes = layer_bytes(
        shape, tokens, settings.which, settings.trainability, int(usage["experts_used"]), dtype.itemsize
    )
    return case | {
        "dtype": str(dtype).removeprefix("torch."),
        "usage": usage,
        "bytes": num_bytes,
        "roofline": roofline(case["flops"], num_bytes, chip),
        "failure": None,
        "rows": list(rows.values()),
    }


def prepare(contender: Contender, problem: Problem, judge: Judge, which: str, clock: Clock) -> dict[str, Any]:
    """Run a contender once, compiling if it must; measure its memory and its errors."""
    variant = contender.variant
    row: dict[str, Any] = {name: getattr(variant, name) for name in ("name", "is_ours", "same_function", "compiled")}
    row |= {"compile_seconds": None, "recorded": False, "not_recorded": "", "errors": {}, "peak_bytes": None}
    if contender.status == "ok":
        try:
            task = contender.make_task(problem, which)
            if variant.compiled and contender.compile_seconds is None:
                with quiet_compiler():
                    row["compile_seconds"] = contender.compile_seconds = clock.seconds(task)
            row["peak_bytes"], (y, grads) = clock.weigh(task)
            if variant.same_function:
                row["errors"] = judge.errors(y, grads)
                if complaint := judge.complain(row["errors"]):
                    # Wrong here need not mean wrong on the next routing, so only this row is marked.
                    return row | {"status": "wrong", "reason": complaint}
        except Exception as error:  # a peer may fail in any way; the others are measured all the same
            contender.status, contender.reason = describe_failure(error)
            free_memory()
    return row | {"status": contender.status, "reason": contender.reason}


def record_variant(row: dict[str, Any], task: Task, judge: Judge, clock: Clock) -> Task | None:
    """The replays of a task, checked like the call itself; or None, and the row says why."""
    try:
        replays, (y, grads) = record(task, clock.device)
    except UnrecordableError as error:
        row["not_recorded"] = str(error)
        return None
    replays.run()
    wait_for(clock.device)
    if row["same_function"] and (complaint := judge.complain(judge.errors(y, grads))):
        row["not_recorded"] = f"its replay is wrong: {complaint}"
        return None
    row["recorded"] = True
    return replays


@contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep the compiler's pages of complaint off the screen: what fails has a row that says so."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# --- numbers ----------------------------------------------------------------------------------------------


def describe_times(recorded: Timing | None, eager: Timing | None, flops: int, chip: Chip | None) -> dict[str, Any]:
    """A row's times: `ms` and its quartiles are the recording's where there is one, and else the eager call's."""
    first = recorded or eager
    if first is None:
        return {}
    return {
        **asdict(first),
        "ms_recorded": recorded and recorded.ms,
        "ms_eager": eager and eager.ms,
        **rate(flops, first.ms, chip),
    }


def rate(flops: int, ms: float, chip: Chip | None) -> dict[str, float | None]:
    per_second = flops / (ms / 1e3)
    return {"tflops": per_second / 1e12, "share_of_peak": None if chip is None else per_second / chip.flops}


def roofline(flops: int, num_bytes: int, chip: Chip | None) -> dict[str, float] | None:
    """The least time a chip could need: for its arithmetic, for its memory, and the larger of the two."""
    if chip is None:
        return None
    flops_ms, bytes_ms = 1e3 * flops / chip.flops, 1e3 * num_bytes / chip.bandwidth
    return {"flops_ms": flops_ms, "bytes_ms": bytes_ms, "ms": max(flops_ms, bytes_ms)}


def compare_with_peers(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each timed row how many times as fast as the fastest peer it is, of calls launched in the same way.

    The first comparison is of recordings, and where there are none, of eager calls.
    """
    timed = [row for row in rows if "ms" in row]
    first = "ms_recorded" if any(row["ms_recorded"] for row in timed) else "ms_eager"
    for speed, ms in (("speed_to_fastest_peer", first), ("eager_speed_to_fastest_peer", "ms_eager")):
        peers = [row[ms] for row in timed if row[ms] and row["same_function"] and not row["is_ours"]]
        for row in timed:
            row[speed] = min(peers) / row[ms] if peers and row[ms] else None


# --- failures ---------------------------------------------------------------------------------------------


def describe_failure(error: Exception) -> tuple[str, str]:
    """A row's status and reason."""
    # A compiler wraps the error that matters into one of its own.
    wrapped = re.search(r"got \w+\([\"'](.+?)[\"']\)", str(error))
    text = wrapped[1][:160] if wrapped else first_line(error)
    return ("out of memory", text) if _is_out_of_memory(error) else ("failed", f"{type(error).__name__}: {text}")


def describe_memory_error(error: RuntimeError) -> str:
    """The first line of an out-of-memory error; any other error is a fault of ours."""
    if not _is_out_of_memory(error):
        raise error
    free_memory()
    return f"out of memory: {first_line(error)}"


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

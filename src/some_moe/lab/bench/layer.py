"""One layer's experts, every variant in the same run: right first, then timed in turns.

`bench_layer` yields one plain record a case (shape × tokens × routing), ready for JSON, as soon as it is measured.
"""

import gc
import logging
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from some_moe.config import ModelConfig, RunConfig
from some_moe.environment import describe_device
from some_moe.errors import is_out_of_memory
from some_moe.experts.grouped import ALIGNMENT
from some_moe.lab.bench.problem import Judge, Problem, make_problem, make_weights, trained_tensors
from some_moe.lab.bench.shapes import PEAK_FLOPS, layer_flops
from some_moe.lab.bench.timing import Call, Clock, UnrecordableError, first_line, record, time_in_turns, wait_for
from some_moe.lab.bench.variants import Mix, UnavailableError, Variant
from some_moe.metrics.usage import count_selections, summarize_usage

Row = dict[str, Any]
SIZES = ("d_model", "d_ffn", "num_experts", "top_k")


def bench_layer(
    configs: Sequence[RunConfig],
    tokens: Sequence[int],
    routings: Sequence[str],
    variants: Sequence[Variant],
    device: torch.device,
    *,
    seconds: float,
    records: bool,
) -> Iterator[Row]:
    """Measure the experts of each config on so many tokens, for about `seconds` of timing a variant and case.

    records: time replays of a recording, on a GPU, where one can be made. What does not fit the memory says so.
    """
    clock = Clock(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # what each is fast in
    for config, num_tokens in product(configs, tokens):
        # Compiled code is of one shape: forget the last one's, and compile anew for all routings of this one.
        torch.compiler.reset()
        contest: Contest | None = None
        for routing in routings:
            model = config.model
            case = {
                "shape": {"name": config.name} | {name: getattr(model, name) for name in SIZES},
                "tokens": num_tokens,
                "routing": routing,
                "trainability": model.trainability,
                "launch": "recorded" if records else "eager",
                # On others torch 2.11's grouped_mm aborts the whole run when it makes weight gradients.
                "load_multiple": 1 if model.trainability == "frozen" else ALIGNMENT,
                "flops": layer_flops(model, num_tokens),
                "dtype": str(dtype).removeprefix("torch."),
                "failure": None,
                "rows": [],
            }
            try:
                contest = contest or Contest(model, clock, dtype)
                case |= contest.run(variants, case, seconds, records)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                case["failure"] = f"out of memory: {first_line(error)}"
            free_memory()
            yield case


class Contest:
    """One layer's experts, and the variants that were built for them, in one case after another."""

    def __init__(self, model: ModelConfig, clock: Clock, dtype: torch.dtype) -> None:
        self.model, self.clock, self.mixes = model, clock, dict[str, Mix]()
        self.weights = make_weights(model, clock.device, dtype)

    def run(self, variants: Sequence[Variant], case: Row, seconds: float, records: bool) -> Row:
        """Check and time every variant on one problem; return how even its load is, and a row for each."""
        device = self.clock.device
        problem = make_problem(self.model, self.weights.up, case["tokens"], case["routing"], case["load_multiple"])
        judge = Judge(problem, self.weights)
        rows, calls = {}, {}
        for variant in variants:
            row, call = self.prepare(variant, problem, judge)
            if row["status"] == "ok":
                calls[variant.name] = record_variant(row, call, judge, device) if records else call
            rows[variant.name] = row
        peak = PEAK_FLOPS.get(describe_device(device))
        for name, times in time_in_turns(self.clock, calls, seconds).items():
            per_second = case["flops"] / (times["ms"] / 1e3)
            rows[name] |= times | {"tflops": per_second / 1e12, "share_of_peak": peak and per_second / peak}
        compare_with_peers(list(rows.values()))
        usage = summarize_usage(count_selections(problem.experts, self.model.num_experts))
        return {"usage": usage, "rows": list(rows.values())}

    def prepare(self, variant: Variant, problem: Problem, judge: Judge) -> tuple[Row, Call]:
        """Run a variant once, compiling if it must; measure its memory and its errors."""
        row: Row = {name: getattr(variant, name) for name in ("name", "is_ours", "same_function", "compiled")}
        row |= {"compile_seconds": None, "recorded": False, "not_recorded": "", "errors": {}, "peak_bytes": None}
        row |= {"status": "ok", "reason": ""}
        call: Call = list
        try:
            if variant.name not in self.mixes:
                with quiet_compiler():
                    self.mixes[variant.name] = variant.build(self.weights, self.model.top_k)
                    if variant.compiled:
                        started = time.perf_counter()
                        self.clock.measure(self.make_call(variant, problem), 1)
                        row["compile_seconds"] = time.perf_counter() - started
            call = self.make_call(variant, problem)
            row["peak_bytes"], found = self.clock.weigh(call)
            if variant.same_function:
                row["errors"], complaint = judge.compare(found)
                if complaint:
                    row |= {"status": "wrong", "reason": complaint}
        except UnavailableError as error:
            row |= {"status": "unavailable", "reason": str(error)}
        except Exception as error:  # a peer may fail in any way; the others are measured all the same
            row["status"], row["reason"] = describe_failure(error)
            self.mixes.pop(variant.name, None)
            free_memory()
        return row, call

    def make_call(self, variant: Variant, problem: Problem) -> Call:
        """What is timed: forward and backward, returning the output and the gradients by name."""
        mix, wanted = self.mixes[variant.name], {"grad_x": problem.x}
        if variant.same_function:
            wanted |= {"grad_gates": problem.gates}
            wanted |= {f"grad_{name}": stack for name, stack in trained_tensors(self.weights).items()}
        else:  # a dense network: it has no gates, and weights of its own
            assert isinstance(mix, nn.Module)
            wanted |= {name: weight for name, weight in mix.named_parameters() if weight.requires_grad}

        def call() -> dict[str, Tensor]:
            y = mix(problem.x, problem.experts, problem.gates)
            grads = torch.autograd.grad(y, list(wanted.values()), problem.grad_y)
            return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}

        return call


def record_variant(row: Row, call: Call, judge: Judge, device: torch.device) -> Call:
    """The replays of a call, checked like the call itself; or the call, and the row says why."""
    try:
        replay, found = record(call, device)
    except UnrecordableError as error:
        row["not_recorded"] = str(error)
        return call
    replay()
    wait_for(device)
    complaint = judge.compare(found)[1] if row["same_function"] else ""
    row["recorded"], row["not_recorded"] = not complaint, complaint and f"its replay is wrong: {complaint}"
    return call if complaint else replay


@contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep the compiler's pages of complaint off the screen: what fails has a row that says so."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def compare_with_peers(rows: Sequence[Row]) -> None:
    """Add to each timed row how many times as fast as the fastest peer of the same function it is."""
    timed = [row for row in rows if "ms" in row]
    fastest = min((row["ms"] for row in timed if row["same_function"] and not row["is_ours"]), default=None)
    for row in timed:
        row["speed_to_fastest_peer"] = fastest and fastest / row["ms"]


def describe_failure(error: Exception) -> tuple[str, str]:
    """A row's status and reason."""
    # A compiler wraps the error that matters into one of its own.
    wrapped = re.search(r"got \w+\([\"'](.+?)[\"']\)", str(error))
    text = wrapped[1][:160] if wrapped else first_line(error)
    return ("out of memory", text) if is_out_of_memory(error) else ("failed", f"{type(error).__name__}: {text}")


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # which does nothing where there is no GPU

"""Takes a run's training steps on a GPU: captures `train_step` once for each kind of step, and replays it.

A captured step (a CUDA graph) costs the host one launch instead of a thousand, so that small models are not held up
by Python. What is captured is the plain `training.step.train_step`, on static inputs of the capture's own.
"""

import time
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from some_moe.config import RunConfig
from some_moe.data.batches import Batch
from some_moe.fast.adamw import FusedAdamW
from some_moe.fast.experts import fits_graph
from some_moe.fast.model import FastLM
from some_moe.fast.precompile import compiling_only
from some_moe.fast.scoring import GraphedScorer
from some_moe.fast.static_inputs import StaticInputs
from some_moe.model.tokens import TokenInfo
from some_moe.training.schedule import top_k_at
from some_moe.training.step import StepInputs, Stepper, StepResult, find_loss, prepare, train_step

EAGER_STEPS = 3  # of each kind before it is captured: what is compiled or allocated on first use is there by then
MAX_CAPTURES = 16
CAPTURE_PAYS = 20  # a run of fewer steps is over before capturing them would have paid
COMPILE_PAYS = (
    20_000  # nor would compiling: own kernels leave the compiler a few per cent, which it takes half a minute for
)
HOST = torch.device("cpu")

Kind = tuple[Any, ...]


@dataclass(frozen=True)
class Capture:
    """One kind of step: the graph, the tensors it reads and those it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: StaticInputs
    result: StepResult


def wants_compile(config: RunConfig, total_steps: int) -> bool:
    """`train.compile`, or where it is null: in a run long enough."""
    return total_steps >= COMPILE_PAYS if config.train.compile is None else config.train.compile


class GraphedStepper(Stepper):
    """The run's steps, captured and compiled where that pays and can be done."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        model, config = self.model, self.config
        assert isinstance(model, FastLM)
        whole = all(fits_graph(library, model.dtype or torch.float32) for library in model.libraries)
        self.compiled = wants_compile(config, self.total_steps)
        if self.compiled:
            # Bucketed rows have several lengths: the second one compiles code for any.
            model.compile_parts(dynamic=None if config.data.batching == "bucketed" else False, fullgraph=whole)
        # A capture bakes in every number that the host computes from the step; an annealed beta is one.
        settled = config.gravity.beta_schedule == "constant"
        asked = self.compiled if config.train.compile is not None else self.total_steps >= CAPTURE_PAYS
        self.captures_steps = asked and settled and self.group.is_single and whole
        self.seen: Counter[Kind] = Counter()
        self.captures: dict[Kind, Capture] = {}
        if self.captures_steps and not self.compiled:
            self.score = GraphedScorer(model)
        self.stream = torch.cuda.Stream(self.device) if self.captures_steps else None  # type: ignore[no-untyped-call]

    def compile_model(self) -> None:
        """Left to `compile_parts`, which knows what can be one graph."""

    def __call__(self, batch: Batch, step: int) -> StepResult:
        """Learn from one step's rows, and let the keys move once."""
        if not self.compiled and not self.captures_steps:
            return self.run_eager(batch, step)
        kind = self.kind_of(batch, step)
        self.seen[kind] += 1
        if self.seen[kind] == 1:
            started = self.now()
            if len(self.seen) == 1:
                self.compile_kernels(batch, step)
            result = self.run_eager(batch, step)
            self.compile_seconds += self.now() - started
            return result
        if not self.captures_steps or self.seen[kind] <= EAGER_STEPS or not self.may_capture(kind):
            return self.run_eager(batch, step)
        return self.replay(kind, batch, step)

    def compile_kernels(self, batch: Batch, step: int) -> None:
        """Compile the kernels of steps and of generation side by side, by passes that leave nothing behind."""
        if self.compiled:
            return  # those passes would be compiled too
        assert isinstance(self.optimizer, FusedAdamW)
        inputs = prepare(batch, self.config, step, self.total_steps, self.device, self.group)
        # A first cuBLAS call in autograd's own thread warns that it makes itself at home there.
        with compiling_only(), warnings.catch_warnings(action="ignore"):
            find_loss(self.model, inputs.parts[0], inputs, self.config).loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.compile_kernels()
            with torch.no_grad():
                self.model(inputs.parts[0].inputs[:1, :1], TokenInfo.of((1, 1), self.device, sums=False))
        self.optimizer.zero_grad(set_to_none=True)

    def now(self) -> float:
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def kind_of(self, batch: Batch, step: int) -> Kind:
        """What a capture depends on, besides the tensors' values."""
        top_k = top_k_at(step, self.total_steps, self.config.model.top_k, self.config.train)
        return tuple(batch.inputs.shape), batch.segments is None, top_k, step % self.config.gravity.every == 0

    def may_capture(self, kind: Kind) -> bool:
        # Micro-batches of different lengths make too many kinds; their steps are long enough without.
        rows, one_batch = kind[0][0], self.config.data.batch_size
        room = kind in self.captures or len(self.captures) < MAX_CAPTURES
        return room and (rows == one_batch or self.config.data.batching != "bucketed")

    def replay(self, kind: Kind, batch: Batch, step: int) -> StepResult:
        """Bring the batch to where the capture reads, and run it; capture first, where there is none."""
        inputs = prepare(batch, self.config, step, self.total_steps, HOST)
        if kind not in self.captures:
            started = self.now()
            self.captures[kind] = self.capture(inputs)
            self.compile_seconds += self.now() - started
        capture = self.captures[kind]
        capture.inputs.fill(inputs)
        capture.graph.replay()
        left = capture.result
        return StepResult(loss=left.loss.clone(), gradient_norm=left.gradient_norm.clone(), routings=left.routings)

    def capture(self, inputs: StepInputs) -> Capture:
        """Capture, without doing it, one step on static inputs."""
        static = StaticInputs(inputs, self.device)
        torch.cuda.empty_cache()  # what the eager steps used, the capture will hold
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.captures.values())).graph.pool() if self.captures else None
        # Other threads go on pinning batches meanwhile, which CUDA would refuse if told to mind them too.
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            result = train_step(self.model, self.optimizer, static.inputs, self.config, self.group)
        assert isinstance(self.optimizer, FusedAdamW)
        self.optimizer.finish_capture()
        return Capture(graph, static, result)

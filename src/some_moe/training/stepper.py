"""Takes a run's training steps; on a GPU it records the device's part once for each shape and replays it.

A recorded step (a CUDA graph) costs the host one launch instead of a thousand, so that small models are not
held up by Python. It is the same work on the same kind of tensors, as `train.step` does it.
"""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from some_moe.config import RunConfig
from some_moe.data.batches import Batch
from some_moe.model.record import Routing
from some_moe.model.transformer import SomeLM
from some_moe.parallel.distributed import ALONE, Team
from some_moe.training.machine import Machine
from some_moe.training.optim import Optimizer, set_rate
from some_moe.training.schedule import rate_share, top_k_at
from some_moe.training.step import StepInputs, StepResult, learn, prepare, train_step
from some_moe.training.tray import Tray

ORDINARY_STEPS = 3  # of each shape before it is recorded: what is compiled or allocated on first use is there by then
MAX_RECORDINGS = 16
HOST = torch.device("cpu")
COMPILE_PAYS = 200  # a run of fewer steps is over before compiling would have paid

Kind = tuple[Any, ...]


@dataclass(frozen=True)
class Recording:
    """One kind of step: the graph, the tensors it reads and those it leaves."""

    graph: torch.cuda.CUDAGraph
    tray: Tray
    loss: Tensor
    norm: Tensor
    routings: tuple[Routing, ...]


def wants_compile(config: RunConfig, total_steps: int, machine: Machine) -> bool:
    """`train.compile`, or where it is null: on a GPU, in a run long enough."""
    if config.train.compile is not None:
        return config.train.compile
    return machine.device.type == "cuda" and total_steps >= COMPILE_PAYS


class Stepper:
    """The run's steps, one after another. Results stay valid until the next step."""

    def __init__(
        self,
        model: SomeLM,
        optimizer: Optimizer,
        config: RunConfig,
        total_steps: int,
        machine: Machine,
        team: Team = ALONE,
    ) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.total_steps, self.machine, self.team = total_steps, machine, team
        self.compiled = wants_compile(config, total_steps, machine)
        if self.compiled:
            # Bucketed rows have several lengths: the second one compiles code for any.
            model.compile_parts(dynamic=None if config.data.batching == "bucketed" else False, bf16=machine.bf16)
        # A recording bakes in every number that the host computes from the step; an annealed beta is one.
        settled = config.gravity.beta_schedule == "constant"
        self.records = self.compiled and settled and team.alone and model.fits_graph(machine.bf16)
        self.seen: Counter[Kind] = Counter()
        self.recordings: dict[Kind, Recording] = {}
        self.stream = torch.cuda.Stream(machine.device) if self.records else None  # type: ignore[no-untyped-call]
        self.compile_seconds = 0.0

    def __call__(self, batch: Batch, step: int) -> StepResult:
        """Learn from one step's rows, and let the keys move once."""
        if not self.compiled:
            return self.take_plainly(batch, step)
        kind = self.kind_of(batch, step)
        self.seen[kind] += 1
        if self.seen[kind] == 1:
            started = self.now()
            result = self.take_plainly(batch, step)
            self.compile_seconds += self.now() - started
            return result
        if self.stream is None or self.seen[kind] <= ORDINARY_STEPS or not self.may_record(kind):
            return self.take_plainly(batch, step)
        return self.replay(kind, batch, step)

    def now(self) -> float:
        if self.machine.device.type == "cuda":
            torch.cuda.synchronize(self.machine.device)
        return time.perf_counter()

    def take_plainly(self, batch: Batch, step: int) -> StepResult:
        return train_step(
            self.model,
            self.optimizer,
            batch,
            self.config,
            step,
            self.total_steps,
            device=self.machine.device,
            bf16=self.machine.bf16,
            team=self.team,
        )

    def kind_of(self, batch: Batch, step: int) -> Kind:
        """What a recording depends on, besides the tensors' values."""
        top_k = top_k_at(step, self.total_steps, self.config.model.top_k, self.config.train)
        return tuple(batch.inputs.shape), batch.segments is None, top_k, step % self.config.gravity.every == 0

    def may_record(self, kind: Kind) -> bool:
        # Micro-batches of different lengths make too many kinds; their steps are long enough without.
        rows, one_batch = kind[0][0], self.config.data.batch_size
        room = kind in self.recordings or len(self.recordings) < MAX_RECORDINGS
        return room and (rows == one_batch or self.config.data.batching != "bucketed")

    def replay(self, kind: Kind, batch: Batch, step: int) -> StepResult:
        """Bring the batch to where the recording reads, and run it; record first, where there is none."""
        set_rate(self.optimizer, rate := self.rate_at(step))
        inputs = prepare(batch, self.config, step, HOST)
        if kind not in self.recordings:
            started = self.now()
            self.recordings[kind] = self.record(inputs, kind[2], step)
            self.compile_seconds += self.now() - started
        recording = self.recordings[kind]
        recording.tray.bring(inputs)
        recording.graph.replay()
        return StepResult(
            loss=recording.loss.clone(),
            gradient_norm=recording.norm.clone(),
            routings=recording.routings,
            rate=rate,
            top_k=kind[2],
        )

    def rate_at(self, step: int) -> float:
        return self.config.train.learning_rate * rate_share(step, self.total_steps, self.config.train)

    def record(self, inputs: StepInputs, top_k: int, step: int) -> Recording:
        """Record, without doing it, one step on tensors of its own."""
        tray = Tray(inputs, self.machine.device)
        torch.cuda.empty_cache()  # what the ordinary steps used, the recording will hold
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.recordings.values())).graph.pool() if self.recordings else None
        # Other threads go on pinning batches meanwhile, which CUDA would refuse if told to mind them too.
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            loss, norm, routings = learn(
                self.model, self.optimizer, tray.inputs, self.config, top_k, bf16=self.machine.bf16
            )
            self.model.gravity_step(routings, step, self.total_steps)
        self.optimizer.finish_recording()
        return Recording(graph, tray, loss, norm, routings)

"""A single training step on one page: forward and loss, backward, clip, rate, optimizer, gravity.

`prepare` is the host's part: it decides, and brings the batch to the device. `train_step` is the device's part: it
waits for nothing and reads nothing back, so that a GPU can capture that very function (see fast/graph.py).
"""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from some_moe.config import RunConfig
from some_moe.data.batches import Batch
from some_moe.hashing import derive_key
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import LossOutput, SomeLM
from some_moe.parallel.process_group import SINGLE, ProcessGroup
from some_moe.training.optim import Optimizer, set_rate
from some_moe.training.schedule import rate_at, top_k_at


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What `train_step` works on. Tensors are on the device, and may change from step to step without a new capture."""

    parts: tuple[Batch, ...]  # micro-batches of this process
    shares: tuple[Tensor, ...]  # () float64: each part's share of the step's real tokens
    denominator: Tensor  # () what the training loss is divided by: a count over the whole step
    salt: Tensor  # (2,) int32, hash of seed and step
    rate: Tensor  # () float64 learning rate
    top_k: int
    step: int
    total_steps: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step leaves for the record, still on the device."""

    loss: Tensor  # () mean cross-entropy over what the training loss averages over
    gradient_norm: Tensor  # () before clipping
    routings: tuple[Routing, ...]  # the step's sums, one a layer


def prepare(
    batch: Batch, config: RunConfig, step: int, total_steps: int, device: torch.device, group: ProcessGroup = SINGLE
) -> StepInputs:
    """Cut this process's rows into micro-batches of at most `data.batch_size` and bring them to the device.

    `batch` is the whole step, the same in every process: batch_size rows, times the accumulation, whatever the
    number of processes. Each takes an equal share of them, so that one config means one result.
    """
    keep_length = config.data.batching != "bucketed"
    parts = group.share(batch, keep_length=keep_length).split(config.data.batch_size, keep_length=keep_length)
    num_real = max(1, batch.num_real)
    # The mean is over the whole step, so that its parts weigh by their tokens and not alike.
    denominator = num_real if config.data.loss_on == "text" else batch.targets.numel()

    def number(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((), value, dtype=dtype, device=device)  # filled there: a copy would be waited for

    return StepInputs(
        parts=tuple(part.to(device) for part in parts),
        shares=tuple(number(part.num_real / num_real, torch.float64) for part in parts),
        denominator=number(denominator, torch.float32),
        salt=torch.stack([number(word, torch.int32) for word in derive_key(config.train.seed, step)]),
        rate=number(rate_at(step, total_steps, config.train), torch.float64),
        top_k=top_k_at(step, total_steps, config.model.top_k, config.train),
        step=step,
        total_steps=total_steps,
    )


def describe_tokens(batch: Batch, config: RunConfig, salt: Tensor, *, sums: bool = True) -> TokenInfo:
    """What a model must know about a batch, with the config's convention of what counts."""
    return TokenInfo(
        counted=torch.ones_like(batch.real) if config.data.count_padding else batch.real,
        rows=batch.rows,
        salt=salt,
        ids=batch.inputs,
        positions=batch.positions,
        segments=batch.segments,
        sums=sums,
    )


def find_loss(model: SomeLM, part: Batch, inputs: StepInputs, config: RunConfig) -> LossOutput:
    """The training loss of one micro-batch of a step, and its routings."""
    return model.loss(
        part.inputs,
        part.targets,
        describe_tokens(part, config, inputs.salt),
        weights=part.real if config.data.loss_on == "text" else None,
        denominator=inputs.denominator,
        top_k=inputs.top_k,
    )


def train_step(
    model: SomeLM, optimizer: Optimizer, inputs: StepInputs, config: RunConfig, group: ProcessGroup = SINGLE
) -> StepResult:
    """Learn from one step's rows, and let the keys move once."""
    loss: Tensor | float = 0.0
    routings: tuple[Routing, ...] = ()
    optimizer.zero_grad(set_to_none=True)
    for part, share in zip(inputs.parts, inputs.shares, strict=True):
        output = find_loss(model, part, inputs, config)
        objective = output.loss
        if output.aux_loss is not None:
            objective = objective + output.aux_loss * share.to(output.aux_loss.dtype)
        objective.backward()  # type: ignore[no-untyped-call]
        loss = loss + output.loss.detach()
        found = tuple(routing.detach() for routing in output.routings)
        routings = tuple(a + b for a, b in zip(routings, found, strict=True)) if routings else found
    assert isinstance(loss, Tensor)
    loss, routings = group.add_up(optimizer.parameters(), loss, routings)
    set_rate(optimizer, inputs.rate)
    norm = optimizer.clip_and_step(config.train.clip or None)
    model.gravity_step(routings, inputs.step, inputs.total_steps)
    return StepResult(loss=loss, gradient_norm=norm, routings=routings)


class Stepper:
    """Takes a run's steps, one after another. Results stay valid until the next step."""

    def __init__(
        self,
        model: SomeLM,
        optimizer: Optimizer,
        config: RunConfig,
        total_steps: int,
        device: torch.device,
        group: ProcessGroup = SINGLE,
    ) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.total_steps, self.device, self.group = total_steps, device, group
        self.score = model.score  # between the steps; what it returns stays valid until the next call
        self.compiled = bool(config.train.compile)
        self.compile_seconds = 0.0
        self.shapes: set[torch.Size] = set()  # that were compiled
        if self.compiled:
            self.compile_model()

    def compile_model(self) -> None:
        for block in self.model.blocks:
            block.compile(dynamic=None if self.config.data.batching == "bucketed" else False)

    def uncompiled(self) -> AbstractContextManager[object]:
        """Within, the model runs as it is written: compiling a pass alone, for every length, would cost more than it
        saves. Nothing to do where it was never compiled: to ask the compiler would be to load it."""
        return torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()

    def __call__(self, batch: Batch, step: int) -> StepResult:
        """Learn from one step's rows, and let the keys move once."""
        if not self.compiled or batch.inputs.shape in self.shapes:
            return self.run_eager(batch, step)
        self.shapes.add(batch.inputs.shape)
        started = time.perf_counter()
        result = self.run_eager(batch, step)
        self.compile_seconds += time.perf_counter() - started
        return result

    def run_eager(self, batch: Batch, step: int) -> StepResult:
        inputs = prepare(batch, self.config, step, self.total_steps, self.device, self.group)
        return train_step(self.model, self.optimizer, inputs, self.config, self.group)

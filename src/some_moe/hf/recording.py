"""What a model remembers of a step's passes until its keys move; and who moves them, under transformers' Trainer."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from some_moe.model.layer import SomeLayer
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo
from some_moe.parallel.process_group import ProcessGroup


class Recorder:
    """The routings of some layers, added up over the micro-batches of a step."""

    def __init__(self, layers: list[SomeLayer]) -> None:
        self.layers = layers
        self.step = 0  # chooses what is sampled; `GravityCallback` sets it
        self.num_rows = 0  # that the step has had so far
        self.pending: tuple[Routing, ...] = ()
        self.mask: Tensor | None = None  # (B, T) of the batch: 0 is padding, which counts in no sum

    def inform(self, x: Tensor, *, is_recorded: bool, **given: Tensor | None) -> TokenInfo:
        """What the layers must know of a batch x (B, T, D)."""
        group = join_group()  # whose processes have as many rows each
        first = self.num_rows * group.world_size + group.rank * len(x)
        rows = torch.arange(first, first + len(x), device=x.device)
        seed = self.layers[0].seed if self.layers else 0
        return TokenInfo.of(x.shape[:2], x.device, seed=seed, step=self.step, sums=is_recorded, rows=rows, **given)

    def add(self, routings: list[Routing], num_rows: int) -> None:
        found = tuple(routing.detach() for routing in routings)
        self.pending = tuple(a + b for a, b in zip(self.pending, found, strict=True)) if self.pending else found
        self.num_rows += num_rows

    def begin(self, step: int) -> None:
        self.step, self.num_rows, self.pending = step, 0, ()

    def move_keys(self, step: int, total_steps: int | None, group: ProcessGroup) -> None:
        """Move the keys by all that was recorded, in every process alike."""
        pending, self.pending = self.pending, ()
        if pending:
            _, pending = group.add_up([], pending[0].counts.new_zeros(()), pending)
            for layer, routing in zip(self.layers, pending, strict=True):
                layer.gravity_step(routing, step, total_steps)


def is_recomputed() -> bool:
    """Whether a pass is made again within backward, as gradient checkpointing does: it was recorded before."""
    return bool(torch._C._current_graph_task_id() != -1)


def find_recorders(model: nn.Module) -> Iterator[Recorder]:
    for module in model.modules():
        recorder = getattr(module, "recorder", None)
        if isinstance(recorder, Recorder):
            yield recorder


def join_group() -> ProcessGroup:
    """The processes that transformers trains with."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return ProcessGroup()
    return ProcessGroup(dist.get_rank(), dist.get_world_size())


class GravityCallback(TrainerCallback):  # type: ignore[misc]
    """Moves the keys after each step of the optimizer: Trainer(…, callbacks=[GravityCallback()])."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        for recorder in find_recorders(kwargs["model"]):
            recorder.begin(state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        group = join_group()
        for recorder in find_recorders(kwargs["model"]):
            recorder.move_keys(state.global_step, state.max_steps, group)

"""Static inputs of a captured step: tensors in one piece of memory, which one copy fills anew before each replay."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from some_moe.data.batches import Batch
from some_moe.training.step import StepInputs

ALIGNMENT = 512  # bytes: where torch's own allocations begin, so that no kernel sees a difference


def change_inputs(inputs: StepInputs, change: Callable[[Tensor], Tensor]) -> StepInputs:
    """The same inputs with each tensor changed: all that may differ between two steps of a kind."""

    def change_batch(batch: Batch) -> Batch:
        changes = {name: change(value) for name, value in vars(batch).items() if isinstance(value, Tensor)}
        return replace(batch, **changes)

    return replace(
        inputs,
        parts=tuple(map(change_batch, inputs.parts)),
        shares=tuple(map(change, inputs.shares)),
        denominator=change(inputs.denominator),
        salt=change(inputs.salt),
        rate=change(inputs.rate),
    )


def list_tensors(inputs: StepInputs) -> list[Tensor]:
    parts = [value for part in inputs.parts for value in vars(part).values() if isinstance(value, Tensor)]
    return [*parts, *inputs.shares, inputs.denominator, inputs.salt, inputs.rate]


def round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def lay_out(inputs: StepInputs, memory: Tensor) -> StepInputs:
    """Inputs of the same shapes and types, one after the other in memory (bytes,), with whatever values are there."""
    start = 0

    def place(tensor: Tensor) -> Tensor:
        nonlocal start
        # Not a view, of which compiled code would see that it is one.
        placed = torch.empty(0, dtype=tensor.dtype, device=memory.device)
        placed.set_(memory.untyped_storage(), start // tensor.itemsize, tensor.shape)  # type: ignore[call-overload]
        start += round_up(tensor.nbytes)
        return placed

    return change_inputs(inputs, place)


class StaticInputs:
    """A capture's own inputs on the device, and the way there."""

    def __init__(self, inputs: StepInputs, device: torch.device) -> None:
        """inputs: some like those that will be brought, on the host."""
        size = sum(round_up(tensor.nbytes) for tensor in list_tensors(inputs))
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.inputs = lay_out(inputs, self.memory)
        self.copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fill(self, inputs: StepInputs) -> None:
        """Overwrite the inputs by others, from the host, which waits for nothing."""
        # Page-locked memory is not given away again before the copy from it is done: torch sees to that.
        packed = torch.empty(self.memory.shape, dtype=torch.uint8, pin_memory=self.copy_stream is not None)
        for place, tensor in zip(list_tensors(lay_out(inputs, packed)), list_tensors(inputs), strict=True):
            place.copy_(tensor)
        if self.copy_stream is None:
            self.memory.copy_(packed)
            return
        # The way from the host is made while the step before is still at work; the rest is a copy on the device.
        with torch.cuda.stream(self.copy_stream):
            arrived = packed.to(self.memory.device, non_blocking=True)
        present = torch.cuda.current_stream(self.memory.device)
        present.wait_stream(self.copy_stream)
        arrived.record_stream(present)
        self.memory.copy_(arrived)

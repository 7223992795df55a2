"""A single training step: forward, backward (accumulated), clip, rate, optimizer, gravity.

`prepare` is the host's part: it decides and brings the batch to the device. `learn` is the device's part: it
waits for nothing and reads nothing back, so that a GPU can record it once and replay it (see stepper.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from some_moe.config import RunConfig
from some_moe.data.batches import Batch
from some_moe.hashing import derive_key
from some_moe.model.copies import weights_copied
from some_moe.model.record import Routing
from some_moe.model.transformer import SomeLM
from some_moe.parallel.distributed import ALONE, Team
from some_moe.training.evaluate import forward
from some_moe.training.optim import Optimizer, set_rate
from some_moe.training.schedule import rate_share, top_k_at


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What `learn` works on, all of it on the device."""

    parts: tuple[Batch, ...]  # micro-batches of this process
    shares: tuple[Tensor, ...]  # () float64: each part's share of the step's real tokens
    denominator: Tensor  # () what the training loss is divided by: a count over the whole step
    salt: Tensor  # (2,) int32, hash of seed and step


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step leaves for the record, still on the device."""

    loss: Tensor  # () mean nats over what the training loss averages over
    gradient_norm: Tensor  # () before clipping
    routings: tuple[Routing, ...]  # the step's sums, one a layer
    rate: float
    top_k: int


def place_salt(seed: int, step: int, device: torch.device) -> Tensor:
    """`hashing.make_salt` without a copy that the host would wait for."""
    salt = torch.empty(2, dtype=torch.int32, device=device)
    for place, word in zip(salt.unbind(), derive_key(seed, step), strict=True):
        place.fill_(word)
    return salt


def prepare(batch: Batch, config: RunConfig, step: int, device: torch.device, team: Team = ALONE) -> StepInputs:
    """Cut this process's rows into micro-batches of at most `data.batch_size` and bring them to the device.

    `batch` is the whole step, the same in every process: batch_size rows, times the accumulation, whatever the
    number of processes. Each takes an equal share of them, so that one config means one result.
    """
    keep_length = config.data.batching != "bucketed"
    parts = team.share(batch, keep_length=keep_length).split(config.data.batch_size, keep_length=keep_length)
    num_real = max(1, batch.num_real)
    # The mean is over the whole step, so that its parts weigh by their tokens and not alike.
    denominator = num_real if config.data.loss_on == "text" else batch.targets.numel()
    return StepInputs(
        parts=tuple(part.to(device) for part in parts),
        shares=tuple(torch.full((), part.num_real / num_real, dtype=torch.float64, device=device) for part in parts),
        denominator=torch.full((), float(denominator), device=device),
        salt=place_salt(config.train.seed, step, device),
    )


def learn(
    model: SomeLM,
    optimizer: Optimizer,
    inputs: StepInputs,
    config: RunConfig,
    top_k: int,
    *,
    bf16: bool,
    team: Team = ALONE,
) -> tuple[Tensor, Tensor, tuple[Routing, ...]]:
    """Gradients, clipping and the optimizer's step. Returns loss, gradient norm and the step's routing sums."""
    device_type = inputs.salt.device.type
    loss: Tensor | float = 0.0
    routings: tuple[Routing, ...] = ()
    optimizer.zero_grad(set_to_none=True)
    # Where launches cost more than the casts; elsewhere autocast may do as it does.
    with weights_copied(model, torch.bfloat16, enabled=bf16 and device_type == "cuda"):
        for part, share in zip(inputs.parts, inputs.shares, strict=True):
            with torch.autocast(device_type, torch.bfloat16, enabled=bf16):
                output = forward(
                    model, part, config, salt=inputs.salt, top_k=top_k, score=True, denominator=inputs.denominator
                )
            assert output.loss is not None
            objective = output.loss
            if output.aux_loss is not None:
                objective = objective + output.aux_loss * share.to(output.aux_loss.dtype)
            objective.backward()  # type: ignore[no-untyped-call]
            loss = loss + output.loss.detach()
            found = tuple(routing.detach() for routing in output.routings)
            routings = tuple(a + b for a, b in zip(routings, found, strict=True)) if routings else found
    assert isinstance(loss, Tensor)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    loss, routings = team.add_up(parameters, loss, routings)
    norm = optimizer.clip_and_step(config.train.clip or None)
    return loss, norm, routings


def train_step(
    model: SomeLM,
    optimizer: Optimizer,
    batch: Batch,
    config: RunConfig,
    step: int,
    total_steps: int,
    *,
    device: torch.device,
    bf16: bool = False,
    team: Team = ALONE,
) -> StepResult:
    """Learn from one step's rows, and let the keys move once."""
    top_k = top_k_at(step, total_steps, config.model.top_k, config.train)
    rate = config.train.learning_rate * rate_share(step, total_steps, config.train)
    set_rate(optimizer, rate)
    inputs = prepare(batch, config, step, device, team)
    loss, norm, routings = learn(model, optimizer, inputs, config, top_k, bf16=bf16, team=team)
    model.gravity_step(routings, step, total_steps)
    return StepResult(loss=loss, gradient_norm=norm, routings=routings, rate=rate, top_k=top_k)

"""A single training step: forward, backward (accumulated), clip, rate, optimizer, gravity."""

from dataclasses import dataclass

import torch
from torch import Tensor

from some_moe.config import RunConfig
from some_moe.data.batches import Batch
from some_moe.model.routing import Routing
from some_moe.model.transformer import SomeLM
from some_moe.train.evaluate import forward, token_nats
from some_moe.train.optim import set_rate
from some_moe.train.schedule import rate_share, top_k_at


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step leaves for the record, still on the device."""

    loss: Tensor  # () mean nats over what the training loss averages over
    gradient_norm: Tensor  # () before clipping
    routings: tuple[Routing, ...]  # the step's sums, one a layer
    rate: float
    top_k: int


def train_step(
    model: SomeLM,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: RunConfig,
    step: int,
    total_steps: int,
    *,
    device: torch.device,
    bf16: bool = False,
) -> StepResult:
    """Learn from one step's rows, `data.batch_size` of them at a time, and let the keys move once."""
    padded = config.data.batching == "padded"
    top_k = top_k_at(step, total_steps, config.model.top_k, config.train)
    num_real = batch.num_real
    # The mean is over the whole step, so that its parts weigh by their tokens and not alike.
    denominator = num_real if config.data.loss_on == "text" else batch.targets.numel()
    loss: Tensor | float = 0.0
    routings: tuple[Routing, ...] = ()
    optimizer.zero_grad(set_to_none=True)
    for part in batch.split(config.data.batch_size, keep_length=padded):
        here = part.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            output = forward(model, here, config, step, top_k)
        nats = token_nats(output.logits, here.targets)
        if config.data.loss_on == "text":
            nats = nats * here.real
        part_loss = nats.sum() / denominator
        objective = part_loss
        if output.aux_loss is not None:
            objective = part_loss + output.aux_loss * (part.num_real / max(1, num_real))
        objective.backward()  # type: ignore[no-untyped-call]
        loss = loss + part_loss.detach()
        found = tuple(routing.detach() for routing in output.routings)
        routings = tuple(a + b for a, b in zip(routings, found, strict=True)) if routings else found

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.train.clip or float("inf"))
    rate = config.train.learning_rate * rate_share(step, total_steps, config.train)
    set_rate(optimizer, rate)
    optimizer.step()
    model.gravity_step(routings, step, total_steps)
    assert isinstance(loss, Tensor)
    return StepResult(loss=loss, gradient_norm=norm, routings=routings, rate=rate, top_k=top_k)

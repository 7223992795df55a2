"""Gravity of all layers at once: one by one, its kernels would be many and small. It equals `model.gravity.step` of
each layer up to rounding, for sums are made in another order.
"""

from collections.abc import Callable, Sequence

import torch

from some_moe.config import GravityConfig
from some_moe.model.gravity import Beta, beta_now, is_due, next_state, refuse_without_sums
from some_moe.model.keystore import KeyState
from some_moe.model.routing import SUMS, Routing

Advance = Callable[[list[KeyState], list[Routing], GravityConfig, Beta], None]


def betas_now(config: GravityConfig, states: Sequence[KeyState], step: int, total_steps: int | None) -> Beta:
    """`beta_now` of L layers, in a form that compiled code can take at every step."""
    if not config.pulls_peers:
        return 0.0
    betas = [beta_now(config, state.layer, step, total_steps) for state in states]
    if config.beta_schedule == "constant" and len(set(betas)) == 1:
        return betas[0]
    # A number that changes would be compiled anew at every step. Filled in on the device: a copy would be waited for.
    return torch.stack([state.keys.new_full((1, 1), beta) for state, beta in zip(states, betas, strict=True)])


@torch.no_grad()
def step_layers(
    states: Sequence[KeyState | None],
    routings: Sequence[Routing],
    config: GravityConfig,
    step: int,
    total_steps: int | None,
    advance: Advance,
) -> None:
    """Move the keys of all layers that have any and whose turn it is. advance: `advance_layers`, or it compiled."""
    due_states, due_routings = [], []
    for state, routing in zip(states, routings, strict=True):
        if state is not None and is_due(state, config, step):
            refuse_without_sums(routing)
            due_states.append(state)
            due_routings.append(routing)
    if due_states:
        advance(due_states, due_routings, config, betas_now(config, due_states, step, total_steps))


def advance_layers(states: list[KeyState], routings: list[Routing], config: GravityConfig, beta: Beta) -> None:
    """One step of gravity for L layers at once."""
    buffers = [dict(state.named_buffers()) for state in states]
    old = {name: torch.stack([own[name] for own in buffers]) for name in buffers[0]}
    names = (*SUMS, "sample", "sample_order")
    sums = {name: torch.stack([getattr(routing, name) for routing in routings]) for name in names}
    new = next_state(old, Routing(**sums), config, beta)
    targets = [own[name] for name in new for own in buffers]
    torch._foreach_copy_(targets, [value for values in new.values() for value in values.unbind()])

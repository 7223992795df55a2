"""Knowledge gravity: how keys move without gradients. Each term is a pure function; `step` fixes their order.

The same rules as equations, symbol by symbol, are in docs/gravity.md.
Shapes: E experts, D model width, S sampled unit queries.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from some_moe.config import GravityConfig
from some_moe.model.keystore import NO_WINDOW_YET, KeyState
from some_moe.model.routing import NOT_SAMPLED, Routing


def update_usage(usage: Tensor, counts: Tensor, ema_decay: float) -> Tensor:
    """u ← γu + (1−γ)·E·n/Σn: the running share of the load, 1 being fair."""
    load = counts.to(usage.dtype) / counts.sum()
    return ema_decay * usage + (1 - ema_decay) * len(counts) * load


def attraction(keys: Tensor, query_sum: Tensor, counts: Tensor, usage: Tensor, config: GravityConfig) -> Tensor:
    """Δᵢ = αᵢ(sᵢ/nᵢ − kᵢ) where nᵢ > 0: towards the mean unit query of the expert's tokens."""
    n = counts.to(keys.dtype)
    pull = config.alpha / (1 + usage) if config.inertia else torch.full_like(usage, config.alpha)
    pull = pull.clamp(min=config.alpha_floor)[:, None]
    target = query_sum.to(keys.dtype) / n.clamp(min=1)[:, None]
    return torch.where(n[:, None] > 0, pull * (target - keys), 0.0)


def peer_force(keys: Tensor, pairs: Tensor, beta: float) -> Tensor:
    """Δᵢ = β(Σⱼ Pᵢⱼkⱼ − kᵢ), P the co-selections without the diagonal, each row scaled to sum 1."""
    peers = pairs.to(keys.dtype)
    peers = peers - torch.diag(peers.diagonal())
    total = peers.sum(1, keepdim=True)
    force = beta * (peers / total.clamp(min=1) @ keys - keys)
    return torch.where(total > 0, force, 0.0)


def find_underused(usage: Tensor, window_last: Tensor, config: GravityConfig) -> Tensor:
    """Which experts (E,) decay acts on: few selections in the last full window, or a low quantile of usage."""
    if config.theta is not None:
        return (window_last != NO_WINDOW_YET) & (window_last < config.theta)
    assert config.theta_percentile is not None
    # torch.quantile, by its own steps: under compilation it would become a chain of small kernels.
    place = config.theta_percentile * (len(usage) - 1)
    low = math.floor(place)
    ordered = usage.sort().values
    return usage < torch.lerp(ordered[low], ordered[min(low + 1, len(usage) - 1)], place - low)


def shrink(keys: Tensor, underused: Tensor, delta: float) -> Tensor:
    """Δᵢ = −δkᵢ for under-used i."""
    return torch.where(underused[:, None], -delta * keys, 0.0)


def seek(keys: Tensor, underused: Tensor, delta: float, sample: Tensor, num_sampled: Tensor) -> Tensor:
    """Δᵢ = δ(q − kᵢ) for under-used i, each towards the next of the sampled unit queries q."""
    turn = (underused.cumsum(0) - 1) % num_sampled.clamp(min=1)
    target = sample.to(keys.dtype)[turn.clamp(min=0)]
    return torch.where(underused[:, None] & (num_sampled > 0), delta * (target - keys), 0.0)


def limit(delta: Tensor, max_step: float) -> Tensor:
    """Shorten each row of Δ to at most max_step."""
    length: Tensor = torch.linalg.vector_norm(delta, dim=-1, keepdim=True)
    return delta * (max_step / length.clamp(min=max_step))


def renormalize(keys: Tensor, old: Tensor) -> Tensor:
    """Scale each key to unit length; one that has no direction stays where it was."""
    length = torch.linalg.vector_norm(keys, dim=-1, keepdim=True)
    return torch.where(length > torch.finfo(keys.dtype).tiny, keys / length, old)


def choose_respawns(usage: Tensor, patience: Tensor, config: GravityConfig, num_sampled: Tensor) -> Tensor:
    """Number the experts (E,) to respawn 0, 1, … from the least used; −1 for the others.

    An expert's turn comes when its patience has reached respawn_patience; at most respawn_max a step.
    """
    due = patience >= config.respawn_patience
    place = torch.where(due, usage, torch.inf).argsort(stable=True).argsort()
    return torch.where(due & (place < num_sampled.clamp(max=config.respawn_max)), place, -1)


def update_bias(bias: Tensor, counts: Tensor, balance_rate: float) -> Tensor:
    """bᵢ += ε·sign(1 − Eηᵢ), η the step's load share. In integers, so a fair share is exactly zero."""
    return bias + balance_rate * torch.sign(counts.sum() - len(counts) * counts).to(bias.dtype)


def beta_now(config: GravityConfig, layer: int, step: int, total_steps: int | None) -> float:
    """The peer force's strength at this step and layer, with schedule and layer scale applied."""
    scale = config.beta_layer_scale[layer] if config.beta_layer_scale else 1.0
    if config.beta_schedule == "constant":
        return config.beta * scale
    if total_steps is None:
        raise ValueError(f"beta_schedule {config.beta_schedule!r} needs total_steps, the length of the run")
    progress = min(1.0, step / max(1, total_steps - 1))
    if config.beta_schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    strength = abs(config.beta) + (config.beta_end - abs(config.beta)) * progress
    return math.copysign(strength, config.beta) * scale


@torch.no_grad()
def step(
    state: KeyState,
    routing: Routing,
    config: GravityConfig,
    step: int,
    total_steps: int | None = None,
    *,
    advance: Callable[[KeyState, Routing, GravityConfig, float], None] | None = None,
) -> None:
    """Move one layer's keys by what was routed in this step. The only place that writes a `KeyState`.

    `advance` is the function below, or its compiled form.
    """
    if step % config.every or state.layer in config.frozen_layers:
        return
    beta = beta_now(config, state.layer, step, total_steps) if config.pulls_peers else 0.0
    (advance or advance_keys)(state, routing, config, beta)


def advance_keys(state: KeyState, routing: Routing, config: GravityConfig, beta: float) -> None:
    """One step of gravity, peer force of strength `beta`. Whether it is due, `step` has decided.

    The order: usage; attraction + peer force + decay, all from the old keys; limit; add; normalise; phoenix;
    balance; smoothing. A step in which nothing was selected changes nothing. No value is read back to the host.
    """
    counts = routing.counts
    old = state.keys
    num_sampled = (routing.sample_order < NOT_SAMPLED).sum()
    new: dict[str, Tensor] = {}

    usage = update_usage(state.usage, counts, config.ema_decay)
    new["total"] = state.total + counts
    full = state.window_steps + 1 >= config.theta_window
    window = state.window + counts
    window_last = torch.where(full, window, state.window_last)
    new["window"] = torch.where(full, 0, window)
    new["window_last"] = window_last
    new["window_steps"] = torch.where(full, 0, state.window_steps + 1)

    if config.moves_keys:
        delta = torch.zeros_like(old)
        if config.attracts:
            delta = delta + attraction(old, routing.query_sum, counts, usage, config)
        if config.pulls_peers:
            delta = delta + peer_force(old, routing.pairs, beta)
        if config.decays:
            underused = find_underused(usage, window_last, config)
            if config.decay_mode == "shrink":
                delta = delta + shrink(old, underused, config.delta)
            else:
                delta = delta + seek(old, underused, config.delta, routing.sample, num_sampled)
        if config.max_step is not None:
            delta = limit(delta, config.max_step)
        keys = old + delta
        if config.normalize:
            keys = renormalize(keys, old)
        reborn = torch.zeros_like(usage, dtype=torch.bool)
        if config.respawns:
            patience = torch.where(usage < config.respawn_below, state.patience + 1, 0)
            turn = choose_respawns(usage, patience, config, num_sampled)
            reborn = turn >= 0
            keys = torch.where(reborn[:, None], routing.sample.to(keys.dtype)[turn.clamp(min=0)], keys)
            usage = torch.where(reborn, 1.0, usage)
            new["patience"] = torch.where(reborn, 0, patience)
            new["respawns"] = state.respawns + reborn
        new["keys"] = keys
        if state.smoothed is not None:
            smoothed = config.key_ema * state.smoothed + (1 - config.key_ema) * keys
            new["smoothed"] = torch.where(reborn[:, None], keys, smoothed)
    new["usage"] = usage
    if config.balance_rate:
        new["bias"] = update_bias(state.bias, counts, config.balance_rate)
    if state.query_mean is not None:
        mean = routing.raw_sum.to(state.query_mean.dtype) / routing.num_tokens.clamp(min=1)
        new["query_mean"] = config.center_decay * state.query_mean + (1 - config.center_decay) * mean

    selected = counts.sum() > 0
    for name, value in new.items():
        buffer = getattr(state, name)
        buffer.copy_(torch.where(selected, value, buffer))

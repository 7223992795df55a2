"""Knowledge gravity: how keys move without gradients. Each term is a pure function; `next_state` fixes their order.

The same rules as equations, symbol by symbol, are in docs/gravity.md.
Shapes: E experts, D model width, S sampled unit queries; L layers may come before, in every tensor alike.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from some_moe.config import GravityConfig
from some_moe.model.keystore import NO_WINDOW_YET, KeyState
from some_moe.model.routing import Routing

Beta = float | Tensor  # one number, or (L, 1, 1): one a layer


def update_usage(usage: Tensor, counts: Tensor, ema_decay: float) -> Tensor:
    """u ← γu + (1−γ)·E·n/Σn: the running share of the load, 1 being fair."""
    load = counts.to(usage.dtype) / counts.sum(-1, keepdim=True)
    return ema_decay * usage + (1 - ema_decay) * counts.shape[-1] * load


def attraction(keys: Tensor, query_sum: Tensor, counts: Tensor, mass: Tensor, config: GravityConfig) -> Tensor:
    """Δᵢ = αᵢ(sᵢ/nᵢ − kᵢ) where nᵢ > 0: towards the mean unit query of the expert's tokens; mass (E,): its inertia."""
    n = counts.to(keys.dtype)[..., None]
    pull = config.alpha / (1 + mass) if config.inertia else torch.full_like(mass, config.alpha)
    pull = pull.clamp(min=config.alpha_floor)[..., None]
    target = query_sum.to(keys.dtype) / n.clamp(min=1)
    return torch.where(n > 0, pull * (target - keys), 0.0)


def peer_force(keys: Tensor, pairs: Tensor, beta: Beta) -> Tensor:
    """Δᵢ = β(Σⱼ Pᵢⱼkⱼ − kᵢ), P the co-selections without the diagonal, each row scaled to sum 1."""
    peers = pairs.to(keys.dtype)
    peers = peers - torch.diag_embed(peers.diagonal(dim1=-2, dim2=-1))
    total = peers.sum(-1, keepdim=True)
    force = beta * (peers / total.clamp(min=1) @ keys - keys)
    return torch.where(total > 0, force, 0.0)


def find_underused(usage: Tensor, window_last: Tensor, config: GravityConfig) -> Tensor:
    """Which experts (E,) decay acts on: few selections in the last full window, or a low quantile of usage."""
    if config.theta is not None:
        return (window_last != NO_WINDOW_YET) & (window_last < config.theta)
    assert config.theta_percentile is not None
    # torch.quantile, by its own steps: under compilation it would become a chain of small kernels.
    last = usage.shape[-1] - 1
    place = config.theta_percentile * last
    low = math.floor(place)
    ordered = usage.sort(dim=-1).values
    return usage < torch.lerp(ordered[..., low, None], ordered[..., min(low + 1, last), None], place - low)


def shrink(keys: Tensor, underused: Tensor, delta: float) -> Tensor:
    """Δᵢ = −δkᵢ for under-used i."""
    return torch.where(underused[..., None], -delta * keys, 0.0)


def seek(keys: Tensor, underused: Tensor, delta: float, sample: Tensor, num_sampled: Tensor) -> Tensor:
    """Δᵢ = δ(q − kᵢ) for under-used i, each towards the next of the num_sampled (1,) unit queries q."""
    turn = (underused.cumsum(-1) - 1) % num_sampled.clamp(min=1)
    target = pick(sample, turn).to(keys.dtype)
    return torch.where((underused & (num_sampled > 0))[..., None], delta * (target - keys), 0.0)


def pick(sample: Tensor, turn: Tensor) -> Tensor:
    """The sampled query (E, D) whose turn (E,) it is; anything where it is nobody's, −1."""
    return torch.take_along_dim(sample, turn.clamp(min=0)[..., None], dim=-2)


def bring_forward(sample: Tensor) -> tuple[Tensor, Tensor]:
    """The sampled queries (S, D) that have a direction, those that are not zero, first; and how many they are, (1,)."""
    has_direction = (sample != 0).any(-1)
    place = (~has_direction).int().argsort(dim=-1, stable=True)
    return torch.take_along_dim(sample, place[..., None], dim=-2), has_direction.sum(-1, keepdim=True)


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

    An expert's turn comes when its patience has reached respawn_patience; at most respawn_max a step, and not more
    than the num_sampled (1,) queries there are.
    """
    due = patience >= config.respawn_patience
    place = torch.where(due, usage, torch.inf).argsort(dim=-1, stable=True).argsort(dim=-1)
    return torch.where(due & (place < num_sampled.clamp(max=config.respawn_max)), place, -1)


def update_bias(bias: Tensor, counts: Tensor, balance_rate: float) -> Tensor:
    """bᵢ += ε·sign(1 − Eηᵢ), η the step's load share. In integers, so a fair share is exactly zero."""
    unfair = counts.sum(-1, keepdim=True) - counts.shape[-1] * counts
    return bias + balance_rate * torch.sign(unfair).to(bias.dtype)


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


def is_due(state: KeyState, config: GravityConfig, step: int) -> bool:
    """Whether this layer's keys move at this step."""
    return step % config.every == 0 and state.layer not in config.frozen_layers


@torch.no_grad()
def step(state: KeyState, routing: Routing, config: GravityConfig, step: int, total_steps: int | None = None) -> None:
    """Move one layer's keys by what was routed in this step.

    Nothing else writes a `KeyState`, but for `set_bias`, `displace` and, for all layers at once, fast/gravity.py.
    """
    if is_due(state, config, step):
        refuse_without_sums(routing)
        beta = beta_now(config, state.layer, step, total_steps) if config.pulls_peers else 0.0
        buffers = dict(state.named_buffers())
        for name, value in next_state(buffers, routing, config, beta).items():
            buffers[name].copy_(value)


@torch.no_grad()
def set_bias(state: KeyState, bias: Tensor) -> None:
    """Choose the selection bias (E,) from outside: benchmarks make loads uneven by it."""
    state.bias.copy_(bias)


@torch.no_grad()
def displace(
    state: KeyState, old: Mapping[str, Tensor], lengths: Tensor, directions: Tensor, config: GravityConfig
) -> None:
    """A control: put each key not where a step of gravity has, but as far, lengths (E,), from its `old` place.

    directions (E, D): random ones. Unit keys stay unit keys: `lengths` are then those of chords.
    """
    keys, away, length = old["keys"], directions.to(old["keys"]), lengths[:, None]
    if config.normalize:
        away = away - (away * keys).sum(-1, keepdim=True) * keys
    away = away / torch.linalg.vector_norm(away, dim=-1, keepdim=True)
    along = 1 - length**2 / 2 if config.normalize else torch.ones_like(length)
    across = (1 - along**2).clamp(min=0).sqrt() if config.normalize else length
    state.keys.copy_(along * keys + across * away)
    if state.smoothed is not None:
        state.smoothed.copy_(config.key_ema * old["smoothed"] + (1 - config.key_ema) * state.keys)


def refuse_without_sums(routing: Routing) -> None:
    """A pass with sums=False leaves shapes in their place, on the meta device."""
    if routing.counts.is_meta:
        raise RuntimeError("this routing has no sums, only meta tensors of their shapes; run the pass with sums=True")


def next_state(old: Mapping[str, Tensor], routing: Routing, config: GravityConfig, beta: Beta) -> dict[str, Tensor]:
    """The buffers that one step of gravity changes, by name, from all of the `old` ones. Changes nothing itself.

    The order: usage; attraction + peer force + decay, all from the old keys; limit; add; normalise; phoenix;
    balance; smoothing. A layer for which nothing was selected keeps what it has. No value is read back to the host.
    """
    counts = routing.counts
    sample, num_sampled = bring_forward(routing.sample)
    new: dict[str, Tensor] = {}

    usage = update_usage(old["usage"], counts, config.ema_decay)
    new["total"] = old["total"] + counts
    window = old["window"] + counts
    window_steps = old["window_steps"] + 1
    full = window_steps >= config.theta_window
    window_last = torch.where(full[..., None], window, old["window_last"])
    new["window"] = torch.where(full[..., None], 0, window)
    new["window_last"] = window_last
    new["window_steps"] = torch.where(full, 0, window_steps)

    if config.moves_keys:
        keys = old["keys"]
        delta = torch.zeros_like(keys)
        if config.attracts:
            mass = usage if config.inertia_by == "share" else new["total"].to(usage.dtype)
            delta = delta + attraction(keys, routing.query_sum, counts, mass, config)
        if config.pulls_peers:
            delta = delta + peer_force(keys, routing.pairs, beta)
        if config.decays:
            underused = find_underused(usage, window_last, config)
            if config.decay_mode == "shrink":
                delta = delta + shrink(keys, underused, config.delta)
            else:
                delta = delta + seek(keys, underused, config.delta, sample, num_sampled)
        if config.max_step is not None:
            delta = limit(delta, config.max_step)
        keys = keys + delta
        if config.normalize:
            keys = renormalize(keys, old["keys"])
        reborn = torch.zeros_like(usage, dtype=torch.bool)
        if config.respawns:
            patience = torch.where(usage < config.respawn_below, old["patience"] + 1, 0)
            turn = choose_respawns(usage, patience, config, num_sampled)
            reborn = turn >= 0
            keys = torch.where(reborn[..., None], pick(sample, turn).to(keys.dtype), keys)
            usage = torch.where(reborn, 1.0, usage)
            new["patience"] = torch.where(reborn, 0, patience)
            new["respawns"] = old["respawns"] + reborn
        new["keys"] = keys
        if "smoothed" in old:
            smoothed = config.key_ema * old["smoothed"] + (1 - config.key_ema) * keys
            new["smoothed"] = torch.where(reborn[..., None], keys, smoothed)
    new["usage"] = usage
    if config.balance_rate:
        new["bias"] = update_bias(old["bias"], counts, config.balance_rate)
    if "query_mean" in old:
        mean = routing.raw_sum.to(old["query_mean"].dtype) / routing.num_tokens.clamp(min=1)[..., None]
        new["query_mean"] = config.center_decay * old["query_mean"] + (1 - config.center_decay) * mean

    selected = counts.sum(-1) > 0
    for name, value in new.items():
        within = [None] * (value.dim() - selected.dim())  # the buffer's own dimensions, after the layers'
        new[name] = torch.where(selected[..., *within], value, old[name])
    return new

"""How the keys move. The rules as equations, with these field names, are in docs/gravity.md."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from some_moe.config.base import Config, Count, Decay, Natural, NonNegative, Positive, Share, Size
from some_moe.config.model import ModelConfig
from some_moe.errors import ConfigError


class GravityConfig(Config):
    """How the keys move after each step, without gradients. Strength 0 is the same as absence."""

    use_alpha: bool = True
    """Switch for attraction, as in the published reports."""
    use_beta: bool = True
    """Switch for the peer force."""
    use_delta: bool = True
    """Switch for decay."""

    ema_decay: Decay = 0.99
    """γ of the running usage u ← γu + (1−γ)·E·n/Σn; 1 is a fair share."""

    alpha: NonNegative = 0.01
    """Attraction: a key moves this share of the way to the mean unit query of its tokens."""
    alpha_floor: NonNegative = 0.0
    """Attraction never falls below this, however great the inertia; at most alpha."""
    inertia: bool = True
    """Divide alpha by 1 + u, so that heavily used experts move less."""
    inertia_by: Literal["share", "count"] = "share"
    """Inertia grows with the running share u, or with every selection there ever was, and is then never lost."""

    beta: float = 0.005
    """Peer force: > 0 pulls experts that run together closer, < 0 pushes them apart."""
    beta_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Whether |beta| goes to beta_end over the run, in a line or along a half cosine."""
    beta_end: NonNegative = 0.0
    """|beta| at the end of the schedule (linear or cosine)."""
    beta_layer_scale: tuple[NonNegative, ...] = ()
    """Factor on beta for each layer (study D1); empty means 1 everywhere."""

    delta: NonNegative = 0.001
    """Decay of under-used experts' keys."""
    decay_mode: Literal["seek", "shrink"] = "seek"
    """Under-used keys move towards a sampled query, or shrink towards zero."""
    theta: Natural | None = None
    """Under-used: fewer than theta selections within the last full window of theta_window gravity steps."""
    theta_window: Count = 100
    """Length of that window, in gravity steps."""
    theta_percentile: Share | None = 0.05
    """Under-used: usage u below this quantile of all experts' u. Either theta or theta_percentile is set."""

    max_step: Positive | None = None
    """Longest step ‖Δ‖ that a key makes; null is no limit."""
    normalize: bool = False
    """Scale every key to unit length after each step."""

    respawn_below: NonNegative = 0.0
    """Phoenix: a key whose u stays below this is moved onto a sampled query; 0 is off."""
    respawn_patience: Count = 100
    """For how many gravity steps in a row u must be below respawn_below."""
    respawn_max: Size = 4
    """At most so many respawns a layer and step, the least used first."""

    balance_rate: NonNegative = 0.0
    """Step ε of the selection bias b += ε·sign(1 − load share × E); b is never in the gate."""
    key_ema: Decay = 0.0
    """Routing uses an average of past keys with this decay; 0 uses the keys themselves."""
    center_decay: Decay = 0.99
    """Decay of the running query mean (model.center_queries)."""

    every: Count = 1
    """Gravity acts on every so many steps."""
    token_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the tokens that count, chosen by a hash of seed, step, layer, row and position."""
    frozen_layers: tuple[Natural, ...] = ()
    """Layers whose keys stay as they were made (study D2)."""
    num_samples: Size = 32
    """Unit queries sampled a step and layer, to seek or to respawn at."""

    @classmethod
    def off(cls, **values: object) -> "GravityConfig":
        """Keys that never move: attraction, peer force and decay switched off."""
        return cls(**({"use_alpha": False, "use_beta": False, "use_delta": False} | values))

    @property
    def attracts(self) -> bool:
        return self.use_alpha and self.alpha > 0

    @property
    def pulls_peers(self) -> bool:
        return self.use_beta and self.beta != 0

    @property
    def decays(self) -> bool:
        return self.use_delta and self.delta > 0

    @property
    def respawns(self) -> bool:
        return self.respawn_below > 0

    @property
    def moves_keys(self) -> bool:
        """Whether any rule changes the keys that routing sees."""
        return self.attracts or self.pulls_peers or self.decays or self.respawns

    def find_problems(self) -> Iterator[str]:
        if self.alpha_floor > self.alpha:
            yield f"alpha_floor {self.alpha_floor} is above alpha {self.alpha}; lower the floor"
        if self.inertia_by == "count" and not self.inertia:
            yield "inertia_by count needs inertia: true; set it, or leave inertia_by at share"
        if self.pulls_peers and self.beta < 0 and not self.normalize and self.max_step is None:
            yield f"beta {self.beta} repels without bound; set normalize: true or a max_step such as 0.1"
        if self.beta_schedule == "constant" and self.beta_end:
            yield f"beta_end {self.beta_end} needs beta_schedule: linear or cosine"
        if self.decays and self.decay_mode == "shrink" and self.normalize:
            yield "decay_mode shrink does nothing to unit keys; set decay_mode: seek or normalize: false"
        if (self.theta is None) == (self.theta_percentile is None):
            both = f"theta {self.theta} and theta_percentile {self.theta_percentile}"
            yield f"{both}: set one of them, and the other to null"
        if self.respawn_max > self.num_samples:
            more = f"respawn_max {self.respawn_max} is more than num_samples {self.num_samples}"
            yield f"{more}: two experts would share a key; raise num_samples"


def check_gravity_fits(model: ModelConfig, gravity: GravityConfig) -> None:
    """Refuse rules of gravity that this model's keys cannot follow."""
    for problem in find_misfits(model, gravity):
        raise ConfigError(problem)


def find_misfits(model: ModelConfig, gravity: GravityConfig) -> Iterator[str]:
    """What of gravity this model's keys cannot follow, a sentence each."""
    if gravity.decays and gravity.decay_mode == "shrink" and model.score == "cosine":
        yield "gravity.decay_mode shrink does nothing under model.score cosine; set decay_mode: seek"
    if model.ffn != "some" or model.router != "gravity":
        keys = f"model.ffn: {model.ffn}" if model.ffn != "some" else f"model.router: {model.router}"
        if gravity.moves_keys:
            still = "set gravity.use_alpha, use_beta and use_delta to false and respawn_below to 0"
            yield f"{keys} has no keys that gravity moves; {still}"
        if gravity.key_ema:
            yield f"gravity.key_ema {gravity.key_ema} smooths moving keys, and {keys} has none; set it 0"
        if gravity.balance_rate and (model.ffn != "some" or model.router == "hash"):
            yield f"gravity.balance_rate needs scores, and {keys} has none; set it 0"
    layers, factors = model.num_layers, len(gravity.beta_layer_scale)
    for layer in gravity.frozen_layers:
        if layer >= layers:
            yield f"gravity.frozen_layers names layer {layer}, but the last of {layers} is {layers - 1}"
    if factors and factors != layers:
        yield f"gravity.beta_layer_scale has {factors} factors for {layers} layers; give one a layer, or none"

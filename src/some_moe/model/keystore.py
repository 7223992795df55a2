"""The key store of one layer: where each expert is found, and what gravity remembers about it."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from some_moe.config import GravityConfig, ModelConfig
from some_moe.hashing import derive_key

NO_WINDOW_YET = -1  # in `window_last` before the first full window


class KeyState(nn.Module):
    """E keys of width d and their history. Buffers only, and gravity alone writes them.

    Learned keys (router: learned) are the exception: there `keys` is a parameter and belongs to the optimizer.
    """

    keys: Tensor  # (E, D)
    usage: Tensor  # (E,) running share of the load times E
    window: Tensor  # (E,) selections in the present window
    window_last: Tensor  # (E,) selections in the last full window, or NO_WINDOW_YET
    window_steps: Tensor  # () gravity steps in the present window
    total: Tensor  # (E,) selections ever counted
    patience: Tensor  # (E,) gravity steps in a row with usage below respawn_below
    respawns: Tensor  # (E,) how often each expert was respawned
    bias: Tensor  # (E,) selection bias
    smoothed: Tensor | None  # (E, D) average of past keys, with key_ema
    query_mean: Tensor | None  # (D,) running mean of the raw queries, with center_queries

    def __init__(self, model: ModelConfig, gravity: GravityConfig, layer: int, seed: int) -> None:
        super().__init__()
        self.layer = layer
        self.seed = seed
        experts, d = model.num_experts, model.d_model
        keys = torch.empty(experts, d)
        if model.router == "learned":
            self.keys = nn.Parameter(keys)
        else:
            self.register_buffer("keys", keys)
        for name in ("window", "total", "patience", "respawns"):
            self.register_buffer(name, torch.zeros(experts, dtype=torch.int64))
        self.register_buffer("window_last", torch.full((experts,), NO_WINDOW_YET))
        self.register_buffer("window_steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("usage", torch.ones(experts))
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("smoothed", torch.empty(experts, d) if gravity.key_ema else None)
        self.register_buffer("query_mean", torch.zeros(d) if model.center_queries else None)
        self.scatter_keys()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `.to()`, `.half()`, `.cuda()` and the like call: the store goes along, but stays in float32 or better.

        A step of gravity changes keys and usage by less than half precision can tell, and would be lost in it.
        """

        def keep_wide(old: Tensor) -> Tensor:
            new = fn(old)
            if new.is_floating_point() and new.itemsize < torch.float32.itemsize:
                return old.to(new.device, torch.float32)  # the old one: the new one is rounded already
            return new

        super()._apply(keep_wide, recurse)  # type: ignore[no-untyped-call]
        return self

    @torch.no_grad()
    def scatter_keys(self) -> None:
        """Put every key at a random place on the unit sphere, chosen by seed and layer."""
        if self.keys.is_meta:
            return
        generator = torch.Generator().manual_seed(derive_key(self.seed, self.layer)[0] & 0x7FFFFFFF)
        self.place_keys(torch.randn(self.keys.shape, generator=generator, device="cpu"))

    @torch.no_grad()
    def place_keys(self, directions: Tensor) -> None:
        """Put the keys at the given directions (E, D), at unit length."""
        self.keys.copy_(nn.functional.normalize(directions.to(self.keys), dim=-1))
        if self.smoothed is not None:
            self.smoothed.copy_(self.keys)

    @property
    def routing_keys(self) -> Tensor:
        """The keys that queries meet: smoothed ones where they are kept."""
        return self.keys if self.smoothed is None else self.smoothed

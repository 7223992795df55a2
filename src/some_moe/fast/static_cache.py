"""A cache of fixed room for a captured step of generation. Shapes: P positions of room, H heads."""

import torch
from torch import Tensor

from some_moe.config import ModelConfig
from some_moe.model.attention import Cache, Geometry, alibi_slopes, rotary_angles


class StaticCache(Cache):
    """A cache whose room a captured step reads as a whole, and writes at a position that is kept on the device."""

    def __init__(self, max_length: int, device: torch.device) -> None:
        super().__init__(max_length)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.steps = False  # whether the prompt is in, and tokens come one by one

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `Cache.extend`; all of the room where tokens come one by one."""
        if not self.steps:
            return super().extend(layer, keys, values)
        for room, new in zip(self.rooms[layer], (keys, values), strict=True):
            room.index_copy_(2, self.position[None], new)
        return self.rooms[layer]

    def clear(self) -> None:
        """What was never written is read too, masked: it must be numbers."""
        for keys, values in self.rooms.values():
            keys[:, :, self.length :] = 0
            values[:, :, self.length :] = 0

    def locate(self, model: ModelConfig) -> tuple[Tensor, Geometry]:
        """The position (1, 1) of the next token, and what it sees (1, H or 1, 1, P)."""
        here = self.position[None, None]
        place = torch.arange(self.max_length, device=here.device)
        mask = (place <= here)[None, None]
        if model.positions == "alibi":
            bias = -alibi_slopes(model.num_heads, here.device)[None, :, None, None] * (here - place).float()
            mask = bias.masked_fill(~mask, -torch.inf)
        rotation = rotary_angles(here, model.head_width) if model.positions == "rope" else None
        return here, Geometry(rotation=rotation, mask=mask, is_causal=False)

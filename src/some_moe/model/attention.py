"""Causal self-attention with rotary, ALiBi or sinusoidal positions, and a cache of keys and values.

Shapes: B rows, T new positions, P past positions, H heads, W head width, D = H·W.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.config import ModelConfig
from some_moe.model.linear import Linear


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Where the tokens stand and who may see whom: made once a forward pass, used by all blocks."""

    rotation: tuple[Tensor, Tensor] | None  # cosines and sines, each (B or 1, 1, T, W/2)
    mask: Tensor | None  # (B or 1, H or 1, T, P+T): bool, or additive float; None is plain causal or nothing
    is_causal: bool  # plain causal attention without a mask


def make_geometry(
    config: ModelConfig,
    positions: Tensor,
    past_positions: Tensor | None = None,
    segments: Tensor | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> Geometry:
    """positions (B or 1, T) of the new tokens, past_positions (B or 1, P) of the cached ones.

    segments (B, T): tokens see only tokens of the same segment (packed rows; not with a cache).
    rotation: the rotary angles of the positions, where they are at hand.
    """
    if rotation is None and config.positions == "rope":
        rotation = rotary_angles(positions, config.head_width)
    time, past = positions.shape[1], 0 if past_positions is None else past_positions.shape[1]
    if config.positions != "alibi" and segments is None and (past == 0 or time == 1):
        return Geometry(rotation=rotation, mask=None, is_causal=time > 1)
    place = torch.arange(past + time, device=positions.device)
    visible = (place[None, :] <= place[past:, None])[None, None]
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    if config.positions != "alibi":
        return Geometry(rotation=rotation, mask=visible, is_causal=False)
    seen = positions if past_positions is None else torch.cat((past_positions, positions), dim=1)
    distance = (positions[:, None, :, None] - seen[:, None, None, :]).float()
    bias = -alibi_slopes(config.num_heads, positions.device)[None, :, None, None] * distance
    return Geometry(rotation=None, mask=bias.masked_fill(~visible, -torch.inf), is_causal=False)


def rotary_angles(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B or 1, 1, T, width/2) of the rotary angles, wavelengths from 2π to 2π·10,000."""
    inverse = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angle = positions[:, None, :, None].float() * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + W/2) of x (B, H, T, W) by its angle."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Slopes 2^(−8(h+1)/H): nearer tokens count more, each head in its own measure."""
    head = torch.arange(1, num_heads + 1, device=device, dtype=torch.float32)
    return torch.exp2(-8.0 * head / num_heads)


def sinusoidal_positions(positions: Tensor, d_model: int) -> Tensor:
    """Fixed sine and cosine waves (B or 1, T, D) to add to the embeddings."""
    inverse = 10000.0 ** (-torch.arange(0, d_model, 2, device=positions.device, dtype=torch.float32) / d_model)
    angle = positions[..., None].float() * inverse
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


class Cache:
    """Keys and values of the tokens so far, for every layer, in room for `max_length` positions."""

    def __init__(self, max_length: int) -> None:
        self.max_length, self.length = max_length, 0
        self.rooms: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer, (B, H, max_length, W)
        self.context: Tensor | None = None  # what `SomeLM.context` keeps from pass to pass

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, H, T, W) behind the past ones; return all of them."""
        if layer not in self.rooms:
            shape = (*keys.shape[:2], self.max_length, keys.shape[3])
            self.rooms[layer] = keys.new_empty(shape), values.new_empty(shape)
        end = self.length + keys.shape[2]
        for room, new in zip(self.rooms[layer], (keys, values), strict=True):
            room[:, :, self.length : end] = new
        all_keys, all_values = self.rooms[layer]
        return all_keys[:, :, :end], all_values[:, :, :end]


class Attention(nn.Module):
    """Four d×d projections with biases around scaled dot-product attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.query = Linear(config.d_model, config.d_model)
        self.key = Linear(config.d_model, config.d_model)
        self.value = Linear(config.d_model, config.d_model)
        self.out = Linear(config.d_model, config.d_model)

    def place_heads(self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, T, D) as (B, H, T, W), turned to their positions."""
        q, k, v = (part.view(*part.shape[:-1], self.num_heads, -1).transpose(1, 2) for part in (q, k, v))
        if geometry.rotation is not None:
            q, k = rotate(q, geometry.rotation), rotate(k, geometry.rotation)
        return q, k, v

    def attend(self, qkv: tuple[Tensor, ...], geometry: Geometry, cache: Cache | None) -> Tensor:
        """What each token gathers from those it sees (B, T, D), by queries, keys and values (B, H, T, W)."""
        q, k, v = qkv
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        mask = geometry.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=geometry.is_causal)
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, geometry: Geometry, cache: Cache | None = None) -> Tensor:
        """x (B, T, D) → (B, T, D)."""
        qkv = self.place_heads(self.query(x), self.key(x), self.value(x), geometry)
        y: Tensor = self.out(self.attend(qkv, geometry, cache))
        return y

"""How the next token is chosen from a model's logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from some_moe.errors import ConfigError, FailureError

COLDEST = 1e-3  # below it the softmax is the likeliest token alone, and then no number at all


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. What is left out leaves the model's own choice as it is."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, value, good, cure in (
            ("temperature", self.temperature, self.temperature == 0 or self.temperature >= COLDEST,
             f"use 0 for the likeliest token, or {COLDEST} and more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "use more than 0 and at most 1"),
            ("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "use 1 or more"),
            ("repetition_penalty", self.repetition_penalty, 0.1 <= self.repetition_penalty <= 10, "use 0.1 to 10"),
        ):  # fmt: skip
            if not good:
                raise ConfigError(f"{name} {value} is out of range; {cure}")


def choose_token(
    logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None, top_k: int | None = None
) -> Tensor:
    """Choose one token a row from logits (B, V): the likeliest at temperature 0, else drawn from the top_p mass."""
    Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    if not bool(logits.isfinite().all()):
        raise FailureError("the model gives no number for the next token (nan or infinity); use an earlier checkpoint")
    if temperature == 0:
        return logits.argmax(-1)
    share = (logits.float() / temperature).softmax(-1)
    if top_p < 1 or top_k is not None:
        ordered, place = share.sort(descending=True)
        # A token is kept while the mass before it is below top_p, so the likeliest one always is.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        ordered[..., top_k or len(ordered[0]) :] = 0.0
        share = torch.zeros_like(share).scatter(-1, place, ordered)
    return torch.multinomial(share, 1, generator=generator).squeeze(-1)

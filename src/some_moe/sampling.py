"""How the next token is chosen from a model's logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from some_moe.errors import ConfigError, FailureError
from some_moe.hashing import derive_key, hash_words, to_unit24

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
    how = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    noise = (
        None if temperature == 0 else torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator)
    )
    return refuse_nothing(pick_token(logits, how, noise))


def refuse_nothing(chosen: Tensor) -> Tensor:
    """The chosen tokens (B,), unless a row has none."""
    if bool((chosen < 0).any()):
        raise FailureError("the model gives no number for the next token (nan or infinity); use an earlier checkpoint")
    return chosen


def pick_token(logits: Tensor, how: Sampling, noise: Tensor | None) -> Tensor:
    """One token a row (B,) of logits (B, V), −1 where they are no numbers. No value is read back to the host.

    noise (B, V), exponential: the largest share over noise is a draw by the shares; None at temperature 0.
    """
    usable = logits.isfinite().all(-1)
    if noise is None:
        return torch.where(usable, logits.argmax(-1), -1)
    share = (logits.float() / how.temperature).softmax(-1)
    if how.top_p < 1 or how.top_k is not None:
        ordered, place = share.sort(descending=True)
        # A token is kept while the mass before it is below top_p, so the likeliest one always is.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= how.top_p, 0.0)
        ordered[..., how.top_k or len(ordered[0]) :] = 0.0
        share = torch.zeros_like(share).scatter(-1, place, ordered)
    return torch.where(usable, (share / noise).argmax(-1), -1)


class Chooser:
    """Chooses a row's next token again and again. What it remembers is on the device, so that a GPU can capture it.

    seeds: one a row; a row's choices follow from its seed and its logits alone, whatever rows are beside it. With a
    generator instead, from the order in which they are made too.
    """

    def __init__(
        self,
        how: Sampling,
        shape: tuple[int, int],
        device: torch.device,
        *,
        seeds: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """shape: rows B and vocabulary V."""
        self.how, self.generator = how, generator
        self.seen = torch.zeros(shape, dtype=torch.bool, device=device)
        self.step = torch.zeros((), dtype=torch.int32, device=device)
        self.keys = None
        if seeds is not None:
            self.keys = torch.tensor([derive_key(seed) for seed in seeds], dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, fresh: Tensor) -> Tensor:
        """Choose (B,) by logits (B, V) behind the tokens `fresh` (B, T), all that came since the last choice."""
        penalty = self.how.repetition_penalty
        if penalty != 1:
            self.seen.scatter_(1, fresh, True)
            less = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self.seen, less, logits)
        chosen = pick_token(logits, self.how, self.draw_noise() if self.how.temperature else None)
        self.step += 1
        return chosen

    def draw_noise(self) -> Tensor:
        """Exponential noise (B, V), new at every step."""
        if self.keys is None:
            return torch.empty(self.seen.shape, device=self.seen.device).exponential_(generator=self.generator)
        vocab_size = self.seen.shape[1]
        counter = torch.arange(vocab_size, dtype=torch.int32, device=self.seen.device) + self.step * vocab_size
        first, second = self.keys[:, None].unbind(-1)
        words = to_unit24(hash_words(counter, first, second)) >> 1  # 23 bits: with a half more, float32 holds them all
        return -((words.float() + 0.5) * 2.0**-23).log()

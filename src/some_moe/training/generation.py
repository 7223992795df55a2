"""Text from a model, one token after another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from some_moe.config import ConfigError
from some_moe.data.tokenizer import BOS, EOS, Tokenizer
from some_moe.model.attention import Cache
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM

COLDEST = 1e-3  # below it the softmax is the likeliest token alone, and then no number at all
MOST_TOKENS = 100_000


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


@torch.no_grad()
def generate_tokens(
    model: SomeLM,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    stop: int | None = None,
    generator: torch.Generator | None = None,
    **sampling: Any,
) -> Iterator[Tensor]:
    """Continue prompt (B, T), yielding one token a row (B,) at a time, until every row has made `stop`.

    sampling: see `Sampling`.
    """
    how = Sampling(**sampling)
    if prompt.shape[1] == 0:
        raise ValueError("the prompt is empty; start it with at least one token, such as the bos token")
    if not 1 <= max_new_tokens <= MOST_TOKENS:
        raise ConfigError(f"max_tokens {max_new_tokens} is out of range; use 1 to {MOST_TOKENS:,}")
    cache = Cache(prompt.shape[1] + max_new_tokens)
    done = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    seen = torch.zeros(prompt.shape[0], model.model.vocab_size, dtype=torch.bool, device=prompt.device)
    fresh = prompt
    for _ in range(max_new_tokens):
        info = TokenInfo.of(fresh.shape, fresh.device, sums=False)
        logits = model(fresh, info, cache=cache).logits[:, -1]
        if not bool(logits.isfinite().all()):
            raise ConfigError("the model's logits are no finite numbers; use a checkpoint before its training diverged")
        if how.repetition_penalty != 1:
            seen.scatter_(1, fresh, torch.ones_like(fresh, dtype=torch.bool))
            less = torch.where(logits > 0, logits / how.repetition_penalty, logits * how.repetition_penalty)
            logits = torch.where(seen, less, logits)
        chosen = choose_token(logits, how.temperature, how.top_p, generator, how.top_k)
        yield chosen
        if stop is not None:
            done |= chosen == stop
            if bool(done.all()):
                return
        fresh = chosen[:, None]


def stream_text(
    model: SomeLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    seed: int = 0,
    stop: Sequence[str] = (),
    **sampling: Any,
) -> Iterator[str]:
    """Yield the continuation of the prompt in pieces; pieces end at whole characters. Stops at the story's end.

    stop: texts before which it stops, too. sampling: see `Sampling`; temperature is 0.8 and top_p 0.95 where they are
    not given.
    """
    device = model.head.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    start = torch.tensor([[BOS, *tokenizer.encode(prompt)]], device=device)
    ids: list[int] = []
    held = ""  # text that may turn out to be the beginning of a stop
    sampling = {"temperature": 0.8, "top_p": 0.95} | sampling
    for token in generate_tokens(model, start, max_new_tokens, **sampling, stop=EOS, generator=generator):
        ids.append(int(token))
        text = tokenizer.decode(ids)
        # A character may need several tokens: wait until its bytes are complete.
        if text.endswith("\ufffd"):
            continue
        ids, held = [], held + text
        ends = [held.index(word) for word in stop if word in held]
        if ends:
            held = held[: min(ends)]
            break
        waits = max((n for word in stop for n in range(1, len(word)) if held.endswith(word[:n])), default=0)
        if len(held) > waits:
            yield held[: len(held) - waits]
            held = held[len(held) - waits :]
    if held:
        yield held

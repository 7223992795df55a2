"""Text from a model, one token after another."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from some_moe.config import ConfigError
from some_moe.data.tokenizer import BOS, EOS, Tokenizer
from some_moe.model.attention import Cache
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM
from some_moe.sampling import Sampling, choose_token

MOST_TOKENS = 100_000


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

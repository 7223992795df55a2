"""Text from a model, one token after another."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from some_moe.config import ConfigError
from some_moe.data.tokenizer import BOS, EOS, Tokenizer
from some_moe.model.attention import Cache
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM
from some_moe.sampling import Chooser, Sampling, refuse_nothing

MOST_TOKENS = 100_000
MOST_ROWS = 64  # texts that are told side by side


@torch.no_grad()
def generate_tokens(
    model: SomeLM,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    stop: int | None = None,
    generator: torch.Generator | None = None,
    seeds: Sequence[int] | None = None,
    **sampling: Any,
) -> Iterator[Tensor]:
    """Continue prompt (B, T), yielding one token a row (B,) at a time, until every row has made `stop`.

    seeds or generator: see `Chooser`. sampling: see `Sampling`.
    """
    how = Sampling(**sampling)
    if prompt.shape[1] == 0:
        raise ValueError("the prompt is empty; start it with at least one token, such as the bos token")
    if not 1 <= max_new_tokens <= MOST_TOKENS:
        raise ConfigError(f"max_tokens {max_new_tokens} is out of range; use 1 to {MOST_TOKENS:,}")
    shape = (prompt.shape[0], model.model.vocab_size)
    choose = Chooser(how, shape, prompt.device, seeds=seeds, generator=generator)
    done = torch.zeros(prompt.shape[0], dtype=torch.bool)
    own: Callable[..., Iterator[Tensor]] | None = getattr(model, "decode", None)  # the fast model has a way of its own
    for chosen in (own or partial(decode_plainly, model))(prompt, max_new_tokens, choose):
        yield refuse_nothing(chosen)
        if stop is not None:
            done |= (chosen == stop).cpu()
            if bool(done.all()):
                return


def decode_plainly(model: SomeLM, prompt: Tensor, max_new_tokens: int, choose: Chooser) -> Iterator[Tensor]:
    """The tokens (B,) behind prompt (B, T), one pass of the model each."""
    cache = Cache(prompt.shape[1] + max_new_tokens)
    fresh = prompt
    for _ in range(max_new_tokens):
        info = TokenInfo.of(fresh.shape, fresh.device, sums=False)
        chosen = choose(model(fresh, info, cache=cache).logits[:, -1], fresh)
        yield chosen
        fresh = chosen[:, None]


class Telling:
    """One row's tokens, as text that ends where it should."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.ids: list[int] = []
        self.held = ""  # text that may turn out to be the beginning of a stop
        self.ended = False

    def add(self, token: int) -> str:
        """The text that is certain with this token, up to a whole character."""
        if token == EOS:
            self.ended = True
        if self.ended:
            return ""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        # A character may need several tokens: wait until its bytes are complete.
        if text.endswith("\ufffd"):
            return ""
        self.ids, self.held = [], self.held + text
        ends = [self.held.index(word) for word in self.stop if word in self.held]
        if ends:
            self.ended, self.held = True, self.held[: min(ends)]
            return ""
        waits = max((n for word in self.stop for n in range(1, len(word)) if self.held.endswith(word[:n])), default=0)
        piece = self.held[: len(self.held) - waits]
        self.held = self.held[len(piece) :]
        return piece


def stream_texts(
    model: SomeLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    seeds: Sequence[int],
    stop: Sequence[str] = (),
    **sampling: Any,
) -> Iterator[tuple[int, str]]:
    """Tell one continuation of the prompt for each seed, side by side: (its number, the next piece), as they come.

    A continuation is the same whichever are told beside it, up to how sums round. See `stream_text`.
    """
    device = model.head.weight.device
    start = torch.tensor([[BOS, *tokenizer.encode(prompt)]], device=device).expand(len(seeds), -1)
    tellings = [Telling(tokenizer, stop) for _ in seeds]
    sampling = {"temperature": 0.8, "top_p": 0.95} | sampling
    for tokens in generate_tokens(model, start, max_new_tokens, **sampling, stop=EOS, seeds=seeds):
        for number, (telling, token) in enumerate(zip(tellings, tokens.tolist(), strict=True)):
            if piece := telling.add(token):
                yield number, piece
        if all(telling.ended for telling in tellings):
            break
    for number, telling in enumerate(tellings):
        if telling.held:
            yield number, telling.held


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
    for _, piece in stream_texts(model, tokenizer, prompt, max_new_tokens, seeds=[seed], stop=stop, **sampling):
        yield piece

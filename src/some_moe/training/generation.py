"""Text from a model, one token after another."""

from collections.abc import Iterator

import torch
from torch import Tensor

from some_moe.data.tokenizer import BOS, EOS, Tokenizer
from some_moe.model.attention import Cache
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM


def choose_token(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Choose one token a row from logits (B, V): the likeliest at temperature 0, else drawn from the top_p mass."""
    if temperature == 0:
        return logits.argmax(-1)
    share = (logits.float() / temperature).softmax(-1)
    if top_p < 1:
        ordered, place = share.sort(descending=True)
        # A token is kept while the mass before it is below top_p, so the likeliest one always is.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        share = torch.zeros_like(share).scatter(-1, place, ordered)
    return torch.multinomial(share, 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate_tokens(
    model: SomeLM,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Continue prompt (B, T), yielding one token a row (B,) at a time, until every row has made `stop`."""
    if prompt.shape[1] == 0:
        raise ValueError("the prompt is empty; start it with at least one token, such as the bos token")
    cache = Cache(prompt.shape[1] + max_new_tokens)
    done = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    fresh = prompt
    for _ in range(max_new_tokens):
        info = TokenInfo.of(fresh.shape, fresh.device, sums=False)
        logits = model(fresh, info, cache=cache).logits[:, -1]
        chosen = choose_token(logits, temperature, top_p, generator)
        yield chosen
        if stop is not None:
            done |= chosen == stop
            if bool(done.all()):
                return
        fresh = chosen[:, None]


def stream_text(
    model: SomeLM, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, *, seed: int = 0, **sampling: float
) -> Iterator[str]:
    """Yield the continuation of the prompt in pieces; pieces end at whole characters. Stops at the story's end.

    sampling: temperature and top_p, 0.8 and 0.95 where they are not given.
    """
    device = model.head.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    start = torch.tensor([[BOS, *tokenizer.encode(prompt)]], device=device)
    ids: list[int] = []
    shown = ""
    sampling = {"temperature": 0.8, "top_p": 0.95} | sampling
    for token in generate_tokens(model, start, max_new_tokens, **sampling, stop=EOS, generator=generator):
        ids.append(int(token))
        text = tokenizer.decode(ids)
        # A character may need several tokens: wait until its bytes are complete.
        if not text.endswith("\ufffd") and len(text) > len(shown):
            yield text[len(shown) :]
            shown = text

"""Text from a model and its tokenizer, as it comes."""

from collections.abc import Iterator

import torch

from some_moe.data.tokenizer import BOS, EOS, Tokenizer
from some_moe.model.generation import generate_tokens
from some_moe.model.transformer import SomeLM


def stream_text(
    model: SomeLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Iterator[str]:
    """Yield the continuation of the prompt in pieces; pieces end at whole characters. Stops at the story's end."""
    device = model.head.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    start = torch.tensor([[BOS, *tokenizer.encode(prompt)]], device=device)
    ids: list[int] = []
    shown = ""
    for token in generate_tokens(
        model, start, max_new_tokens, temperature=temperature, top_p=top_p, stop=EOS, generator=generator
    ):
        ids.append(int(token))
        text = tokenizer.decode(ids)
        # A character may need several tokens: wait until its bytes are complete.
        if not text.endswith("\ufffd") and len(text) > len(shown):
            yield text[len(shown) :]
            shown = text

"""Generation, ours beside others that continue the same prompts with the same weights: the likeliest token, again and
again, until there are enough. Each row is a text; nobody stops early."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from some_moe.lab.bench.timing import first_line, wait_for
from some_moe.model.transformer import SomeLM
from some_moe.training.generation import generate_tokens

WARMUP_CALLS = 2  # until all is compiled and recorded that ever will be
OURS = "some"

Row = dict[str, Any]
Teller = Callable[[Tensor, int], Tensor]  # prompt (B, T) and a count N → tokens (B, N)


def tell(model: SomeLM) -> Teller:
    """Our own way."""
    return lambda prompt, count: torch.stack([token.cpu() for token in generate_tokens(model, prompt, count)], 1)


def bench_generation(
    model: SomeLM,
    rows: Sequence[int],
    tellers: Mapping[str, Teller],
    *,
    prompt_tokens: int,
    tokens: int,
    repeats: int,
) -> Iterator[Row]:
    """Time ours and the others on so many rows at a time; yields one plain record for each number of rows.

    The time is of whole calls, prompt and all. same: the share of tokens up to the first that differs from ours.
    """
    device = model.head.weight.device
    for number in rows:
        source = torch.Generator().manual_seed(number)
        prompt = torch.randint(3, model.model.vocab_size, (number, prompt_tokens), generator=source).to(device)
        found: list[Row] = []
        ours: Tensor | None = None
        for name, teller in {OURS: tell(model), **tellers}.items():
            row: Row = {"name": name, "rows": number, "status": "ok", "reason": ""}
            try:
                told = [teller(prompt, tokens) for _ in range(WARMUP_CALLS)][-1].cpu()
                ours = told if ours is None else ours
                seconds = [time_call(teller, prompt, tokens, device) for _ in range(repeats)]
            except (RuntimeError, ValueError, TypeError) as error:  # others may fail in any way
                if name == OURS:
                    raise
                found.append(row | {"status": "failed", "reason": first_line(error)})
                continue
            middle = statistics.median(seconds)
            row |= {"seconds": middle, "tokens_per_second": number * tokens / middle, "ms": 1e3 * middle / tokens}
            found.append(row | {"same": float((told == ours).long().cumprod(1).double().mean())})
        timed = [row for row in found if "seconds" in row]
        fastest = min((row["seconds"] for row in timed if row["name"] != OURS), default=None)
        for row in timed:
            row["speed_to_fastest_peer"] = fastest and fastest / row["seconds"]
        yield {"rows": number, "prompt_tokens": prompt_tokens, "tokens": tokens, "found": found}


def time_call(teller: Teller, prompt: Tensor, tokens: int, device: torch.device) -> float:
    wait_for(device)
    started = time.perf_counter()
    teller(prompt, tokens)
    wait_for(device)
    return time.perf_counter() - started

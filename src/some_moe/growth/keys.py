"""Where new experts are found: keys among the base's queries on a text, and how readily they are chosen.

Shapes: T tokens, E experts of the base, N new ones, D model width.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from some_moe.config import RunConfig
from some_moe.data.batches import Batches, Rows
from some_moe.data.tokenizer import BOS, EOS
from some_moe.model.layer import SomeLayer
from some_moe.model.transformer import SomeLM
from some_moe.training.evaluate import evaluation_batches, forward
from some_moe.training.generation import generate_tokens

ROUNDS = 12  # of k-means
MOST_TOKENS = 65_536  # whose queries are looked at
WRITTEN_ROWS = 64  # of text that the base writes itself


class Queries(NamedTuple):
    """Of a text, as each layer's keys meet it."""

    layers: list[Tensor]  # (T, D) each, row after row
    ids: Tensor  # (T,) the tokens
    lengths: list[int]  # of the rows
    counts: Tensor  # (V,) of all words of the text


@torch.no_grad()
def collect_queries(model: SomeLM, rows: Rows, config: RunConfig) -> Queries:
    """The queries of a text's rows, in an order that is drawn, as far as they are looked at."""
    found: list[list[Tensor]] = [[] for _ in model.layers]
    ids: list[Tensor] = []
    lengths: list[int] = []
    device = model.embedding.weight.device
    shuffled = Batches(
        rows, evaluation_batches(rows, config).config, rows_a_step=config.data.batch_size, seed=0, keep_partial=True
    )
    for batch in shuffled.epoch(0):
        batch = batch.to(device)
        for layer, kept, routing in zip(model.layers, found, forward(model, batch, config).routings, strict=True):
            assert routing.query is not None
            assert layer.state is not None
            query = routing.query[batch.real].float()
            kept.append(query if layer.state.query_mean is None else query - layer.state.query_mean)
        ids.append(batch.inputs[batch.real])
        lengths += batch.real.sum(1).tolist()
        if sum(lengths) >= MOST_TOKENS:
            break
    ends = np.minimum(np.cumsum([0, *lengths]), MOST_TOKENS)
    cut = [length for length in np.diff(ends).tolist() if length]
    layers = [torch.cat(queries)[:MOST_TOKENS] for queries in found]
    counts = count_words(rows, model.embedding.num_embeddings).to(device)
    return Queries(layers, torch.cat(ids)[:MOST_TOKENS], cut, counts)


def count_words(rows: Rows, num_words: int) -> Tensor:
    """How often each word (V,) stands in a text of any size, piece after piece."""
    pieces = np.array_split(rows.ids, 1 + len(rows.ids) // 2**24)
    return torch.from_numpy(np.sum([np.bincount(piece, minlength=num_words) for piece in pieces], axis=0))


def spread_keys(queries: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Spherical k-means: `count` unit vectors (N, D) among queries (T, D), each the mean direction of those it is
    nearest to. The first is drawn, each further one far from those before it."""
    points = F.normalize(queries, dim=-1)
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    far = 1 - points @ points[chosen[0]]
    for _ in range(count - 1):
        weights = far.clamp(min=0).double().cpu()
        drawn = torch.multinomial(weights, 1, generator=generator) if weights.sum() > 0 else torch.zeros(1)
        chosen.append(int(drawn))
        far = torch.minimum(far, 1 - points @ points[chosen[-1]])
    keys = points[chosen].clone()
    for _ in range(ROUNDS):
        nearest = (points @ keys.T).argmax(-1)
        total = F.one_hot(nearest, count).to(points.dtype).T @ points
        keys = torch.where(total.norm(dim=-1, keepdim=True) > 0, F.normalize(total, dim=-1), keys)
    return keys


def score_margins(layer: SomeLayer, queries: Tensor, num_old: int) -> Tensor:
    """By how much new experts, without a bias, beat the last that each query (T, D) chooses of the base: (T, N)."""
    router, top_k = layer.key_router, layer.model.top_k
    assert router is not None
    scores = router.score(queries)
    old = scores[:, :num_old] + router.state.bias[:num_old]
    return scores[:, num_old:] - old.topk(top_k, dim=-1).values[:, -1:]


@torch.no_grad()
def calibrate(layer: SomeLayer, queries: Tensor, num_old: int, share: float) -> Tensor:
    """The bias (N,) at which new experts together are chosen for at most that share of the tokens of queries (T, D).

    Each may have an equal part of it: one whose key lies among the old text's queries is held back, the others are not.
    """
    margins = score_margins(layer, queries, num_old)
    count, experts = margins.shape
    place = max(1, math.ceil(count * (1 - share / experts))) - 1
    return -margins.sort(dim=0).values[place]  # `kthvalue` has no deterministic form on a GPU


@torch.no_grad()
def write_rows(model: SomeLM, length: int, seed: int, vocab_size: int, count: int = WRITTEN_ROWS) -> Rows:
    """Text that the model writes itself, drawn as it finds likely: `count` rows of at most `length` tokens."""
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    prompt = torch.full((count, 1), BOS, device=device)
    drawn = generate_tokens(model, prompt, length, stop=EOS, generator=generator, temperature=1.0, top_p=1.0)
    rows = torch.cat([prompt, torch.stack(list(drawn), 1)], 1).clamp(max=vocab_size - 1).cpu().numpy()
    return join_rows(row[: list(row).index(EOS) + 1] if EOS in row else row for row in rows)


def join_rows(rows: Iterable[np.ndarray]) -> Rows:
    kept = [row.astype(np.uint16) for row in rows]
    return Rows(np.concatenate(kept), np.cumsum([0, *map(len, kept)]))

"""The dense model's ways to learn six domains: in turn, with and without old text; added up; adapters; and joint.

Shapes: R rows, A adapters (the first is the base without any), D model width.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from some_moe.data.batches import Rows
from some_moe.growth.context import weigh_words
from some_moe.growth.keys import count_words
from some_moe.model.linear import Linear
from some_moe.model.transformer import SomeLM
from some_moe.training.evaluate import evaluation_batches, forward
from tools.grow_study.bench import MIXED, Bench, Losses, base_config, row_of
from tools.grow_study.plan import FACTORS, LEANINGS, REPLAY, SHARES

Weights = dict[str, Tensor]
Scores = Mapping[str, Mapping[str, Tensor]]  # of one model: by split and text, as `Bench.score_rows`
Nearness = Mapping[str, Mapping[str, Tensor]]  # of the rows of a split and text to each model: (R, A)


def weights_of(model: SomeLM) -> Weights:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@torch.no_grad()
def blend(model: SomeLM, base: Weights, ends: list[Weights], factor: float) -> SomeLM:
    """Set a model to the base and `factor` of each change from it."""
    for name, value in model.named_parameters():
        value.copy_(base[name] + factor * sum(end[name] - base[name] for end in ends))
    return model


def learn_in_turn(bench: Bench, method: str, rate: float) -> dict[str, Any]:
    """One domain after another, in an order that turns with the seed; then interpolated with the base."""
    base, model = weights_of(bench.base), bench.fresh()
    domains = list(np.roll(bench.study.domains, -bench.seed))
    for domain in domains:
        text = bench.replayed(domain, REPLAY[method], written=method == "replay-written")
        bench.learn(model, text, rate, [domain])
    end = weights_of(model)
    rows = [row_of(share, bench.score(blend(model, base, [end], share))) for share in SHARES]
    size = sum(value.numel() for value in base.values())
    return {"rows": rows, "trained": size, "stored": size, "order": domains}


def learn_apart(bench: Bench, rate: float) -> dict[str, Any]:
    """Each domain from the base; then all changes added. Beside it: each model on its own domain, told or by words."""
    base, model = weights_of(bench.base), bench.fresh()
    ends, scores = [], []
    for domain in bench.study.domains:
        model = bench.learn(blend(model, base, [], 0), bench.text(domain).train, rate, [domain])
        ends.append(weights_of(model))
        scores.append(score_rows(bench, model))
    scores = [score_rows(bench, bench.base), *scores]
    apart = {"told": [row_of(0.0, tell(bench, scores))], "by_words": choose_rows(bench, scores, hear_rows(bench))}
    rows = [row_of(factor, bench.score(blend(model, base, ends, factor))) for factor in FACTORS]
    size = sum(value.numel() for value in base.values())
    of_all = size * len(ends)
    return {"rows": rows, "trained": of_all, "stored": size, **apart, "told_stored": of_all}


# --- adapters -------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """W + out @ in, of a linear map's weight W; it begins as W."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        (rows, columns), device = weight.shape, weight.device
        self.into = nn.Parameter(torch.randn(rank, columns, device=device) / columns**0.5)
        self.out = nn.Parameter(torch.zeros(rows, rank, device=device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.out @ self.into


def adapt(bench: Bench, domain: str, rate: float) -> tuple[SomeLM, int]:
    """The base with a low-rank update of every map, the head's too, that has learned a domain, and its parameters."""
    model = bench.fresh().requires_grad_(False)
    torch.manual_seed(bench.seed)
    for module in list(model.modules()):
        if isinstance(module, Linear):
            parametrize.register_parametrization(module, "weight", LowRank(module.weight, bench.size.adapter_rank))
            module.parametrizations["weight"].original.requires_grad_(False)  # type: ignore[index, union-attr]
    size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return bench.learn(model, bench.text(domain).train, rate, [domain]), size


def learn_adapters(bench: Bench, rate: float) -> dict[str, Any]:
    """An adapter a domain; each row takes that whose prototype is nearest, or the base. Beside it: that for which its
    words speak; and the domain told.

    A row is known by all of its text, before any of it is scored: that favours this control.
    """
    study, size = bench.study, 0
    scores = [score_rows(bench, bench.base)]
    texts = [bench.written]
    for domain in study.domains:
        model, own = adapt(bench, domain, rate)
        size += own
        scores.append(score_rows(bench, model))
        texts.append(first_rows(bench.text(domain).train, bench.size.written_rows))
    prototypes = torch.stack([describe_rows(bench, rows).mean(0) for rows in texts])  # (A, D)
    middle = prototypes.mean(0)
    nearness = {
        split: {name: cosines(describe_rows(bench, rows) - middle, prototypes - middle) for name, rows in of.items()}
        for split, of in bench.scored.items()
    }
    rows = choose_rows(bench, scores, nearness)
    told = [row_of(0.0, tell(bench, scores))]
    stored = size + prototypes.numel()
    found = {"rows": rows, "trained": size, "stored": stored, "told": told, "told_stored": stored}
    return found | {"by_words": choose_rows(bench, scores, hear_rows(bench))}


def choose_rows(bench: Bench, scores: list[Scores], nearness: Nearness) -> list[dict[str, Any]]:
    """The curve of models each of which takes the rows that are nearest to it, the base's held back or not."""
    rows = []
    for leaning in LEANINGS:

        def score(split: str, name: str, leaning: float = leaning) -> Tensor:
            near = nearness[split][name].clone()
            near[:, 1:] += leaning
            return pick(scores, split, name, near.argmax(1))

        rows.append(row_of(leaning, bench.summarize(score)))
    return rows


def hear_rows(bench: Bench) -> Nearness:
    """What the words of a row say for each domain, on the mean, as they do in a library that looks back."""
    old = count_words(bench.written, bench.vocab_size)
    texts = [count_words(bench.text(domain).train, bench.vocab_size) for domain in bench.study.domains]
    words = torch.stack([torch.zeros(bench.vocab_size), *(weigh_words(new, old) for new in texts)], -1)  # (V, A)

    def hear(rows: Rows) -> Tensor:
        return torch.stack([words[torch.from_numpy(rows[row].astype(np.int64))].mean(0) for row in range(len(rows))])

    return {split: {name: hear(rows) for name, rows in of.items()} for split, of in bench.scored.items()}


def first_rows(rows: Rows, number: int) -> Rows:
    number = min(number, len(rows))
    return Rows(rows.ids[: rows.starts[number]], rows.starts[: number + 1])


def cosines(rows: Tensor, prototypes: Tensor) -> Tensor:
    return F.normalize(rows, dim=-1) @ F.normalize(prototypes, dim=-1).T


@torch.no_grad()
def describe_rows(bench: Bench, rows: Rows) -> Tensor:
    """Each row (R, D) as the mean of what the base's last block makes of its tokens."""
    seen: list[Tensor] = []
    hook = bench.base.head.register_forward_pre_hook(lambda _, given: seen.append(given[0].float()))
    found = []
    for batch in evaluation_batches(rows, bench.scoring, in_order=True).epoch(0, shuffle=False):
        batch = batch.to(bench.machine.device)
        forward(bench.base, batch, bench.config, sums=False)
        real = batch.real[..., None]
        found.append(((seen.pop() * real).sum(1) / real.sum(1)).cpu())
    hook.remove()
    return torch.cat(found)


# --- who is told the domain -----------------------------------------------------------------------------------


def score_rows(bench: Bench, model: SomeLM) -> Scores:
    return {
        split: {name: bench.score_rows(model, rows) for name, rows in texts.items()}
        for split, texts in bench.scored.items()
    }


def pick(scores: list[Scores], split: str, name: str, chosen: Tensor) -> Tensor:
    """What the chosen model (R,) gives on each row."""
    every = torch.stack([of[split][name] for of in scores])  # (A, R, 2, 2)
    return every[chosen, torch.arange(len(chosen))]


def tell(bench: Bench, scores: list[Scores]) -> Losses:
    """The losses of models that are told whose text they read, half-way changes included. The base comes first.

    On what nobody has learned, it is the base that reads.
    """
    domains = bench.study.domains

    def score(split: str, name: str) -> Tensor:
        if name != MIXED:
            return scores[1 + domains.index(name) if name in domains else 0][split][name]
        mixed = bench.mixed[split]
        halves = [pick(scores, split, name, torch.from_numpy(whose)) for whose in (mixed.first, mixed.second)]
        return torch.stack([halves[0][:, 0], halves[1][:, 1]], 1)

    return bench.summarize(score)


# --- the ceiling ----------------------------------------------------------------------------------------------


def learn_jointly(bench: Bench, family: str, rate: float) -> dict[str, Any]:
    """Everything from the beginning: as many steps as a base and all of its branches take together."""
    size = bench.size
    steps = size.base_steps + len(bench.study.domains) * size.branch_steps
    config = base_config(bench.study, family, bench.seed, steps=steps, rate=rate)
    bench.config = config.override({"train.fast": "off"})  # with decay, as a base has it
    model = bench.machine.make_model(config)
    bench.learn(model, bench.everything(), rate, [*bench.study.base, *bench.study.domains], steps)
    trained, _ = model.count_parameters()
    return {"rows": [row_of(0.0, bench.score(model))], "trained": trained, "stored": trained}

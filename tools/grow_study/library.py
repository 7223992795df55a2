"""Branches of one base, found by keys: by gravity's, by gradient, by one centroid a domain, by gates trained for each;
and by gravity's keys with an eye on the text before a token.

Shapes: B rows, T positions, N new experts, D model width.
"""

import math
from collections.abc import Callable
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from some_moe.data.batches import Rows
from some_moe.growth.api import ONLY, PLACED, SHARE, Part, begin_branch, make_branch, put_together
from some_moe.growth.keys import MOST_TOKENS, calibrate, collect_queries
from some_moe.growth.library import BranchedLibrary, widen
from some_moe.growth.opening import let_learn, set_favour
from some_moe.model.router import KeyRouter
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM
from some_moe.system.files import write_tensors
from some_moe.system.records import Branch
from some_moe.training.evaluate import evaluation_batches, forward
from tools.grow_study.bench import Bench, row_of

FAVOURS = (-6.0, -4.0, -3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 4.5)
WIDE = 0.1  # share of kept text that branches may have while they learn, in methods that let them have more
CONTEXT, FADES = 3.0, 0.95  # weight of what spoke for a branch before a token, and how long it is remembered
Known = list[Tensor]  # of each layer, the queries (T, D) of a text


def run(bench: Bench, method: str, rate: float, grown_rate: float) -> dict[str, Any]:
    """All domains grown, each apart, merged, and scored at every favour. grown_rate: of what gates are trained for."""
    known = Kept(bench)
    parts = {}
    for domain in bench.study.domains:
        if method == "gate":
            grown = grow(bench, "grow", domain, grown_rate, known, may_read=True)
            parts[domain] = gate(bench, grown, domain, rate, known)
        else:
            parts[domain] = grow(bench, method, domain, rate, known)
    found: dict[str, Any] = {"rows": score_curve(bench, list(parts.values()), context=method == "grow-context")}
    found["trained"] = found["stored"] = sum(count(part) for part in parts.values())
    if method in ("grow", "gradient"):
        found["alone"] = {name: brief(bench, [part], [name]) for name, part in parts.items()}
    if method == "grow":
        pairs = combinations(parts, 2)
        found["pairs"] = {"+".join(pair): brief(bench, [parts[name] for name in pair], list(pair)) for pair in pairs}
    return found


def merged(bench: Bench, parts: list[Part], *, context: bool = False) -> SomeLM:
    model = put_together(bench.fresh(), parts).eval()
    return look_back(model, [part.branch for part in parts]) if context else model


def score_curve(bench: Bench, parts: list[Part], *, context: bool) -> list[dict[str, Any]]:
    """The six merged, at every favour."""
    model, rows, before = merged(bench, parts, context=context), [], 0.0
    for favour in FAVOURS:
        set_favour(model, favour - before)
        before = favour
        rows.append(row_of(favour, bench.score(model)))
    return rows


def brief(bench: Bench, parts: list[Part], names: list[str]) -> dict[str, float]:
    """Test losses of few branches, at favour 0: on the base's text and their own."""
    model = merged(bench, parts)
    found = {}
    for name in (*bench.study.base, *names):
        nats, tokens = bench.score_rows(model, bench.scored["test"][name]).sum((0, 1)).tolist()
        found[name] = round(nats / tokens, 5)
    return found


def count(part: Part) -> int:
    """Parameters that a branch has, keys included."""
    return sum(value.numel() for name, value in part.tensors.items() if not name.endswith(".near"))


# --- one domain -----------------------------------------------------------------------------------------------


class Kept:
    """What the base wrote itself, as its keys meet it: by this it is judged how readily a branch may be chosen."""

    def __init__(self, bench: Bench) -> None:
        self.queries: Known = collect_queries(bench.base, bench.written, bench.config)
        self.bench = bench

    @cached_property
    def rows(self) -> list[tuple[list[Tensor], Tensor]]:
        """The same in order: by batch, each layer's queries (B, T, D), and what of them (B, T) is text."""
        return collect_rows(self.bench, self.bench.written)


def grow(bench: Bench, method: str, domain: str, rate: float, known: Kept, *, may_read: bool = False) -> Part:
    """A branch that has learned a domain. may_read: one that another cell has made will do."""
    size = bench.size
    number = size.top_k if method == "centroid" else size.new_experts
    lora = "lora" if method == "grow-lora" else "full"
    branch = make_branch(domain, number, lora, size.lora_rank)
    place = bench.study.work / "parts" / f"{method}-rate{rate:g}-seed{bench.seed}-{domain}.safetensors"
    if may_read and place.is_file():
        return Part(branch, load_file(place, device=str(bench.machine.device)))
    rows = bench.text(domain).train
    queries = collect_queries(bench.base, rows, bench.config)
    model = widen(bench.fresh(), [branch])
    wide = method in ("grow-wide", "grow-context")
    begin_branch(model, queries, known.queries, WIDE if wide else SHARE, bench.seed)
    if method == "centroid":
        gather(model, queries, known.queries, bench.seed)
    elif method == "grow-context":
        set_bias_in_context(look_back(model, [branch]), known.rows, WIDE)
    let_learn(model)
    if method == "gradient":
        let_keys_learn(model)
    bench.learn(model, rows, rate)
    if method == "grow-context":
        set_bias_in_context(model, known.rows, SHARE)
    elif method in ("gradient", "grow-wide"):
        set_bias(model, known.queries, SHARE)  # for keys that have moved, or had more than they may
    part = take_part(model, branch)
    if method == "grow":  # gates are trained for these
        save(place, part)
    return part


def take_part(model: SomeLM, branch: Branch) -> Part:
    """The one branch of a model, as `put_together` takes it."""
    state: dict[str, Tensor] = model.state_dict()
    own = {name: value.detach().clone() for name, value in state.items() if ONLY in name}
    own |= {name: value[-branch.experts :].detach().clone() for name, value in state.items() if name.endswith(PLACED)}
    return Part(branch, own)


def save(place: Path, part: Part) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(place, {name: value.cpu().contiguous() for name, value in part.tensors.items()})


@torch.no_grad()
def set_bias(model: SomeLM, known: Known, share: float) -> None:
    """Set how readily the experts of a model's branch are chosen, by text that the base wrote."""
    for layer, queries in zip(model.layers, known, strict=True):
        assert layer.state is not None
        old = layer.library.up.shape[0]
        layer.state.bias[old:] = 0
        layer.state.bias[old:] = calibrate(layer, queries, old, share)


@torch.no_grad()
def gather(model: SomeLM, queries: Known, known: Known, seed: int) -> None:
    """Give all experts of a branch one key, the mean direction of its text, and the weights of those nearest to it.

    A token that comes nearer to it than to old keys then has them all: one wide expert a domain.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer, own in zip(model.layers, queries, strict=True):
        state, library = layer.state, layer.library
        assert state is not None
        assert isinstance(library, BranchedLibrary)
        old = library.up.shape[0]
        number = len(state.keys) - old
        middle = F.normalize(F.normalize(own, dim=-1).mean(0), dim=-1)
        near = (F.normalize(state.keys[:old].float(), dim=-1) @ middle).topk(number).indices
        state.keys[old:] = middle * state.keys[:old].norm(dim=-1).mean()
        library.branches[0].begin(library.base, near, generator)  # type: ignore[operator]
    set_bias(model, known, min(0.99, SHARE * number))  # all are chosen for the same tokens


def let_keys_learn(model: SomeLM) -> None:
    """Let new keys learn by gradient; old ones get none."""
    for layer in model.layers:
        assert layer.state is not None
        keys, old = layer.state.keys, layer.library.up.shape[0]
        keys.requires_grad_(True)
        keys.register_hook(keep_from(old))  # type: ignore[no-untyped-call]


def keep_from(first: int) -> Callable[[Tensor], Tensor]:
    def cut(grad: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(grad[:first]), grad[first:]])

    return cut


# --- gates ----------------------------------------------------------------------------------------------------


class GateRouter(KeyRouter):
    """A router that learns, for each new expert, where its output helps: a sigmoid of gate and query scales it."""

    gate: nn.Parameter  # (N, D)

    def choose(self, query: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `KeyRouter.choose`."""
        experts, gates, scores = super().choose(query, top_k)
        opened = (self.model.cosine_scale * F.normalize(query, dim=-1) @ self.gate.T).sigmoid()
        every = F.pad(opened, (len(self.state.keys) - len(self.gate), 0), value=1.0)
        return experts, gates * every.gather(-1, experts), scores


def gate(bench: Bench, part: Part, domain: str, rate: float, known: Kept) -> Part:
    """The same experts, found by gates that were trained on their own text while all else stood still."""
    model = merged(bench, [part])
    for layer in model.layers:
        router = layer.key_router
        assert router is not None
        router.__class__ = GateRouter
        assert isinstance(router, GateRouter)
        router.gate = nn.Parameter(torch.zeros(part.branch.experts, bench.size.d_model, device=bench.machine.device))
    bench.learn(model, bench.text(domain).train, rate, bench.size.gate_steps)
    for layer in model.layers:
        router = layer.key_router
        assert isinstance(router, GateRouter)
        with torch.no_grad():
            keys, moved = router.state.keys[-part.branch.experts :], router.gate.norm(dim=-1, keepdim=True) > 0
            keys.copy_(torch.where(moved, F.normalize(router.gate, dim=-1) * keys.norm(dim=-1, keepdim=True), keys))
        del router.gate
        router.__class__ = KeyRouter  # type: ignore[assignment]
    set_bias(model, known.queries, SHARE)
    return take_part(model, part.branch)


# --- the text before a token ----------------------------------------------------------------------------------


class ContextRouter(KeyRouter):
    """A branch is chosen more readily where the text up to a token spoke for it: its own token cannot, if it is common
    to all texts.

    What speaks for a branch at a token is by how much the best of its keys beats the last expert of the base that is
    chosen there; its mean over the row so far, older tokens weighing less, is added to the branch's scores. Selection
    alone is changed, and no later token is looked at.
    """

    sizes: tuple[int, ...]  # experts of each branch
    segments: Tensor | None  # (B, T) of the present pass: rows may hold several documents

    def forward(self, query: Tensor, info: TokenInfo, top_k: int) -> tuple[Tensor, Routing]:
        """As `KeyRouter.forward`."""
        self.segments = info.segments
        found: tuple[Tensor, Routing] = super().forward(query, info, top_k)
        return found

    def choose(self, query: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `KeyRouter.choose`."""
        scores = self.score(query)
        leaning = scores.detach() + self.state.bias + self.lean(scores.detach(), top_k, self.segments)
        experts = leaning.topk(top_k, dim=-1).indices
        tempered = scores / self.model.temperature
        return experts, tempered.gather(-1, experts).softmax(-1), tempered

    def last_of_base(self, scores: Tensor, top_k: int) -> Tensor:
        old = scores.shape[-1] - sum(self.sizes)
        return (scores[..., :old] + self.state.bias[:old]).topk(top_k, dim=-1).values[..., -1:]

    def lean(self, scores: Tensor, top_k: int, segments: Tensor | None) -> Tensor:
        """What is added to scores (B, T, E): nothing to those of the base."""
        old, length = scores.shape[-1] - sum(self.sizes), scores.shape[1]
        best = [part.amax(-1) for part in torch.split(scores[..., old:], list(self.sizes), dim=-1)]
        speaks = torch.stack(best, -1) - self.last_of_base(scores, top_k)  # (B, T, branches)
        age = torch.arange(length, device=scores.device)[:, None] - torch.arange(length, device=scores.device)
        weights = torch.where(age >= 0, FADES ** age.clamp(min=0).to(scores.dtype), 0.0)  # (T, T)
        if segments is not None:
            weights = weights * (segments[:, :, None] == segments[:, None])
        mean = (weights / weights.sum(-1, keepdim=True)) @ speaks
        sizes = torch.tensor(self.sizes, device=scores.device)
        return F.pad(CONTEXT * mean.repeat_interleave(sizes, dim=-1), (old, 0))

    def margins(self, query: Tensor, top_k: int) -> Tensor:
        """By how much each new expert, without its bias, beats the base's last one (B, T, N); a row is one document."""
        scores = self.score(query)
        old = scores.shape[-1] - sum(self.sizes)
        return (scores + self.lean(scores, top_k, None))[..., old:] - self.last_of_base(scores, top_k)


def look_back(model: SomeLM, branches: list[Branch]) -> SomeLM:
    """Let the branches of a model be chosen with an eye on the text before."""
    for layer in model.layers:
        router = layer.key_router
        assert router is not None
        router.__class__ = ContextRouter
        assert isinstance(router, ContextRouter)
        router.sizes, router.segments = tuple(branch.experts for branch in branches), None
    return model


@torch.no_grad()
def collect_rows(bench: Bench, rows: Rows) -> list[tuple[list[Tensor], Tensor]]:
    """Centred queries (B, T, D) of each layer by batch, in order, and what of each batch (B, T) is text."""
    found = []
    for batch in evaluation_batches(rows, bench.scoring, in_order=True).epoch(0, shuffle=False):
        batch = batch.to(bench.machine.device)
        queries = []
        for layer, routing in zip(bench.base.layers, forward(bench.base, batch, bench.config).routings, strict=True):
            assert routing.query is not None
            assert layer.state is not None
            assert layer.state.query_mean is not None
            queries.append(routing.query.float() - layer.state.query_mean)
        found.append((queries, batch.real))
    return found


@torch.no_grad()
def set_bias_in_context(model: SomeLM, known: list[tuple[list[Tensor], Tensor]], share: float) -> None:
    """As `set_bias`, for routers that look back."""
    for number, layer in enumerate(model.layers):
        router = layer.key_router
        assert isinstance(router, ContextRouter)
        found = [router.margins(queries[number], layer.model.top_k)[real] for queries, real in known]
        margins = torch.cat(found)[:MOST_TOKENS]
        tokens, experts = margins.shape
        place = max(1, math.ceil(tokens * (1 - share / experts)))
        router.state.bias[-experts:] = -margins.kthvalue(place, dim=0).values

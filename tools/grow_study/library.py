"""Branches of one base, found by keys: by gravity's, by gradient, by one centroid a domain, by gates trained for each;
and by gravity's keys with an eye on the text before a token, beside which each branch is told its own text.

Shapes: B rows, T positions, N new experts, D model width.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from some_moe.growth.api import (
    HEAD_RANK,
    LOOKS_BACK,
    ONLY,
    PLACED,
    SHARE,
    Part,
    begin_branch,
    make_branch,
    put_together,
)
from some_moe.growth.keys import Queries, calibrate, collect_queries
from some_moe.growth.library import BranchedLibrary, BranchRouter, widen
from some_moe.growth.opening import let_learn, set_favour
from some_moe.model.router import Choice
from some_moe.model.transformer import SomeLM
from some_moe.system.files import write_tensors
from some_moe.system.records import Branch
from tools.grow_study.bench import Bench, row_of
from tools.grow_study.dense import Scores, score_rows, tell
from tools.grow_study.plan import FAVOURS

WIDE = 0.1  # share of kept text that branches of `grow-wide` may have while they learn
FORCED = 1e4  # a favour that leaves the base nothing


def run(bench: Bench, method: str, rate: float, grown_rate: float) -> dict[str, Any]:
    """All domains grown, each apart, merged, and scored at every favour. grown_rate: of what gates are trained for."""
    known = collect_queries(bench.base, bench.written, bench.config)  # what the base wrote itself
    parts = {}
    for domain in bench.study.domains:
        if method == "gate":
            grown = grow(bench, "grow", domain, grown_rate, known, may_read=True)
            parts[domain] = gate(bench, grown, domain, rate, known)
        else:
            parts[domain] = grow(bench, method, domain, rate, known)
    found: dict[str, Any] = {"rows": score_curve(bench, list(parts.values()))}
    if method == "grow-context":
        found["told"] = [row_of(0.0, tell(bench, [score_rows(bench, bench.base), *force(bench, parts)]))]
    found["trained"] = found["stored"] = found["told_stored"] = sum(count(part) for part in parts.values())
    if method in ("grow", "grow-context", "gradient"):
        found["alone"] = {name: brief(bench, [part], [name]) for name, part in parts.items()}
    if method in ("grow", "grow-context"):
        pairs = combinations(parts, 2)
        found["pairs"] = {"+".join(pair): brief(bench, [parts[name] for name in pair], list(pair)) for pair in pairs}
    return found


def merged(bench: Bench, parts: list[Part]) -> SomeLM:
    return put_together(bench.fresh(), parts).eval()


def score_curve(bench: Bench, parts: list[Part]) -> list[dict[str, Any]]:
    """The six merged, at every favour."""
    model, rows, before = merged(bench, parts), [], 0.0
    for favour in FAVOURS:
        set_favour(model, favour - before)
        before = favour
        rows.append(row_of(favour, bench.score(model)))
    return rows


@torch.no_grad()
def force(bench: Bench, parts: Mapping[str, Part]) -> Iterator[Scores]:
    """What each branch gives where it serves every token, alone: how it learned, without how it is chosen."""
    for part in parts.values():
        model = merged(bench, [part])
        set_favour(model, FORCED)
        yield score_rows(bench, model)


def brief(bench: Bench, parts: list[Part], names: list[str]) -> dict[str, float]:
    """Test losses of few branches, at favour 0: on the base's text and their own."""
    model = merged(bench, parts)
    found = {}
    for name in (*bench.study.base, *names):
        found[name] = round(bench.loss(model, "test", name), 5)
    return found


def count(part: Part) -> int:
    """Parameters that a branch has, keys included."""
    return sum(value.numel() for name, value in part.tensors.items() if not name.endswith(".near"))


# --- one domain -----------------------------------------------------------------------------------------------


def grow(bench: Bench, method: str, domain: str, rate: float, known: Queries, *, may_read: bool = False) -> Part:
    """A branch that has learned a domain. may_read: one that another cell has made will do."""
    size = bench.size
    number = size.top_k if method == "centroid" else size.new_experts
    lora = "lora" if method.endswith("-lora") else "full"
    weight = LOOKS_BACK if method.startswith("grow-context") else 0.0
    branch = make_branch(domain, number, lora, size.lora_rank, weight, HEAD_RANK)
    place = bench.study.work / "parts" / f"{method}-rate{rate:g}-seed{bench.seed}-{domain}.safetensors"
    if may_read and place.is_file():
        return Part(branch, load_file(place, device=str(bench.machine.device)))
    rows = bench.text(domain).train
    queries = collect_queries(bench.base, rows, bench.config)
    model = widen(bench.fresh(), [branch])
    begin_branch(model, queries, known, WIDE if method == "grow-wide" else SHARE, bench.seed)
    if method == "centroid":
        gather(model, queries, known, bench.seed)
    let_learn(model)
    if method == "gradient":
        let_keys_learn(model)
    bench.learn(model, rows, rate, [domain])
    if method in ("gradient", "grow-wide"):
        set_bias(model, known, SHARE)  # for keys that have moved, or had more than they may
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
def set_bias(model: SomeLM, known: Queries, share: float) -> None:
    """Set how readily the experts of a model's branch are chosen, by text that the base wrote."""
    for layer, queries in zip(model.layers, known.layers, strict=True):
        assert layer.state is not None
        old = layer.library.up.shape[0]
        layer.state.bias[old:] = 0
        layer.state.bias[old:] = calibrate(layer, queries, old, share)


@torch.no_grad()
def gather(model: SomeLM, queries: Queries, known: Queries, seed: int) -> None:
    """Give all experts of a branch one key, the mean direction of its text, and the weights of those nearest to it.

    A token that comes nearer to it than to old keys then has them all: one wide expert a domain.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer, own in zip(model.layers, queries.layers, strict=True):
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


class GateRouter(BranchRouter):
    """A router that learns, for each new expert, where its output helps: a sigmoid of gate and query scales it."""

    gate: nn.Parameter  # (N, D)

    def choose(self, query: Tensor, top_k: int, shares: Tensor | None = None) -> Choice:
        """As `KeyRouter.choose`."""
        found = super().choose(query, top_k, shares)
        opened = (self.model.cosine_scale * F.normalize(query, dim=-1) @ self.gate.T).sigmoid()
        every = F.pad(opened, (len(self.state.keys) - len(self.gate), 0), value=1.0)
        return found._replace(gates=found.gates * every.gather(-1, found.experts))


def gate(bench: Bench, part: Part, domain: str, rate: float, known: Queries) -> Part:
    """The same experts, found by gates that were trained on their own text while all else stood still."""
    model = merged(bench, [part])
    for layer in model.layers:
        router = layer.key_router
        assert router is not None
        router.__class__ = GateRouter
        assert isinstance(router, GateRouter)
        router.gate = nn.Parameter(torch.zeros(part.branch.experts, bench.size.d_model, device=bench.machine.device))
    bench.learn(model, bench.text(domain).train, rate, [domain], bench.size.gate_steps)
    for layer in model.layers:
        router = layer.key_router
        assert isinstance(router, GateRouter)
        with torch.no_grad():
            keys, moved = router.state.keys[-part.branch.experts :], router.gate.norm(dim=-1, keepdim=True) > 0
            keys.copy_(torch.where(moved, F.normalize(router.gate, dim=-1) * keys.norm(dim=-1, keepdim=True), keys))
        del router.gate
        router.__class__ = BranchRouter  # type: ignore[assignment]
    set_bias(model, known, SHARE)
    return take_part(model, part.branch)

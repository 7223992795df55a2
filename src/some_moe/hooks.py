"""Read and change what passes through a model, by name, while a `with` block lasts. Nothing of it is left behind.

    with hooks.attach(model, {"blocks.2.hook_mlp_out": lambda value, hook: value * 0}):
        logits = model(tokens).logits

Points bear TransformerLens' names where they mean the same, so that functions written for it fit: an edit gets the
value and the point (`hook.name`, `hook.layer()`), and returns another value, or None to leave it. A model without hooks
is not touched by any of this; under hooks that edit nothing its logits are the same bits. Works with and without the
cache, in training too; on the plain model, not the fast one.

Shapes: B rows, T positions, H heads, W head width, D model width, E experts, K chosen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from html import escape
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from some_moe.config import ConfigError, did_you_mean
from some_moe.model.layer import SomeLayer
from some_moe.model.router import HashRouter, KeyRouter
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import Block, SomeLM

__all__ = [
    "Activations", "HookPoint", "attach", "forbid", "force", "list_points", "run_with_cache", "run_with_hooks",
]  # fmt: skip

# What a block offers, in the order in which it happens; those of keys are missing under hash routing.
BLOCK_POINTS = {
    "hook_resid_pre": "(B, T, D) the residual stream before the block",
    "attn.hook_q": "(B, T, H, W) attention's queries, before they are turned to their positions",
    "attn.hook_k": "(B, T, H, W) attention's keys, likewise",
    "attn.hook_v": "(B, T, H, W) attention's values",
    "attn.hook_z": "(B, T, H, W) what each head has gathered, before the output projection",
    "hook_attn_out": "(B, T, D) what attention adds",
    "hook_resid_mid": "(B, T, D) the residual stream between attention and experts",
    "mlp.hook_query": "(B, T, D) SoME's query, before grounding and centring",
    "mlp.hook_scores": "(B, T, E) how well each key fits: moves choice and gates",
    "mlp.hook_selection": "(B, T, E) scores with their bias: moves the choice alone; inf forces, -inf forbids",
    "mlp.hook_expert_indices": "(B, T, K) int64, the chosen experts; gates follow them",
    "mlp.hook_gates": "(B, T, K) how much each of them counts",
    "mlp.hook_expert_out": "(B, T, D) the gated sum of the experts' outputs",
    "hook_mlp_out": "(B, T, D) what the feed-forward layer adds",
    "hook_resid_post": "(B, T, D) the residual stream after the block",
}
MIDDLES: WeakKeyDictionary[Block, list[Tensor]] = WeakKeyDictionary()  # see Seen.watch_middle
OF_KEYS = ("mlp.hook_query", "mlp.hook_scores", "mlp.hook_selection")


class HookPoint(NamedTuple):
    """Where an edit is asked."""

    name: str

    def layer(self) -> int:
        """The block that it lies in; -1 before the first."""
        return int(self.name.split(".")[1]) if self.name.startswith("blocks.") else -1


Edit = Callable[[Tensor, HookPoint], Tensor | None]


class Activations(dict[str, Tensor]):
    """What passed through a model, by point. `found["mlp_out", 3]` is short for `found["blocks.3.hook_mlp_out"]`."""

    def __getitem__(self, name: str | tuple[str, int]) -> Tensor:
        if isinstance(name, str):
            return super().__getitem__(name)
        ending = name[0].removeprefix("hook_")
        near = [one for one in self if one.startswith(f"blocks.{name[1]}.") and one.endswith(f"hook_{ending}")]
        if len(near) != 1:
            raise KeyError(f"{name} is none of the points that were kept; they are {', '.join(self)}")
        return super().__getitem__(near[0])

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {tuple(value.shape)}" for name, value in self.items())

    def _repr_html_(self) -> str:
        rows = ["<tr><th>point</th><th>shape</th><th>mean</th><th>spread</th></tr>"]
        for name, value in self.items():
            cells = [escape(name), " × ".join(map(str, value.shape))]
            if value.is_floating_point():
                cells += [f"{value.float().mean():.3f}", f"{value.float().std(correction=0):.3f}"]
            rows.append("<tr><td>" + "</td><td>".join(cells) + "</td></tr>")
        return f"<table>{''.join(rows)}</table>"


def list_points(model: SomeLM) -> list[str]:
    """The names of all points of a model, in the order in which they are passed."""
    names = ["hook_embed"]
    for number, block in enumerate(model.blocks):
        absent = tuple(name for name in BLOCK_POINTS if name.startswith("mlp."))
        if isinstance(block.ffn, SomeLayer):
            absent = OF_KEYS if block.ffn.key_router is None else ()
        names += [f"blocks.{number}.{name}" for name in BLOCK_POINTS if name not in absent]
    return names


@contextmanager
def attach(model: SomeLM, edits: Mapping[str, Edit] | Sequence[tuple[str, Edit]]) -> Iterator[None]:
    """While it lasts, what passes a point whose name fits a pattern goes through its edit.

    edits: {pattern: edit} or pairs of them; a pattern is a name, with * for any part of it.
    """
    pairs = list(edits.items()) if isinstance(edits, Mapping) else list(edits)
    points = list_points(model)
    for pattern, _ in pairs:
        if not any(fnmatchcase(name, pattern) for name in points):
            hint = did_you_mean(pattern, points) or "; hooks.list_points(model) names them"
            raise ConfigError(f"{pattern!r} is no point of this model{hint}")
    for part in (model, *model.blocks):
        if type(part) not in (SomeLM, Block):
            kind = type(part).__name__
            raise ConfigError(f"hooks read the plain model, and this one is {kind}; open it anew with some_moe.load")
    wanted = {name: [edit for pattern, edit in pairs if fnmatchcase(name, pattern)] for name in points}
    seen = Seen({name: found for name, found in wanted.items() if found})
    with ExitStack() as stack:
        seen.after(stack, model.embedding, "hook_embed")
        for number, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            seen.watch_block(stack, block, f"blocks.{number}.")
        yield


class Seen:
    """The edits of each point, and how a point is brought to them. Parts that nobody asks for are left alone."""

    def __init__(self, edits: dict[str, list[Edit]]) -> None:
        self.edits = edits

    def __call__(self, name: str, value: Tensor) -> Tensor:
        for edit in self.edits.get(name, ()):
            changed = edit(value, HookPoint(name))
            if changed is None:
                continue
            if not isinstance(changed, Tensor) or changed.shape != value.shape or changed.dtype != value.dtype:
                found = f"{changed.dtype} {tuple(changed.shape)}" if isinstance(changed, Tensor) else repr(changed)[:80]
                wanted = f"{value.dtype} {tuple(value.shape)}"
                raise ConfigError(f"the edit of {name} returned {found}; return a tensor {wanted}, or None to leave it")
            value = changed
        return value

    # --- three ways to stand beside a module ----------------------------------------------------------------------

    def before(self, stack: ExitStack, module: nn.Module, name: str, heads: int = 0) -> None:
        """Its first argument; heads: seen as that many of them."""
        if name in self.edits:
            hook = module.register_forward_pre_hook(lambda _, given: (self.split(name, given[0], heads), *given[1:]))
            stack.callback(hook.remove)

    def after(self, stack: ExitStack, module: nn.Module, name: str, heads: int = 0) -> None:
        """What it returns, or the first part of that."""
        if name in self.edits:

            def show(_: nn.Module, __: Any, found: Any) -> Any:
                if isinstance(found, tuple):
                    return (self(name, found[0]), *found[1:])
                return self.split(name, found, heads)

            stack.callback(module.register_forward_hook(show).remove)

    def around(self, stack: ExitStack, owner: nn.Module, method: str, stand_in: Callable[..., Any]) -> None:
        """One of its methods: stand_in gets it as it was, and then what it is called with."""
        plain = getattr(owner, method)
        shadowed = owner.__dict__.get(method)
        owner.__dict__[method] = lambda *given: stand_in(plain, *given)
        if shadowed is None:
            stack.callback(owner.__dict__.pop, method)
        else:
            stack.callback(owner.__dict__.__setitem__, method, shadowed)

    def split(self, name: str, value: Tensor, heads: int) -> Tensor:
        if not heads:
            return self(name, value)
        return self(name, value.view(*value.shape[:-1], heads, -1)).flatten(-2)

    # --- what lies where ------------------------------------------------------------------------------------------

    def watch_block(self, stack: ExitStack, block: Block, at: str) -> None:
        attention, ffn, heads = block.attention, block.ffn, block.attention.num_heads
        self.before(stack, block, at + "hook_resid_pre")
        for letter, part in (("q", attention.query), ("k", attention.key), ("v", attention.value)):
            self.after(stack, part, f"{at}attn.hook_{letter}", heads)
        self.before(stack, attention.out, at + "attn.hook_z", heads)
        self.after(stack, block.drop_attention, at + "hook_attn_out")
        if not block.norm_first:  # the norm's output is the residual stream
            self.after(stack, block.attention_norm, at + "hook_resid_mid")
        elif at + "hook_resid_mid" in self.edits:
            self.watch_middle(stack, block, at + "hook_resid_mid")
        if isinstance(ffn, SomeLayer):
            self.watch_layer(stack, ffn, at + "mlp.")
        self.after(stack, block.drop_ffn, at + "hook_mlp_out")
        self.after(stack, block, at + "hook_resid_post")

    def watch_middle(self, stack: ExitStack, block: Block, name: str) -> None:
        """Between the sublayers of a pre-norm block the stream goes two ways: into the norm, and past it."""
        kept = MIDDLES.setdefault(block, [])  # an edited stream, and what the layer then adds to it

        def show(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            value = self(name, given[0])
            if value is given[0]:
                return None
            kept[:] = [value]
            return (value,)

        def keep_added(plain: Callable[..., Any], *given: Any) -> Any:
            found = plain(*given)
            if kept:
                kept[1:] = [found[0]]
            return found

        def add(_: nn.Module, __: Any, found: tuple[Tensor, Routing | None]) -> Any:
            return (kept[0] + kept[1], found[1]) if kept else None

        stack.callback(block.register_forward_pre_hook(lambda *_: kept.clear()).remove)
        stack.callback(block.ffn_norm.register_forward_pre_hook(show).remove)
        self.around(stack, block, "feed_forward", keep_added)
        stack.callback(block.register_forward_hook(add, prepend=True).remove)  # before it is seen as hook_resid_post
        stack.callback(kept.clear)

    def watch_layer(self, stack: ExitStack, layer: SomeLayer, at: str) -> None:
        if layer.query is not None:
            self.after(stack, layer.query, at + "hook_query")
        if layer.key_router is not None:
            self.watch_router(stack, layer.key_router, at)
        elif layer.hash_router is not None:
            self.watch_hash(stack, layer.hash_router, at)
        if at + "hook_expert_out" in self.edits:
            self.around(stack, layer, "run_experts", lambda run, *given: self(at + "hook_expert_out", run(*given)))

    def watch_router(self, stack: ExitStack, router: KeyRouter, at: str) -> None:
        def rank(plain: Callable[..., Tensor], *given: Tensor | None) -> Tensor:
            biased, top_k = self(at + "hook_selection", plain(*given)), router.model.top_k
            if bool((biased.isneginf().sum(-1) > biased.shape[-1] - top_k).any()):
                raise ConfigError(f"a token of {at[:-1]} has fewer than {top_k} experts left to choose; forbid fewer")
            return biased

        wanted = {name.removeprefix(at) for name in self.edits}
        if "hook_scores" in wanted:
            self.around(stack, router, "score", lambda plain, query: self(at + "hook_scores", plain(query)))
        if "hook_selection" in wanted:
            self.around(stack, router, "rank", rank)
        if "hook_expert_indices" in wanted:
            self.around(stack, router, "select", lambda plain, *given: self(at + "hook_expert_indices", plain(*given)))
        if "hook_gates" in wanted:
            self.around(stack, router, "weigh", lambda plain, *given: self(at + "hook_gates", plain(*given)))

    def watch_hash(self, stack: ExitStack, router: HashRouter, at: str) -> None:
        def show(_: nn.Module, __: Any, found: tuple[Tensor, Routing]) -> tuple[Tensor, Routing]:
            gates, routing = found
            assert routing.experts is not None
            experts, gates = self(at + "hook_expert_indices", routing.experts), self(at + "hook_gates", gates)
            return gates, Routing(**{**vars(routing), "experts": experts, "gates": gates})

        if {at + "hook_expert_indices", at + "hook_gates"} & self.edits.keys():
            stack.callback(router.register_forward_hook(show).remove)


# --- what is asked most ---------------------------------------------------------------------------------------


def run_with_hooks(model: SomeLM, tokens: Tensor, fwd_hooks: Sequence[tuple[str, Edit]]) -> Tensor:
    """The logits (B, T, V) of tokens (B, T) under these edits."""
    with attach(model, fwd_hooks):
        logits: Tensor = model(tokens, TokenInfo.of(tokens.shape, tokens.device, seed=model.seed, sums=False)).logits
    return logits


@torch.no_grad()
def run_with_cache(
    model: SomeLM, tokens: Tensor, names: str | Sequence[str] = "*", *, fwd_hooks: Sequence[tuple[str, Edit]] = ()
) -> tuple[Tensor, Activations]:
    """The logits of tokens (B, T), and a copy of what passed the points that fit `names`, behind all edits."""
    found = Activations()

    def keep(value: Tensor, hook: HookPoint) -> None:
        found[hook.name] = value.detach().clone()

    patterns = [names] if isinstance(names, str) else list(names)
    return run_with_hooks(model, tokens, [*fwd_hooks, *((pattern, keep) for pattern in patterns)]), found


def forbid(model: SomeLM, layer: int, experts: Sequence[int]) -> AbstractContextManager[None]:
    """A context in which nobody can choose these experts of a layer: each token falls to its next best."""
    return _lean(model, layer, experts, -torch.inf)


def force(model: SomeLM, layer: int, experts: Sequence[int]) -> AbstractContextManager[None]:
    """A context in which every token has these experts of a layer among its own. Their gates follow their scores."""
    return _lean(model, layer, experts, torch.inf)


def _lean(model: SomeLM, layer: int, experts: Sequence[int], value: float) -> AbstractContextManager[None]:
    blocks = [block.ffn for block in model.blocks]
    has = [number for number, ffn in enumerate(blocks) if isinstance(ffn, SomeLayer) and ffn.state is not None]
    if layer not in has:
        raise ConfigError(f"layer {layer} has no keys to choose by; those that have are {has}")
    config, chosen = model.model, list(dict.fromkeys(experts))
    if not chosen or not all(0 <= expert < config.num_experts for expert in chosen):
        raise ConfigError(f"experts {list(experts)} are not all there; name some of 0 to {config.num_experts - 1}")
    most = config.top_k if value > 0 else config.num_experts - config.top_k
    if len(chosen) > most:
        word = "forced" if value > 0 else "forbidden"
        raise ConfigError(
            f"{len(chosen)} experts cannot be {word} where each token has {config.top_k}; name {most} or fewer"
        )

    def edit(biased: Tensor, _: HookPoint) -> Tensor:
        places = torch.tensor(chosen, device=biased.device)
        return biased.index_fill(-1, places, value)

    return attach(model, {f"blocks.{layer}.mlp.hook_selection": edit})

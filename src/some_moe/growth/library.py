"""The experts of a base and of its branches, as one library; and a model that is widened by them.

Shapes: E experts of the base, N of a branch, D model width, F hidden width, R rank.
"""

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn

from some_moe.config import GravityConfig, ModelConfig
from some_moe.experts import ExpertWeights
from some_moe.growth.context import find_places, look_back
from some_moe.model.library import ExpertLibrary
from some_moe.model.router import Choice, KeyRouter
from some_moe.model.routing import Routing
from some_moe.model.transformer import SomeLM
from some_moe.precision import at_least_float32, full_precision, product_dtype
from some_moe.system.records import Branch

LEAST = 1e-6  # share of a token that is told from none
OWN = (".library.branches.", ".key_router.state.")  # what a grown run saves: all else is its base's


class BranchExperts(nn.Module):
    """N new experts that see what an expert of the base sees and say nothing yet: they are added to what the base says.

    Their up-projection begins as that of the base's expert, trained whole or by a low-rank update; their
    down-projection begins at zero, so that a branch begins as its base. Those of the last layer bring an update of the
    head along, see `Voices`.
    """

    near: Tensor  # (N,) int64: expert of the base

    def __init__(self, base: ExpertWeights, branch: Branch, num_words: int = 0) -> None:
        """num_words: of the vocabulary, in the last layer."""
        super().__init__()
        self.head_rank = branch.head_rank if num_words else 0
        device, rank = base.up.device, branch.lora_rank
        assert base.down is not None
        (_, high, _), (_, d, width), count = base.up.shape, base.down.shape, branch.experts
        self.register_buffer("near", torch.zeros(count, dtype=torch.int64, device=device))
        shapes = {"up": (high, d), "up_bias": (high,), "down": (d, width), "down_bias": (d,)}
        if branch.trainability == "lora":
            shapes = {"up_in": (rank, d), "up_out": (high, rank), "down_in": (rank, width), "down_out": (d, rank)}
        shapes = {name: (count, *shape) for name, shape in shapes.items()}
        if self.head_rank:
            shapes |= {"head_in": (self.head_rank, d), "head_out": (num_words, self.head_rank)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, device=device)))

    @torch.no_grad()
    def begin(self, base: ExpertWeights, near: Tensor, generator: torch.Generator) -> None:
        """See what the base's experts `near` (N,) see."""
        self.near.copy_(near)
        for name, parameter in self.named_parameters():
            if name.endswith("_in"):  # the other factor stays zero
                bound = 1 / math.sqrt(parameter.shape[-1])
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
            elif name in ("up", "up_bias"):
                parameter.copy_(getattr(base, name)[self.near])

    def stacks(self, base: ExpertWeights) -> dict[str, Tensor]:
        """The weights as they compute, (N, …) each."""
        own: dict[str, Tensor] = dict(self.named_parameters())
        if "up" in own:
            return {name: own[name] for name in ("up", "up_bias", "down", "down_bias")}
        up, up_bias = (getattr(base, name)[self.near].float() for name in ("up", "up_bias"))
        down = own["down_out"] @ own["down_in"]
        up = up + own["up_out"] @ own["up_in"]
        return {"up": up, "up_bias": up_bias, "down": down, "down_bias": down.new_zeros(down.shape[:2])}


class BranchRouter(KeyRouter):
    """Chooses among base and branches; beneath whoever is chosen runs what the base alone would choose.

    Branches that look back come before all others where the text before gives them a share, and run nowhere else.
    """

    def __init__(self, old: KeyRouter, model: ModelConfig, num_old: int, looking: list[slice]) -> None:
        """num_old: experts of the base. looking: where those of branches that look back stand."""
        super().__init__(model, old.gravity, old.state.layer, old.state.seed)
        self.num_old, self.looking = num_old, looking
        self.temperature = old.temperature
        self.to(old.state.keys.device)

    def choose(self, query: Tensor, top_k: int, shares: Tensor | None = None) -> Choice:
        """As `KeyRouter.choose`; whoever was chosen counts as much as the share says."""
        found = super().choose(query, top_k, shares)
        if shares is None:
            return found
        return found._replace(gates=found.gates * shares.gather(-1, found.experts).to(found.gates.dtype))

    def rank(self, scores: Tensor, shares: Tensor | None) -> Tensor:
        biased = super().rank(scores, shares)
        if shares is None:
            return biased
        known = biased.masked_fill(biased.isinf(), 0)  # who is forbidden stays so
        span = known.amax(-1, keepdim=True) - known.amin(-1, keepdim=True) + 1  # lifts any above all others
        for place in self.looking:
            biased[..., place] += torch.where(shares[..., place] > 0, span, -span)
        return biased

    def choose_base(self, biased: Tensor, tempered: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        experts = biased[..., : self.num_old].topk(top_k, dim=-1).indices
        return experts, KeyRouter.weigh(self, tempered, experts)  # whoever edits gates means those of the chosen


class BranchedLibrary(ExpertLibrary):
    """The base's experts first, then those of each branch.

    A token that no branch serves passes the base. One that a branch serves passes the base too, as ever, and what the
    branch's experts say is added, each by its gate.
    """

    def __init__(self, base: ExpertLibrary, branches: list[Branch], num_words: int = 0) -> None:
        nn.Module.__init__(self)
        for name in ("layer", "seed", "init_method", "sparsity", "kernel", "mix"):
            setattr(self, name, getattr(base, name))
        self.trained = True  # none of it can be made again from a seed alone
        folded = fold(base.weights())
        for name in self.matrices():
            self.register_buffer(name, getattr(folded, name).detach(), persistent=False)
            self.register_buffer(f"joined_{name}", None, persistent=False)  # all experts, once nothing learns
        self.branches = nn.ModuleList(BranchExperts(folded, branch, num_words) for branch in branches)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """What `.to()` and `.cuda()` call."""
        for name in self.matrices():
            setattr(self, f"joined_{name}", None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    @property
    def base(self) -> ExpertWeights:
        return super().weights()

    @property
    def learns(self) -> bool:
        return any(parameter.requires_grad for parameter in self.branches.parameters())

    def weights(self) -> ExpertWeights:
        """Of all experts. Once nothing learns they are kept, the base's once."""
        joined = {name: getattr(self, f"joined_{name}") for name in self.matrices()}
        if joined["up"] is not None and not self.learns:
            return ExpertWeights(**joined)
        new = self.stack_branches()
        whole = {
            name: torch.cat([stack, new[name].to(stack.dtype)])
            for name, stack in zip(self.matrices(), self.stacks(), strict=True)
        }
        if not self.learns:
            for name, stack in whole.items():
                setattr(self, f"joined_{name}", stack)
                setattr(self, name, stack[: getattr(self, name).shape[0]])
        return ExpertWeights(**whole)  # type: ignore[arg-type]

    def stack_branches(self) -> dict[str, Tensor]:
        """The weights of all branches, one after the other."""
        parts = [branch.stacks(self.base) for branch in self.branches]  # type: ignore[operator]
        return {name: torch.cat([part[name] for part in parts]) for name in self.matrices()}

    def parts(self) -> tuple[ExpertWeights, ExpertWeights]:
        """The base's weights, and those of all branches."""
        if self.learns:
            return self.base, ExpertWeights(**self.stack_branches())  # type: ignore[arg-type]
        whole, num_old = self.weights(), self.up.shape[0]
        cuts = slice(num_old), slice(num_old, None)
        old, new = ({name: getattr(whole, name)[cut] for name in self.matrices()} for cut in cuts)
        return ExpertWeights(**old), ExpertWeights(**new)

    def forward(  # type: ignore[override]
        self, x: Tensor, experts: Tensor, gates: Tensor, old_experts: Tensor, old_gates: Tensor
    ) -> Tensor:
        """x (N, D), and experts and gates (N, K) of the chosen and of those beneath → (N, D)."""
        x = x.to(product_dtype(x))
        old, new = self.parts()
        num_old = old.num_experts
        with full_precision(x):
            y = self.mix(x, old_experts, old_gates, old)
            is_new = experts >= num_old
            served = is_new.any(-1).nonzero()[:, 0]
            if not len(served):
                return y
            own, whom = x.index_select(0, served), (experts - num_old).clamp(min=0).index_select(0, served)
            added = self.mix(own, whom, (gates * is_new).index_select(0, served), new)
            return y.index_add(0, served, added.to(y.dtype))


class Voices(nn.Module):
    """What branches add to the logits, as far as the last layer's gates are theirs.

    A branch has a low-rank update of the head. The base says what it says; where branches serve a token, what they say,
    by the updated head, is mixed with that: as probabilities, by their share. A share of 0 changes nothing.

    Shapes: G branches, W ranks of all their updates together.
    """

    ends: Tensor  # (G,) where the experts of the base and of each branch but the last end
    ranks: Tensor  # (G,)

    def __init__(self, library: BranchedLibrary) -> None:
        super().__init__()
        parts = [branch for branch in library.branches if isinstance(branch, BranchExperts)]
        self.heard = tuple(part for part in parts if part.head_rank)  # no modules of this one: saved where they are
        self.sizes = [(len(part.near), part.head_rank) for part in parts]  # experts and rank of each branch
        ends = accumulate((experts for experts, _ in self.sizes[:-1]), initial=library.up.shape[0])
        for name, values in (("ends", list(ends)), ("ranks", [rank for _, rank in self.sizes])):
            self.register_buffer(name, torch.tensor(values, device=library.up.device), persistent=False)

    def join(self) -> tuple[Tensor, Tensor]:
        """All updates side by side: (W, D) and (V, W)."""
        into, out = ([part.get_parameter(name) for part in self.heard] for name in ("head_in", "head_out"))
        return torch.cat(list(into)), torch.cat(list(out), 1)

    def forward(self, x: Tensor, logits: Tensor, routing: Routing) -> Tensor:
        """x (B, T, D) as the head has it, what that says (B, T, V), the last layer's routing → (B, T, V) to add."""
        assert routing.experts is not None
        assert routing.gates is not None
        whose = (routing.experts[..., None] >= self.ends).sum(-1, keepdim=True)  # (B, T, K, 1): 0 is the base
        numbers = torch.arange(1, len(self.ends) + 1, device=x.device)
        shares = ((whose == numbers) * routing.gates[..., None]).sum(-2)  # (B, T, G)
        share = (shares * (self.ranks > 0)).sum(-1, keepdim=True).clamp(max=1)
        parts = (shares / share.clamp(min=LEAST)).repeat_interleave(self.ranks, -1)  # of W; each update by its part
        into, out = self.join()
        update = ((x @ into.to(x.dtype).T) * parts.to(x.dtype)) @ out.to(x.dtype).T
        base, update = at_least_float32(logits), at_least_float32(update)
        louder = update + base.logsumexp(-1, keepdim=True) - (base + update).logsumexp(-1, keepdim=True)
        return torch.logaddexp(torch.log1p(-share), share.log() + louder).to(logits.dtype)


def fold(weights: ExpertWeights) -> ExpertWeights:
    """The same experts without a low-rank update: it becomes part of the matrices."""
    lora = weights.lora
    if lora is None:
        return weights
    assert weights.down is not None
    up = weights.up.float() + lora.up_out @ lora.up_in
    return replace(weights, up=up, down=weights.down.float() + lora.down_out @ lora.down_in, lora=None)


def widen_config(model: ModelConfig, branches: list[Branch]) -> ModelConfig:
    """A base's config with room for its branches. What acts in training alone is off."""
    folded = "full" if model.trainability == "lora" else model.trainability
    return model.override(
        {
            "num_experts": model.num_experts + sum(branch.experts for branch in branches),
            "trainability": folded,
            "expert_dtype": "float32" if folded == "full" else model.expert_dtype,
            "dropout": 0.0,
            "balance_loss": 0.0,
            "entropy_band": None,
        }
    )


def rest(gravity: GravityConfig) -> GravityConfig:
    """A base's rules with the forces off; what a key store has by them stays."""
    return gravity.override({"use_alpha": False, "use_beta": False, "use_delta": False})


def widen(model: SomeLM, branches: list[Branch]) -> SomeLM:
    """Give every layer of a base room for its branches, in place. Nothing of it learns, and no key moves."""
    config, gravity = widen_config(model.model, branches), rest(model.gravity)
    model.requires_grad_(False)
    for layer in model.layers:
        assert layer.key_router is not None
        router, num_old = layer.key_router, layer.library.up.shape[0]
        layer.key_router = BranchRouter(router, config, num_old, find_places(branches, num_old))
        old, state = router.state, layer.key_router.state.requires_grad_(False)
        for name, value in old.state_dict().items():
            new = getattr(state, name)
            with torch.no_grad():
                (new if new.shape == value.shape else new[: len(old.keys)]).copy_(value)
        num_words = model.model.vocab_size if layer is model.layers[-1] else 0
        layer.library = BranchedLibrary(layer.library, branches, num_words).requires_grad_(False)
        layer.model = config
    if any(branch.head_rank for branch in branches):
        library = model.layers[-1].library
        assert isinstance(library, BranchedLibrary)
        model.voices = Voices(library)
    model.model = config
    model.obey(gravity)
    model.gravity_step = lambda *_, **__: None  # type: ignore[method-assign]
    keep_own_part(model)
    return look_back(model, branches)


def keep_own_part(model: SomeLM) -> None:
    """Let the model save and load what its branches have, and nothing of its base."""
    experts = model.layers[0].library.up.shape[0]
    states = [layer.state for layer in model.layers if layer.state is not None]
    held = [{name: value.clone() for name, value in state.state_dict().items()} for state in states]

    def leave_out(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        for name in [name for name in state if not any(part in name for part in OWN)]:
            del state[name]

    def restore(_: nn.Module, found: Any) -> None:
        found.missing_keys[:] = [name for name in found.missing_keys if any(part in name for part in OWN)]
        with torch.no_grad():  # whatever a file says, these are the base's
            for state, values in zip(states, held, strict=True):
                for name, value in values.items():
                    rows = slice(experts) if value.dim() and name != "query_mean" else ...
                    getattr(state, name)[rows].copy_(value[rows])

    model.register_state_dict_post_hook(leave_out)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(restore)  # type: ignore[no-untyped-call]

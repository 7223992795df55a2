"""The experts of a base and of its branches, as one library; and a model that is widened by them.

Shapes: E experts of the base, N of a branch, D model width, F hidden width, R rank.
"""

import math
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from some_moe.config import GravityConfig, ModelConfig
from some_moe.experts import ExpertWeights
from some_moe.growth.context import look_back
from some_moe.model.keystore import KeyState
from some_moe.model.library import ExpertLibrary
from some_moe.model.transformer import SomeLM
from some_moe.system.records import Branch

OWN = (".library.branches.", ".key_router.state.")  # what a grown run saves: all else is its base's


class BranchExperts(nn.Module):
    """N new experts, each beside the expert of the base that it began as: trained whole, or by a low-rank update."""

    near: Tensor  # (N,) int64: expert of the base

    def __init__(self, base: ExpertWeights, branch: Branch) -> None:
        super().__init__()
        device, rank = base.up.device, branch.lora_rank
        assert base.down is not None
        (_, high, _), (_, d, width), count = base.up.shape, base.down.shape, branch.experts
        self.register_buffer("near", torch.zeros(count, dtype=torch.int64, device=device))
        shapes = {"up": (high, d), "up_bias": (high,), "down": (d, width), "down_bias": (d,)}
        if branch.trainability == "lora":
            shapes = {"up_in": (rank, d), "up_out": (high, rank), "down_in": (rank, width), "down_out": (d, rank)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(count, *shape, device=device)))

    @torch.no_grad()
    def begin(self, base: ExpertWeights, near: Tensor, generator: torch.Generator) -> None:
        """Be copies of the base's experts `near` (N,)."""
        self.near.copy_(near)
        for name, parameter in self.named_parameters():
            if name.endswith("_in"):  # the other factor stays zero
                bound = 1 / math.sqrt(parameter.shape[-1])
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
            elif not name.endswith("_out"):
                parameter.copy_(getattr(base, name)[self.near])

    def stacks(self, base: ExpertWeights) -> dict[str, Tensor]:
        """The weights as they compute, (N, …) each."""
        own: dict[str, Tensor] = dict(self.named_parameters())
        if "up" in own:
            return own
        copies = {name: getattr(base, name)[self.near].float() for name in ("up", "up_bias", "down", "down_bias")}
        for name in ("up", "down"):
            copies[name] = copies[name] + own[f"{name}_out"] @ own[f"{name}_in"]
        return copies


class BranchedLibrary(ExpertLibrary):
    """The base's experts first, then those of each branch. While it learns, the weights are joined in every pass."""

    def __init__(self, base: ExpertLibrary, branches: list[Branch]) -> None:
        nn.Module.__init__(self)
        for name in ("layer", "seed", "init_method", "sparsity", "kernel", "mix"):
            setattr(self, name, getattr(base, name))
        self.trained = True  # none of it can be made again from a seed alone
        folded = fold(base.weights())
        for name in self.matrices():
            self.register_buffer(name, getattr(folded, name).detach(), persistent=False)
            self.register_buffer(f"joined_{name}", None, persistent=False)  # all experts, once nothing learns
        self.branches = nn.ModuleList(BranchExperts(folded, branch) for branch in branches)

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
        joined = {name: getattr(self, f"joined_{name}") for name in self.matrices()}
        if joined["up"] is not None and not self.learns:
            return ExpertWeights(**joined)
        parts = [branch.stacks(self.base) for branch in self.branches]  # type: ignore[operator]
        whole = {
            name: torch.cat([stack, *(part[name].to(stack.dtype) for part in parts)])
            for name, stack in zip(self.matrices(), self.stacks(), strict=True)
        }
        if not self.learns:
            for name, stack in whole.items():  # the base's are kept once
                setattr(self, f"joined_{name}", stack)
                setattr(self, name, stack[: getattr(self, name).shape[0]])
        return ExpertWeights(**whole)  # type: ignore[arg-type]


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
        old = layer.key_router.state
        experts = len(old.keys)
        state = KeyState(config, layer.gravity, old.layer, old.seed).to(old.keys.device)
        for name, value in old.state_dict().items():
            new = getattr(state, name)
            with torch.no_grad():
                (new if new.shape == value.shape else new[:experts]).copy_(value)
        layer.key_router.state = state.requires_grad_(False)
        layer.library = BranchedLibrary(layer.library, branches).requires_grad_(False)
        layer.model = layer.key_router.model = config
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

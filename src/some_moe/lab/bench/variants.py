"""Everything that is timed side by side: this project's kernels, and what a user would have without them.

Each maker takes the layer's weights, which nobody copies, and returns a function (x_ND, experts_NK, gates_NK) → y_ND.
Shapes: N tokens, K experts each, S = N·K slots sorted by expert, D model width, F hidden width, E experts.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.config import ConfigError
from some_moe.experts import ExpertWeights, choose_kernel
from some_moe.lab.bench.problem import name_stacks
from some_moe.training.machine import has_triton, load_fast_kernel

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
KERNELS = {"cpu": ("cpu", "grouped"), "cuda": ("grouped", "triton")}


class UnavailableError(RuntimeError):
    """A variant that cannot run here. Its message says why, in a few words."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to compute a layer's experts."""

    name: str
    make: Callable[[ExpertWeights, int], Mix]  # (weights, top_k)
    is_ours: bool = False
    same_function: bool = True  # False: a ceiling to compare with, never a peer to beat
    compiled: bool = False

    def build(self, weights: ExpertWeights, top_k: int) -> Mix:
        """Make it ready to run, or raise `UnavailableError`. Compilation itself happens at the first call."""
        mix = self.make(weights, top_k)
        return torch.compile(mix, dynamic=False) if self.compiled else mix


def our_kernel(name: str) -> Variant:
    def make(weights: ExpertWeights, top_k: int) -> Mix:  # noqa: ARG001
        if name == "triton" and not has_triton():
            raise UnavailableError("it needs a CUDA GPU and the triton package")
        kernel = load_fast_kernel(name) if name == "triton" else choose_kernel(name)
        return lambda x, experts, gates: kernel(x, experts, gates, weights)

    return Variant(name=f"some {name}", make=make, is_ours=True)


def make_transformers_grouped(weights: ExpertWeights, top_k: int) -> Mix:  # noqa: ARG001
    """transformers' `grouped_mm` experts, told that they have biases and no gate: exactly this project's expert."""
    if weights.lora is not None:
        raise UnavailableError("transformers has no low-rank experts of this form")
    try:
        decorate = importlib.import_module("transformers.integrations.moe").use_experts_implementation
    except (ImportError, AttributeError) as error:
        raise UnavailableError(f"transformers and its experts interface are not there ({error})") from None

    @decorate(has_gate=False, has_bias=True, is_transposed=False)
    class Experts(nn.Module):
        """The experts under the names that transformers looks for; the parameters are the given stacks themselves."""

        def __init__(self, config: SimpleNamespace) -> None:  # noqa: ARG002
            super().__init__()
            self.num_experts, self.intermediate_dim, self.hidden_dim = weights.up.shape
            for name, stack in name_stacks(weights).items():
                setattr(self, re.sub("^(up|down)", r"\1_proj", name), stack)
            self.act_fn = nn.GELU()

        def forward(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:  # noqa: ARG002
            raise AssertionError("transformers puts its own forward in this one's place")

    module: Mix = Experts(SimpleNamespace(_experts_implementation="grouped_mm"))
    return module


def make_torch_grouped(weights: ExpertWeights, top_k: int) -> Mix:
    """The torch idiom: sort the slots, gather, grouped products; then unsort, and add up each token's k rows.

    Nothing here waits for the device: the ends of the groups stay there.
    """
    stacks = name_stacks(weights)

    def mix(x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        expert, order = experts.reshape(-1).sort(stable=True)
        numbers = torch.arange(weights.num_experts, device=x.device)
        ends = torch.searchsorted(expert, numbers, right=True).to(torch.int32)

        def multiply(rows: Tensor, name: str) -> Tensor:
            """rows (S, I) times each group's own matrix of the stack (E, O, I), as nn.Linear would: (S, O)."""
            return F.grouped_mm(rows, stacks[name].transpose(1, 2), offs=ends)

        def project(rows: Tensor, name: str) -> Tensor:
            out = multiply(rows, name) + stacks[f"{name}_bias"].index_select(0, expert)
            return out if weights.lora is None else out + multiply(multiply(rows, f"{name}_in"), f"{name}_out")

        hidden = F.gelu(project(x.index_select(0, order // top_k), "up"))
        out = project(hidden, "down") * gates.reshape(-1).index_select(0, order)[:, None]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return out.index_select(0, place).view(-1, top_k, out.shape[1]).sum(1)

    return mix


def make_loop(weights: ExpertWeights, top_k: int) -> Mix:  # noqa: ARG001
    """A loop over the experts in use, each on the tokens that chose it: the classic of Hugging Face's models."""

    def mix(x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        # Unbound, so that a trained stack's gradient is put together once and not once for every expert.
        stacks = {name: stack.unbind(0) for name, stack in name_stacks(weights).items()}

        def project(rows: Tensor, name: str, expert: int) -> Tensor:
            out = F.linear(rows, stacks[name][expert], stacks[f"{name}_bias"][expert])
            if weights.lora is None:
                return out
            return out + F.linear(F.linear(rows, stacks[f"{name}_in"][expert]), stacks[f"{name}_out"][expert])

        chosen = F.one_hot(experts, weights.num_experts).permute(2, 1, 0)
        y = torch.zeros_like(x)
        for expert in chosen.sum((1, 2)).nonzero().flatten().tolist():
            slot, token = torch.where(chosen[expert])
            hidden = F.gelu(project(x.index_select(0, token), "up", expert))
            y.index_add_(0, token, project(hidden, "down", expert) * gates[token, slot, None])
        return y

    return mix


class Dense(nn.Module):
    """One network of width k·F for every token: as many operations, no routing, another function. The ceiling."""

    def __init__(self, weights: ExpertWeights, top_k: int) -> None:
        super().__init__()
        if weights.lora is not None:
            raise UnavailableError("a dense network has no low-rank update for each expert")
        _, width, d_model = weights.up.shape
        self.up, self.down = nn.Linear(d_model, top_k * width), nn.Linear(top_k * width, d_model)
        self.to(weights.up).requires_grad_(weights.up.requires_grad)

    def forward(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:  # noqa: ARG002
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


PEERS = (
    Variant(name="transformers-grouped", make=make_transformers_grouped),
    Variant(name="torch-grouped", make=make_torch_grouped),
    Variant(name="loop", make=make_loop),
    Variant(name="dense", make=Dense, same_function=False),
)


def list_variants(device: torch.device, compiled: bool, only: Sequence[str] = ()) -> list[Variant]:
    """The variants for a device, ours first; with their compiled forms, or not. only: keep those of these names."""
    known = {variant.name: variant for variant in (*map(our_kernel, KERNELS[device.type]), *PEERS)}
    for name in only:
        if name not in known:
            raise ConfigError(f"--variants {name!r} is not known on {device.type}; choose from {', '.join(known)}")
    chosen = [variant for name, variant in known.items() if not only or name in only]
    # The loop's bounds are data: nothing to compile.
    more = [
        replace(variant, name=f"{variant.name}, compiled", compiled=True)
        for variant in chosen
        if variant.name != "loop"
    ]
    return chosen + more * compiled

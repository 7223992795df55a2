"""Everything that is timed side by side: this project's kernels, and what a user would have without them.

Each maker takes the layer's weights, which nobody copies, and returns a function (x_ND, experts_NK, gates_NK) → y_ND.
Shapes: N tokens, K experts each, S = N·K slots sorted by expert, D model width, F hidden width, E experts.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.config import ConfigError
from some_moe.experts import ExpertWeights, choose_kernel
from some_moe.training.machine import has_triton, load_fast_kernel

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
KERNELS = {"cpu": ("cpu", "grouped"), "cuda": ("grouped", "triton")}
COMPILED = ", compiled"


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
        if name != "triton":
            kernel: Callable[..., Tensor] = choose_kernel(name)
        elif has_triton():
            kernel = load_fast_kernel(name)
        else:
            raise UnavailableError("it needs a CUDA GPU and the triton package")
        return lambda x, experts, gates: kernel(x, experts, gates, weights)

    return Variant(name=f"some {name}", make=make, is_ours=True)


def matrices(weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(up, up_bias, down, down_bias) of experts that have both projections, as all here do."""
    assert weights.down is not None
    assert weights.down_bias is not None
    return weights.up, weights.up_bias, weights.down, weights.down_bias


def make_transformers_grouped(weights: ExpertWeights, top_k: int) -> Mix:  # noqa: ARG001
    """transformers' `grouped_mm` experts, told that they have biases and no gate: exactly this project's expert."""
    if weights.lora is not None:
        raise UnavailableError("transformers has no low-rank experts of this form")
    try:
        package = importlib.import_module("transformers")
        decorate = importlib.import_module("transformers.integrations.moe").use_experts_implementation
    except (ImportError, AttributeError) as error:
        raise UnavailableError(f"transformers and its experts interface are not there ({error})") from None
    wanted = {"has_gate": False, "has_bias": True, "is_transposed": False}
    unknown = set(wanted) - set(inspect.signature(decorate).parameters)
    if unknown:
        raise UnavailableError(f"transformers {package.__version__} does not know {', '.join(sorted(unknown))}")

    @decorate(**wanted)
    class Experts(nn.Module):
        """The experts under the names that transformers looks for; the parameters are the given stacks themselves."""

        def __init__(self, config: SimpleNamespace) -> None:  # noqa: ARG002
            super().__init__()
            self.num_experts, self.intermediate_dim, self.hidden_dim = weights.up.shape
            names = ("up_proj", "up_proj_bias", "down_proj", "down_proj_bias")
            for name, stack in zip(names, matrices(weights), strict=True):
                assert isinstance(stack, nn.Parameter)
                self.register_parameter(name, stack)
            self.act_fn = nn.GELU()

        def forward(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:  # noqa: ARG002
            raise AssertionError("transformers puts its own forward in this one's place")

    module: Mix = Experts(SimpleNamespace(_experts_implementation="grouped_mm"))
    return module


def make_torch_grouped(weights: ExpertWeights, top_k: int, *, adds: bool = False) -> Mix:
    """The torch idiom: sort the slots, gather, grouped products; then unsort, and add up each token's k rows.

    adds: end with `index_add` instead, which has less to move, but adds atomically. Nothing here waits for the device:
    the ends of the groups stay there.
    """

    def grouped(rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
        """rows (S, I) times each group's own matrix of the stack (E, O, I), as nn.Linear would: (S, O)."""
        return F.grouped_mm(rows, stack.transpose(1, 2), offs=ends)

    def mix(x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        up, up_bias, down, down_bias = matrices(weights)
        expert, order = experts.reshape(-1).sort(stable=True)
        numbers = torch.arange(weights.num_experts, device=x.device)
        ends = torch.searchsorted(expert, numbers, right=True).to(torch.int32)
        rows = x.index_select(0, order // top_k)
        pre = grouped(rows, up, ends) + up_bias.index_select(0, expert)
        if weights.lora is not None:
            pre = pre + grouped(grouped(rows, weights.lora.up_in, ends), weights.lora.up_out, ends)
        hidden = F.gelu(pre)
        out = grouped(hidden, down, ends) + down_bias.index_select(0, expert)
        if weights.lora is not None:
            out = out + grouped(grouped(hidden, weights.lora.down_in, ends), weights.lora.down_out, ends)
        out = out * gates.reshape(-1).index_select(0, order)[:, None]
        if adds:
            return torch.zeros_like(x).index_add(0, order // top_k, out)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return out.index_select(0, place).view(-1, top_k, out.shape[1]).sum(1)

    return mix


def make_loop(weights: ExpertWeights, top_k: int) -> Mix:  # noqa: ARG001
    """A loop over the experts in use, each on the tokens that chose it: the classic of Hugging Face's models."""

    def mix(x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        # Unbound, so that a trained stack's gradient is put together once and not once for every expert.
        stacks = list(zip(*(stack.unbind(0) for stack in matrices(weights)), strict=True))
        lora = None if weights.lora is None else weights.lora.unbind()
        chosen = F.one_hot(experts, weights.num_experts).permute(2, 1, 0)
        y = torch.zeros_like(x)
        for expert in chosen.sum((1, 2)).nonzero().flatten().tolist():
            slot, token = torch.where(chosen[expert])
            rows = x.index_select(0, token)
            w1, b1, w2, b2 = stacks[expert]
            pre = F.linear(rows, w1, b1)
            if lora is not None:
                pre = pre + F.linear(F.linear(rows, lora[expert][0]), lora[expert][1])
            hidden = F.gelu(pre)
            out = F.linear(hidden, w2, b2)
            if lora is not None:
                out = out + F.linear(F.linear(hidden, lora[expert][2]), lora[expert][3])
            y.index_add_(0, token, out * gates[token, slot, None])
        return y

    return mix


class Dense(nn.Module):
    """One network of width k·F for every token: as many operations, no routing, another function. The ceiling."""

    def __init__(self, weights: ExpertWeights, top_k: int) -> None:
        super().__init__()
        if weights.lora is not None:
            raise UnavailableError("a dense network has no low-rank update for each expert")
        up, up_bias, down, down_bias = (stack.detach()[:top_k] for stack in matrices(weights))
        trained = weights.up.requires_grad
        # k experts side by side; only the small down-projection is copied for that.
        self.up = nn.Parameter(up.flatten(0, 1), requires_grad=trained)
        self.up_bias = nn.Parameter(up_bias.flatten(), requires_grad=trained)
        self.down = nn.Parameter(down.transpose(0, 1).flatten(1), requires_grad=trained)
        self.down_bias = nn.Parameter(down_bias[0], requires_grad=trained)

    def forward(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:  # noqa: ARG002
        return F.linear(F.gelu(F.linear(x, self.up, self.up_bias)), self.down, self.down_bias)


PEERS = (
    Variant(name="transformers-grouped", make=make_transformers_grouped),
    Variant(name="torch-grouped", make=make_torch_grouped),
    Variant(name="torch-grouped-add", make=partial(make_torch_grouped, adds=True)),
    Variant(name="loop", make=make_loop),
    Variant(name="dense", make=Dense, same_function=False),
)
# The loop's bounds are data; and what a compiler makes of the two endings of the torch idiom is one and the same work.
COMPILED_PEERS = ("transformers-grouped", "torch-grouped", "dense")


def list_variants(device: torch.device, compiled: str = "all", only: Sequence[str] = ()) -> list[Variant]:
    """The variants for a device, ours first. compiled: none, peers, or all; only: keep those of these names."""
    ours = [our_kernel(name) for name in KERNELS[device.type]]
    chosen = [*ours, *PEERS]
    compilable = [*(ours if compiled == "all" else ()), *(peer for peer in PEERS if peer.name in COMPILED_PEERS)]
    if compiled != "none":
        chosen += [replace(variant, name=variant.name + COMPILED, compiled=True) for variant in compilable]
    names = [variant.name.removesuffix(COMPILED) for variant in chosen]
    for name in only:
        if name not in names:
            known = ", ".join(dict.fromkeys(names))
            raise ConfigError(f"--variants {name!r} is not known on {device.type}; choose from {known}")
    return [variant for variant, name in zip(chosen, names, strict=True) if not only or name in only]

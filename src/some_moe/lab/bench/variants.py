"""Everything that is timed side by side: this project's kernels, and their peers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from some_moe.config import ConfigError
from some_moe.experts import ExpertWeights, choose_kernel
from some_moe.lab.bench.peers import (
    Dense,
    Mix,
    UnavailableError,
    make_loop,
    make_torch_grouped,
    make_torch_grouped_add,
    make_transformers_grouped,
)

KERNELS = {"cpu": ("cpu", "grouped"), "cuda": ("grouped", "triton")}
COMPILED = ", compiled"


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
        try:
            kernel = choose_kernel(name)
        except (ValueError, ImportError) as error:
            raise UnavailableError(str(error)) from None
        return lambda x, experts, gates: kernel(x, experts, gates, weights)

    return Variant(name=f"some {name}", make=make, is_ours=True)


PEERS = (
    Variant(name="transformers-grouped", make=make_transformers_grouped),
    Variant(name="torch-grouped", make=make_torch_grouped),
    Variant(name="torch-grouped-add", make=make_torch_grouped_add),
    Variant(name="loop", make=make_loop),
    Variant(name="dense", make=Dense, same_function=False),
)
# The loop's bounds are data; and what a compiler makes of the two endings of the torch idiom is one and the same work.
COMPILED_PEERS = ("transformers-grouped", "torch-grouped", "dense")


def list_variants(device: torch.device, compiled: str = "all", only: Sequence[str] = ()) -> list[Variant]:
    """The variants for a device, ours first. compiled: none, peers, or all; only: keep those of these names."""
    ours = [our_kernel(name) for name in KERNELS[device.type]]
    chosen = [*ours, *PEERS]
    if compiled == "all":
        chosen += [replace(v, name=v.name + COMPILED, compiled=True) for v in ours]
    if compiled != "none":
        chosen += [replace(v, name=v.name + COMPILED, compiled=True) for v in PEERS if v.name in COMPILED_PEERS]
    names = [variant.name.removesuffix(COMPILED) for variant in chosen]
    for name in only:
        if name not in names:
            known = ", ".join(dict.fromkeys(names))
            raise ConfigError(f"--variants {name!r} is not known on {device.type}; choose from {known}")
    return [variant for variant, name in zip(chosen, names, strict=True) if not only or name in only]

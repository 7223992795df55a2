"""The model of this package behind transformers' face: the same function as `modeling_some.py`, trained as ours are."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from some_moe.config import GravityConfig, ModelConfig
from some_moe.experts import ExpertWeights, LoraWeights, choose_kernel
from some_moe.growth.library import BranchRouter
from some_moe.hashing import derive_key, make_layer_words
from some_moe.hf import modeling_some
from some_moe.hf.modeling_some import Library, Place, Routed, SomeConfig
from some_moe.hf.recording import Recorder
from some_moe.model.attention import Geometry
from some_moe.model.dropout import STREAM, Dropout
from some_moe.model.layer import FrozenDenseFFN, SomeLayer
from some_moe.model.library import ExpertLibrary
from some_moe.model.router import HashRouter, KeyRouter
from some_moe.model.routing import Routing
from some_moe.model.transformer import SomeLM, sum_aux_losses
from some_moe.precision import full_precision, product_dtype

SHIM = """\"\"\"Written by `some export`; the model is in the package some-moe.\"\"\"

from some_moe.hf import SomeConfig, SomeForCausalLM  # noqa: F401
"""
FILE = "modeling_some"
AUTO_MAP = {"AutoConfig": f"{FILE}.SomeConfig", "AutoModelForCausalLM": f"{FILE}.SomeForCausalLM"}


class FastLibrary(Library):
    """The same experts. Once all of them were asked for, as training does, they run by the kernels of this package."""

    stacks: list[Tensor] | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> "FastLibrary":
        self.stacks = None
        super()._apply(fn, recurse)
        return self

    def find_stacks(self, x: Tensor) -> list[Tensor] | None:
        """Every matrix of all experts, where all are at hand; those that are made are no longer kept one by one."""
        if self.num_made == 0:
            return [getattr(self, name) for name in self.shapes]
        if self.num_made < self.num_experts or (self.num_kept or self.num_experts) < self.num_experts:
            return None
        if self.training and torch.is_grad_enabled() and self.stacks is None:
            self.make_all(x)
        is_fit = self.stacks is not None and self.stacks[0].dtype.itemsize >= min(self.dtype.itemsize, x.dtype.itemsize)
        return self.stacks if is_fit else None

    def make_all(self, x: Tensor) -> None:
        super().make_all(x)
        if len(self.made) == self.num_experts:
            order = [self.made[expert] for expert in range(self.num_made)]
            with torch.inference_mode(False), torch.no_grad():
                self.stacks = [torch.stack(part) for part in zip(*order, strict=True)]
            self.made = {expert: [stack[expert] for stack in self.stacks] for expert in range(self.num_made)}

    def forward(self, x: Tensor, experts: Tensor, gates: Tensor, *base: Tensor) -> Tensor:
        """base: experts and gates of the base of a grown run, to which what the chosen of its branches say is added."""
        if base:
            assert self.num_base is not None
            is_new = experts >= self.num_base
            experts = torch.cat([base[0], experts.where(is_new, base[0])], -1)
            gates = torch.cat([base[1], gates * is_new], -1)
        x = x.to(product_dtype(x))
        stacks = self.find_stacks(x)
        with full_precision(x):
            if stacks is None:
                y: Tensor = super().forward(x, experts, gates)
                return y
            lora = None
            if self.has_lora:
                lora = LoraWeights(**{name: getattr(self, name) for name in ("up_in", "up_out", "down_in", "down_out")})
            named: dict[str, Any] = dict(zip(self.shapes, stacks, strict=True))
            y = choose_kernel("auto")(x, experts, gates, ExpertWeights(**named, gain=self.gain, lora=lora))
            return y if self.shared is None else self.shared(y)


def take_over(config: SomeConfig, old: ExpertLibrary, *, has_studies: bool) -> FastLibrary:
    """A library that makes its experts when they are chosen, in the place of one that has made them all."""
    experts, width = len(old.up), old.fan_in["down"]
    with old.up.device:
        new = FastLibrary(config, old.layer, experts=experts, width=width, has_studies=has_studies)
    if not old.up.is_meta:
        fits = {name: value for name, value in old.state_dict().items() if new.state_dict()[name].shape == value.shape}
        new.load_state_dict(fits, strict=False)
    return new


class HeldCache:
    """A cache of transformers, as our attention asks for one."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.cache.update(keys, values, layer)
        return found


class SomeForCausalLM(modeling_some.SomeForCausalLM):
    """`SomeLM` for transformers. With `GravityCallback` its keys move under the Trainer, too."""

    supports_gradient_checkpointing = True

    def __init__(self, config: SomeConfig) -> None:
        self.gradient_checkpointing = False
        super().__init__(config)

    def build(self, config: SomeConfig) -> nn.Module:
        # from_pretrained builds on the meta device; our modules name their device, so it must be handed on.
        device = torch.get_default_device()
        model = ModelConfig(**config.model)
        gravity = GravityConfig(**config.gravity) if config.gravity else None
        config.model = model.model_dump(mode="json")  # what was left out has its default
        lm = SomeLM(model, gravity, seed=config.seed, device=device)
        for module in lm.modules():
            if isinstance(module, SomeLayer | FrozenDenseFFN):
                old: Any = module.library
                module.library = take_over(config, old, has_studies=isinstance(module, SomeLayer))  # type: ignore[assignment]
            if isinstance(module, SomeLayer) and config.num_base is not None:
                assert module.key_router is not None
                looking = [slice(*place) for place in config.looking]
                module.key_router = BranchRouter(module.key_router, model, config.num_base, looking)
        config.gravity = lm.gravity.model_dump(mode="json")
        self.recorder = Recorder(lm.layers)
        return lm

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Whoever saves this model needs the package to open it again: no code of it is copied."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As transformers does it, with the two lines that lead from the folder to this package."""
        from pathlib import Path

        self.config.auto_map = AUTO_MAP
        super().save_pretrained(*args, **kwargs)
        folder = Path(args[0] if args else kwargs["save_directory"])
        (folder / f"{FILE}.py").write_text(SHIM, encoding="utf-8")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Make again the few small tensors that no file holds; `SomeLM` has begun all others."""
        if isinstance(module, Dropout):
            module.words.copy_(torch.tensor(derive_key(STREAM, module.place), dtype=torch.int32))
        elif isinstance(module, KeyRouter | HashRouter):
            layer = module.state.layer if isinstance(module, KeyRouter) else module.layer
            module.layer_words.copy_(make_layer_words([layer])[0])

    def run_blocks(
        self,
        x: Tensor,
        ids: Tensor | None,
        place: Place,
        cache: Any,
        counted: Tensor | None,
        shares: Tensor | None,
    ) -> tuple[Tensor, list[Tensor], Tensor | None, Routed | None]:
        is_recorded = self.training and torch.is_grad_enabled()
        info = self.recorder.inform(x, is_recorded=is_recorded, ids=ids, counted=counted)
        info = info if shares is None else replace(info, shares=shares)
        geometry = Geometry(rotation=place.rotation, mask=place.mask, is_causal=place.is_causal)
        held = None if cache is None else HeldCache(cache)
        x = self.model.drop_embedding(x, info)
        inputs: list[Tensor] = []
        routings: list[Routing] = []
        for block in self.model.blocks:
            inputs.append(x)
            arguments = (x, geometry, info, None, routings[-1].query if routings else None, held)
            if self.gradient_checkpointing and is_recorded:
                # The other way hands no gradient on through a routing: its share of the loss would be lost.
                x, routing = self._gradient_checkpointing_func(block.__call__, *arguments, use_reentrant=False)
            else:
                x, routing = block(*arguments)
            if routing is not None:
                routings.append(routing)
        if is_recorded and routings:
            self.recorder.add(routings, len(x))
        last = routings[-1] if routings else None
        routed = None if last is None or last.experts is None or last.gates is None else (last.experts, last.gates)
        added = sum_aux_losses(routings) if self.training else None
        return x, inputs, added, None if routed is None else Routed(None, *routed)

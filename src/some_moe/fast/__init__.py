"""The fast model on CUDA: the same parameters and state dict, another forward.

    some_moe.accelerate(module)

makes every SoME part below a module fast, in place, by giving it the class that knows a GPU (as FSDP2 does). Nothing
here is imported by the plain model; `training/machine.py` and `some_moe.accelerate` alone bring it in.
"""

from typing import TypeVar

from torch import nn

from some_moe.config import ConfigError

Module = TypeVar("Module", bound=nn.Module)


def accelerate(module: Module) -> Module:
    """Make every SoME part below `module` fast, in place, and return it: a `SomeLM`, or any module with `SomeLayer`s.

    Parameters, buffers, their names and their values stay what they are, so optimizers and checkpoints go on.
    """
    from some_moe.training.machine import has_triton

    if any(getattr(part, "remembers", False) for part in module.modules()):
        raise ConfigError("a library that looks back has no fast form; use it as it is, or grow with --looks-back 0")
    if not has_triton():
        raise ConfigError("accelerate needs a CUDA GPU and the triton package; without it the module runs as it is")
    from some_moe.fast.model import FastAttention, FastBlock, FastLayer, FastLM, FastRouter
    from some_moe.model.attention import Attention
    from some_moe.model.layer import SomeLayer
    from some_moe.model.router import KeyRouter
    from some_moe.model.transformer import Block, SomeLM

    kinds: dict[type[nn.Module], type[nn.Module]] = {
        SomeLM: FastLM,
        Block: FastBlock,
        Attention: FastAttention,
        SomeLayer: FastLayer,
        KeyRouter: FastRouter,
    }
    for part in list(module.modules()):
        is_new = type(part) in kinds
        part.__class__ = kinds.get(type(part), type(part))
        if is_new and isinstance(part, FastLM):
            part.become_fast()
    return module

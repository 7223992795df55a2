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

    if any(hasattr(part, "branches") for part in module.modules()):
        raise ConfigError("a library with branches has no fast form; use it as it is")
    if not has_triton():
        raise ConfigError("accelerate needs a CUDA GPU and the triton package; without it the module runs as it is")
    from some_moe.fast import model as fast
    from some_moe.model.attention import Attention
    from some_moe.model.dropout import Dropout
    from some_moe.model.layer import SomeLayer
    from some_moe.model.router import HashRouter, KeyRouter
    from some_moe.model.transformer import Block, SomeLM

    kinds: dict[type[nn.Module], type[nn.Module]] = {
        SomeLM: fast.FastLM,
        Block: fast.FastBlock,
        Attention: fast.FastAttention,
        Dropout: fast.FastDropout,
        SomeLayer: fast.FastLayer,
        HashRouter: fast.FastHashRouter,
        KeyRouter: fast.FastRouter,
    }
    parts = [part for part in module.modules() if type(part) in kinds]
    for part in parts:
        part.__class__ = kinds[type(part)]
    for part in parts:
        if isinstance(part, fast.FastLM):
            part.become_fast()
    return module

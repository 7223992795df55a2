"""The fast model on CUDA: the same parameters and state dict, another forward.

    some_moe.accelerate(module)

makes every SoME part below a module fast, in place, by giving it the class that knows a GPU (as FSDP2 does). Nothing
here is imported by the plain model; `training/machine.py` and `some_moe.accelerate` alone bring it in.
"""

from typing import TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def accelerate(module: Module) -> Module:
    """Make every SoME part below `module` fast, in place, and return it: a `SomeLM`, or any module with `SomeLayer`s.

    Parameters, buffers, their names and their values stay what they are, so optimizers and checkpoints go on.
    """
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
    for part in module.modules():
        part.__class__ = kinds.get(type(part), type(part))
    if isinstance(module, FastLM):
        module.become_fast()
    return module

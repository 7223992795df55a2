"""How trained parameters start. One table; every parameter has its own random stream, named after it.

So two models that share a part start it alike, whatever else differs: controls differ by what they test.

| parameter                                  | start                                         |
| ------------------------------------------ | --------------------------------------------- |
| token embedding                            | normal, standard deviation `embedding_std`    |
| matrix of a linear map                     | uniform within ±1/√fan_in                     |
| … whose output joins the residual stream   | the same, divided by √(2·num_layers)          |
| bias                                       | 0                                             |
| LayerNorm                                  | weight 1, bias 0                              |
| learned keys                               | random unit vectors                           |
| LoRA                                       | inward matrix uniform within ±1/√fan_in, outward 0 |
| learned temperature, gains, output scale   | neutral                                       |
| trained experts                            | the bits of the frozen ones                   |
"""

import math
import zlib

import torch
from torch import Tensor, nn

from some_moe.config import ModelConfig
from some_moe.hashing import derive_key
from some_moe.model.keystore import KeyState
from some_moe.model.library import LoraLibrary
from some_moe.model.router import Temperature

RESIDUAL_OUTPUTS = ("attention.out", "ffn.project", "library.shared")


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_key(seed, zlib.crc32(name.encode()))[0] & 0x7FFFFFFF)


def _fill_uniform(parameter: Tensor, bound: float, seed: int, name: str) -> None:
    start = torch.empty(parameter.shape, device="cpu").uniform_(-bound, bound, generator=_generator(seed, name))
    parameter.copy_(start)


@torch.no_grad()
def init_weights(root: nn.Module, config: ModelConfig, *, seed: int, name: str = "") -> None:
    """Set every trained parameter below `root` by the table above; `name` is the root's own full name."""
    if any(p.is_meta for p in root.parameters()):
        return
    for path, module in root.named_modules(prefix=name):
        if isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            if path.endswith(RESIDUAL_OUTPUTS):
                bound /= math.sqrt(2 * config.num_layers)
            _fill_uniform(module.weight, bound, seed, path)
            module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            start = torch.empty(module.weight.shape, device="cpu")
            module.weight.copy_(start.normal_(0, config.embedding_std, generator=_generator(seed, path)))
        elif isinstance(module, LoraLibrary):
            for part in ("up_in", "down_in"):
                weight, here = getattr(module, part), module.experts
                whole = torch.empty(config.num_experts, *weight.shape[1:], device="cpu")
                _fill_uniform(whole, 1 / math.sqrt(weight.shape[-1]), seed, f"{path}.{part}")
                weight.copy_(whole[here.start : here.stop])
        elif isinstance(module, Temperature):
            module.place.fill_(module.start)
        elif isinstance(module, KeyState) and isinstance(module.keys, nn.Parameter):
            module.scatter_keys()

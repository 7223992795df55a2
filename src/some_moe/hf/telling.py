"""transformers' own `generate` on the weights of one of our models, to be timed beside ours."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from some_moe.config import RunConfig
from some_moe.hf.modeling import SomeForCausalLM
from some_moe.hf.modeling_some import SomeConfig
from some_moe.model.transformer import SomeLM

Teller = Callable[[Tensor, int], Tensor]  # prompt (B, T) and a count N → tokens (B, N)
CACHES = {"transformers": {}, "transformers, static cache": {"cache_implementation": "static"}}


def wrap(model: SomeLM, config: RunConfig) -> SomeForCausalLM:
    """The same weights for transformers, all experts at hand, in the type that the model computes in."""
    settings = config.model.model_dump(mode="json"), config.gravity.model_dump(mode="json"), config.train.seed
    wrapped = SomeForCausalLM(SomeConfig(*settings, made_experts=0, max_position_embeddings=config.data.seq_len))
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    wrapped.model.load_state_dict({name: held[name] for name in wrapped.model.state_dict()})
    found: SomeForCausalLM = wrapped.to(device=model.head.weight.device, dtype=model.dtype or torch.float32).eval()
    return found


def make_tellers(model: SomeLM, config: RunConfig) -> dict[str, Teller]:
    """`generate` with a cache that grows, and with a static one, which transformers compiles on a GPU."""
    wrapped = wrap(model, config)

    def make(options: dict[str, Any]) -> Teller:
        def tell(prompt: Tensor, count: int) -> Tensor:
            told: Tensor = wrapped.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count,
                min_new_tokens=count, eos_token_id=None, pad_token_id=0, **options,
            )  # fmt: skip
            return told[:, prompt.shape[1] :]

        return tell

    return {name: make(options) for name, options in CACHES.items()}

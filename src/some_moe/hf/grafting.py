"""SoME layers in the place of the feed-forward layers of a transformers model.

The grafted model has a type of its own (`some_gpt2` for `gpt2`), which the auto classes know once `some_moe.hf` is
imported: without it a saved folder is refused, where it would otherwise be opened with layers of noise.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from some_moe.config import ConfigError, GravityConfig, ModelConfig
from some_moe.errors import in_a_sentence
from some_moe.hashing import make_layer_words
from some_moe.hf.recording import Recorder, find_recorders, is_recomputed
from some_moe.model.expert_weights import checksum
from some_moe.model.layer import SomeLayer
from some_moe.model.library import ExpertLibrary
from some_moe.model.router import KeyRouter

PLACE = "mlp"  # what the three families call the feed-forward layer of a block

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# What a layer alone knows nothing of; it would be passed over in silence.
OF_WHOLE_MODELS = {
    *("vocab_size", "d_model", "num_layers", "num_heads", "positions", "norm", "embedding_std", "dropout"),
    *("ffn", "dense_width", "grounding", "balance_loss", "entropy_band", "entropy_band_weight", "residual_dtype"),
}


class GraftedLayer(nn.Module):
    """A SoME layer where a model's own feed-forward layer was."""

    def __init__(self, model: ModelConfig, gravity: GravityConfig, layer: int, seed: int) -> None:
        super().__init__()
        # from_pretrained builds on the meta device; our modules name their device, so it must be handed on.
        self.some = SomeLayer(model, gravity, layer=layer, seed=seed, device=torch.get_default_device())
        self.recorder = Recorder([self.some])

    def forward(self, x: Tensor) -> Tensor:
        is_recorded = self.training and not is_recomputed()
        mask = self.recorder.mask
        counted = mask.bool() if mask is not None and mask.shape == x.shape[:2] else None
        y, routing = self.some(x, self.recorder.inform(x, is_recorded=is_recorded, counted=counted))
        if is_recorded:
            self.recorder.add([routing], len(x))
        return y  # type: ignore[no-any-return]


class Grafted:
    """What the three families have in common once they are grafted. It stands before the model's own class."""

    _keep_in_fp32_modules_strict = ["state"]  # noqa: RUF012 - keys move by less than half precision can tell
    config: Any

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        super().__init__(config, *inputs, **kwargs)  # type: ignore[call-arg]
        put_layers(self)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it; experts that are not those of the saved model are refused."""
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        missing = sorted(name for name in map(str, info["missing_keys"]) if f".{PLACE}." in name)
        if missing:
            raise ConfigError(f"the file of weights has no {missing[0]}; get the folder anew")
        model.renew()
        model.check_experts()
        return (model, info) if wants_info else model

    @torch.no_grad()
    def renew(self) -> None:
        """Make again what no file holds: from_pretrained leaves anything in it."""
        for library in list_remade(self):
            library.generate()
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, KeyRouter):
                module.layer_words.copy_(make_layer_words([module.state.layer])[0])

    def check_experts(self) -> None:
        """Refuse experts that are not those that were saved."""
        saved = self.config.some["checksums"]
        for place, library in enumerate(list_remade(self)):
            told = saved[place] if place < len(saved) else {}
            dtype = DTYPES.get(told.get("dtype", ""), library.up.dtype)  # of a model that was cast, its experts with it
            found = checksum([stack.to(dtype) for stack in library.stacks()])
            if told.get("checksum") != found:
                raise ConfigError(
                    f"the experts of layer {library.layer} have the checksum {found}, but config.json says "
                    f"{told.get('checksum')}; restore the config that was saved with them"
                )

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As transformers does it; the config gets the checksums of the frozen experts."""
        self.config.some = self.config.some | {"checksums": describe_experts(self)}
        super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


class SomeGPT2Config(GPT2Config):  # type: ignore[misc]
    model_type = "some_gpt2"


class SomeGPT2LMHeadModel(Grafted, GPT2LMHeadModel):  # type: ignore[misc]
    config_class = SomeGPT2Config


class SomeLlamaConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "some_llama"


class SomeLlamaForCausalLM(Grafted, LlamaForCausalLM):  # type: ignore[misc]
    config_class = SomeLlamaConfig


class SomeQwen2Config(Qwen2Config):  # type: ignore[misc]
    model_type = "some_qwen2"


class SomeQwen2ForCausalLM(Grafted, Qwen2ForCausalLM):  # type: ignore[misc]
    config_class = SomeQwen2Config


FAMILIES: dict[type, type] = {
    GPT2LMHeadModel: SomeGPT2LMHeadModel,
    LlamaForCausalLM: SomeLlamaForCausalLM,
    Qwen2ForCausalLM: SomeQwen2ForCausalLM,
}
for _plain, _grafted in FAMILIES.items():
    _config: Any = _grafted.config_class  # type: ignore[attr-defined]
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModelForCausalLM.register(_config, _grafted, exist_ok=True)


@in_a_sentence()
def graft(
    model: Any,
    *,
    layers: Iterable[int] | None = None,
    num_experts: int = 64,
    d_ffn: int = 256,
    top_k: int = 4,
    gravity: GravityConfig | None = None,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """Put SoME layers in the place of a GPT-2, Llama or Qwen2 model's feed-forward layers. Returns the same model.

    model: changed in place. layers: the blocks that get one (all). num_experts, d_ffn, top_k: of each. gravity: how
    keys move. seed: of weights, keys and samples. settings: further fields of `ModelConfig`, such as
    trainability="lora" or score="cosine".

    The new layers begin untrained: train the model, with `GravityCallback` in the Trainer's callbacks.
    """
    kind = FAMILIES.get(type(model))
    if kind is None:
        if isinstance(model, Grafted):
            raise ConfigError("this model has SoME layers already; graft each model once")
        names = ", ".join(plain.__name__ for plain in FAMILIES)
        raise ConfigError(f"{type(model).__name__} cannot be grafted; use one of {names}")
    blocks = find_blocks(model)
    chosen = [*range(len(blocks))] if layers is None else sorted(set(layers))
    if not chosen:
        raise ConfigError("layers names no block; leave it out for all of them")
    for number in chosen:
        if number not in range(len(blocks)):
            raise ConfigError(f"layer {number} is not there: the model has blocks 0 to {len(blocks) - 1}")
    for name in sorted(OF_WHOLE_MODELS & settings.keys()):
        raise ConfigError(f"{name} is of a whole SoME model, not of its layers; leave it out of a graft")
    if settings.get("router") == "hash":
        raise ConfigError("a grafted layer finds its experts by content; leave out router: hash")
    heads, d_model = model.config.num_attention_heads, model.config.hidden_size
    shape = {"num_experts": num_experts, "d_ffn": d_ffn, "top_k": top_k, "d_model": d_model, "num_heads": heads}
    config = ModelConfig(**(shape | {"num_layers": len(blocks), "positions": "alibi"} | settings))
    rules = gravity or (GravityConfig() if config.router == "gravity" else GravityConfig.off())
    model.config.__class__ = kind.config_class  # type: ignore[attr-defined]
    model.config.some = {
        "layers": chosen,
        "seed": seed,
        "model": config.model_dump(mode="json"),
        "gravity": rules.model_dump(mode="json"),
        "checksums": [],
    }
    model.config.architectures = [kind.__name__]
    model.__class__ = kind
    put_layers(model, like=next(model.parameters()))
    return model


def find_blocks(model: Any) -> Any:
    return model.transformer.h if isinstance(model, GPT2LMHeadModel) else model.model.layers


def put_layers(model: Any, like: Tensor | None = None) -> None:
    """Put the SoME layers that the config asks for into a model's blocks; like: whose type and place they take."""
    told = getattr(model.config, "some", None)
    if told is None:
        raise ConfigError("this config has no SoME layers; make one by some_moe.graft(model)")
    shape, gravity = ModelConfig(**told["model"]), GravityConfig(**told["gravity"])
    model.register_forward_pre_hook(note_padding, with_kwargs=True)
    for number in told["layers"]:
        new = GraftedLayer(shape, gravity, number, told["seed"])
        block = find_blocks(model)[number]
        setattr(block, PLACE, new if like is None else new.to(like.device, like.dtype).train(model.training))


def note_padding(model: nn.Module, _: Any, given: dict[str, Any]) -> None:
    """Let the layers know which tokens are padding: a model tells its attention alone."""
    for recorder in find_recorders(model):
        recorder.mask = given.get("attention_mask")


def list_remade(model: Any) -> list[ExpertLibrary]:
    """The libraries of grafted layers that no file holds, in order of depth."""
    libraries = [module for module in model.modules() if isinstance(module, ExpertLibrary)]
    return [library for library in libraries if not library.trained and library.init_method != "orthogonal"]


def describe_experts(model: Any) -> list[dict[str, str]]:
    """Type and checksum of each of them."""
    return [{name: library.describe()[name] for name in ("dtype", "checksum")} for library in list_remade(model)]

"""SoME models and layers in Hugging Face transformers. To import this lets its auto classes open exported folders."""

from some_moe.config import ConfigError

try:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers import __version__ as installed
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "transformers":  # what it needs itself it tells itself
        raise
    raise ConfigError("some_moe.hf needs transformers; run pip install 'some-moe[hf]'") from None
if tuple(map(int, installed.split(".")[:2])) < (5, 17):
    raise ConfigError(f"transformers {installed} is too old for some_moe.hf; run pip install 'some-moe[hf]'")

from some_moe.hf.exporting import export
from some_moe.hf.grafting import graft
from some_moe.hf.modeling import SomeForCausalLM
from some_moe.hf.modeling_some import SomeConfig
from some_moe.hf.pushing import push
from some_moe.hf.recording import GravityCallback

__all__ = ["GravityCallback", "SomeConfig", "SomeForCausalLM", "export", "graft", "push"]

AutoConfig.register("some_moe", SomeConfig, exist_ok=True)
AutoModelForCausalLM.register(SomeConfig, SomeForCausalLM, exist_ok=True)

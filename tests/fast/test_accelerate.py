"""What `accelerate` says where it cannot work."""

import pytest
import torch

from some_moe import ModelConfig, SomeLayer, accelerate
from some_moe.config import ConfigError


@pytest.mark.skipif(torch.cuda.is_available(), reason="it can work here")
def test_without_a_gpu_it_is_refused_in_one_sentence_and_nothing_changes() -> None:
    layer = SomeLayer(ModelConfig(d_model=16, num_heads=2, num_experts=4, d_ffn=16, top_k=2))
    with pytest.raises(ConfigError, match=r"accelerate needs a CUDA GPU .* runs as it is"):
        accelerate(layer)
    assert type(layer) is SomeLayer

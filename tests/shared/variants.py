"""Small models of every kind that a config can ask for, for tests that hold for all of them."""

import torch
from torch import Tensor

from some_moe.config import GravityConfig, ModelConfig
from some_moe.model.keystore import KeyState

BASE = ModelConfig(d_model=24, num_layers=3, num_heads=2, vocab_size=61, num_experts=6, d_ffn=20, top_k=2)

MODELS: dict[str, dict[str, object]] = {
    "plain": {},
    "linear-query": {"query": "linear"},
    "alibi": {"positions": "alibi"},
    "sinusoidal": {"positions": "sinusoidal"},
    "post-norm": {"norm": "post"},
    "cosine": {"score": "cosine"},
    "centred": {"center_queries": True},
    "grounded": {"grounding": 0.1},
    "temperature": {"temperature": 0.8},
    "learned-temperature": {"learn_temperature": True, "entropy_band": (0.5, 1.0)},
    "balance-loss": {"balance_loss": 0.01},
    "one-expert-a-token": {"top_k": 1},
    "all-experts": {"top_k": 6},
    "orthogonal": {"init_method": "orthogonal"},
    "sparse": {"init_method": "sparse"},
    "bfloat16-experts": {"expert_dtype": "bfloat16"},
    "lora": {"trainability": "lora", "lora_rank": 3},
    "full": {"trainability": "full"},
    "gains": {"gains": True},
    "swiglu": {"activation": "swiglu"},
    "swiglu-full": {"activation": "swiglu", "trainability": "full", "shared_expert": 10},
    "swiglu-lora": {"activation": "swiglu", "trainability": "lora", "lora_rank": 3},
    "swiglu-dense": {"activation": "swiglu", "ffn": "dense", "dense_width": 48},
    "shared-down": {"shared_down": True},
    "shared-expert": {"shared_expert": 10},
    "query-residual": {"query_residual": True},
    "output-scale": {"output_scale": True},
    "every-study": {"shared_expert": 10, "query_residual": True, "output_scale": True, "gains": True, "grounding": 0.1},
    "learned-keys": {"router": "learned"},
    "weight-keys": {"router": "weights"},
    "hash": {"router": "hash"},
    "dense": {"ffn": "dense", "dense_width": 48},
    "frozen-dense": {"ffn": "frozen_dense", "dense_width": 40},
}


def make_config(name: str) -> ModelConfig:
    return BASE.override(MODELS[name])


def make_gravity(name: str) -> GravityConfig:
    """Every rule that this kind of model can follow, at a strength that shows within a few steps."""
    config = make_config(name)
    if config.ffn != "some" or config.router == "hash":
        return GravityConfig.off()
    if config.router != "gravity":
        return GravityConfig.off(balance_rate=0.01)
    return GravityConfig(
        alpha=0.1,
        beta=0.05,
        delta=0.1,
        theta_percentile=0.3,
        max_step=0.2,
        normalize=True,
        respawn_below=0.7,
        respawn_patience=1,
        balance_rate=0.01,
        key_ema=0.5,
        token_fraction=0.5,
        num_samples=8,
        ema_decay=0.5,
    )


def snapshot(state: KeyState) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in state.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

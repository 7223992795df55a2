"""Presets for a first look: small enough for a CPU, on generated stories."""

from some_moe.config import ConfigError, DataConfig, GravityConfig, ModelConfig, RunConfig, TrainConfig, did_you_mean
from some_moe.lab.registry import EXPERIMENTS, find_experiment


def smoke() -> RunConfig:
    """Seconds on one core: enough to see every part work, and nothing learned to speak of."""
    return RunConfig(
        name="smoke",
        model=ModelConfig(
            d_model=32, num_layers=2, num_heads=2, vocab_size=512, num_experts=8, d_ffn=32, top_k=2, query="linear"
        ),
        gravity=GravityConfig(),
        data=DataConfig(seq_len=128, batch_size=8, train_subset_size=96, val_subset_size=16),
        train=TrainConfig(
            epochs=2, learning_rate=3e-3, log_every=4, save_every=5, snapshot_every=6, sample_tokens=20, device="cpu"
        ),
    )


def demo() -> RunConfig:
    """A few minutes on two cores: a small model that tells whole stories."""
    return RunConfig(
        name="demo",
        model=ModelConfig(d_model=128, num_layers=3, num_heads=4, vocab_size=4096, num_experts=16, d_ffn=128, top_k=2),
        gravity=GravityConfig(balance_rate=0.01),
        data=DataConfig(seq_len=320, batch_size=8, train_subset_size=2000, val_subset_size=200),
        train=TrainConfig(
            epochs=2,
            learning_rate=8e-3,
            min_rate_share=0.02,
            log_every=20,
            save_every=100,
            snapshot_every=25,
            sample_tokens=250,
        ),
    )


PRESETS = {"smoke": smoke, "demo": demo}


def find_preset(name: str) -> RunConfig:
    """Return a preset, or the config of a registered experiment, by name."""
    if name in PRESETS:
        return PRESETS[name]()
    try:
        return find_experiment(name).config
    except ConfigError:
        names = [*PRESETS, *(experiment.name for experiment in EXPERIMENTS)]
        hint = did_you_mean(name, names) or f"; presets are {', '.join(PRESETS)}, and every registered experiment"
        raise ConfigError(f"{name!r} is not a preset{hint}") from None

"""What changes over a run: the learning rate, and how many experts a token gets."""

import math

from some_moe.config import TrainConfig


def rate_at(step: int, total_steps: int, config: TrainConfig) -> float:
    """The learning rate at a step: a line up, then a half cosine down."""
    warmup_steps = round(config.warmup * total_steps)
    if step < warmup_steps:
        return config.learning_rate * ((step + 1) / warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    fall = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.learning_rate * (config.min_rate_share + (1 - config.min_rate_share) * fall)


def top_k_at(step: int, total_steps: int, top_k: int, config: TrainConfig) -> int:
    """Experts a token at a step: one during top_k_warmup, then a ramp of equal stairs up to top_k."""
    progress = step / max(1, total_steps)
    if progress < config.top_k_warmup:
        return 1
    if config.top_k_ramp == 0 or progress >= config.top_k_warmup + config.top_k_ramp:
        return top_k
    climbed = (progress - config.top_k_warmup) / config.top_k_ramp
    return min(top_k, 1 + math.ceil(climbed * (top_k - 1)))

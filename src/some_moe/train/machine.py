"""Where a run computes, and in what precision."""

import os
from dataclasses import dataclass

import torch

from some_moe.config import ConfigError, TrainConfig
from some_moe.train.recorder import describe_device


@dataclass(frozen=True)
class Machine:
    device: torch.device
    bf16: bool  # autocast to bfloat16

    def describe(self) -> str:
        return describe_device(self.device)


def choose_machine(config: TrainConfig) -> Machine:
    """Resolve `auto`, refuse what is not there, and set determinism."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"train.device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"train.device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"train.device {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs; use cpu")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    bf16 = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    return Machine(device, bf16)

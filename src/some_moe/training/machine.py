"""Where a run computes, and in what precision."""

import os
from dataclasses import dataclass

import torch

from some_moe.config import ConfigError, RunConfig, TrainConfig
from some_moe.parallel.distributed import ALONE, Team
from some_moe.training.environment import describe_device


@dataclass(frozen=True)
class Machine:
    device: torch.device
    bf16: bool  # autocast to bfloat16

    def describe(self) -> str:
        return describe_device(self.device)


def choose_machine(config: TrainConfig, team: Team = ALONE) -> Machine:
    """Resolve `auto`, refuse what is not there, and set determinism. In a team each process has a GPU of its own."""
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
    if device.type == "cuda" and not team.alone:
        device = take_own_gpu(device, team)  # which becomes the present one when the team meets
    elif device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the present one, wherever the tensors are
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    bf16 = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    if config.kernel == "grouped" and device.type == "cuda" and not bf16:
        raise ConfigError("train.kernel grouped computes in bf16 alone on a GPU; set train.precision bf16, or use auto")
    return Machine(device, bf16)


def take_own_gpu(device: torch.device, team: Team) -> torch.device:
    if device.index is not None:
        raise ConfigError(f"train.device '{device}' is one GPU for {team.size} processes; use auto, cuda or cpu")
    if team.local_size > torch.cuda.device_count():
        raise ConfigError(
            f"{team.local_size} processes were started on this machine, but torch sees {torch.cuda.device_count()} "
            "GPUs; start one process a GPU, or use --train.device cpu"
        )
    return torch.device("cuda", team.local_rank)


def settle_experts(config: RunConfig) -> RunConfig:
    """Replace model.expert_dtype `auto` by what this machine computes in, so that the run's config says it."""
    if config.model.expert_dtype != "auto":
        return config
    halves = choose_machine(config.train).bf16 and config.model.trainability != "full"
    return config.override({"model.expert_dtype": "bfloat16" if halves else "float32"})

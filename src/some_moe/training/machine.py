"""Where a run computes, in what precision, and whether by the fast model: the one place that brings `fast` in."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from some_moe.config import ConfigError, RunConfig, TrainConfig
from some_moe.environment import describe_device
from some_moe.model.transformer import SomeLM
from some_moe.parallel.process_group import SINGLE, ProcessGroup
from some_moe.training.optim import Optimizer, make_optimizer
from some_moe.training.step import Stepper


@dataclass(frozen=True)
class Machine:
    device: torch.device
    bf16: bool  # layers compute in bfloat16
    fast: bool  # by the fast model, compiled and captured

    @property
    def dtype(self) -> torch.dtype | None:
        """As `SomeLM` takes it."""
        return torch.bfloat16 if self.bf16 else None

    def describe(self) -> str:
        return describe_device(self.device)

    def make_model(self, config: RunConfig, group: ProcessGroup = SINGLE) -> SomeLM:
        """The model of a run, as its seed makes it."""
        model = SomeLM(
            config.model,
            config.gravity,
            seed=config.train.seed,
            kernel=config.train.kernel,
            checkpoint_activations=config.train.checkpoint_activations,
            experts=group.own_experts(),
            device=self.device,
        )
        return group.take_over(self.adopt(model))

    def adopt(self, model: SomeLM) -> SomeLM:
        """Bring a model here, and make it fast where this machine can: it keeps its parameters and their names."""
        model.to(self.device).compute_in(self.dtype)
        if self.fast:
            from some_moe.fast import accelerate

            accelerate(model)
        return model

    def make_stepper(self, model: SomeLM, config: RunConfig, total_steps: int, group: ProcessGroup = SINGLE) -> Stepper:
        """The optimizer of a run, and what takes its steps."""
        optimizer_kind, stepper_kind = Optimizer, Stepper
        if self.fast:
            from some_moe.fast.adamw import FusedAdamW
            from some_moe.fast.graph import GraphedStepper

            optimizer_kind, stepper_kind = FusedAdamW, GraphedStepper
        optimizer = make_optimizer(model, config.train, optimizer_kind)
        if group.sharding is not None:
            optimizer.clip = group.sharding.clip
        return stepper_kind(model, optimizer, config, total_steps, self.device, group)


def has_triton() -> bool:
    """Whether Triton kernels can run here."""
    return torch.cuda.is_available() and find_spec("triton") is not None


def load_fast_kernel(name: str) -> Callable[..., Tensor]:
    """The fast model's way to compute experts: (x, experts, gates, weights, onto=None) → y."""
    from some_moe.fast.experts import choose_kernel

    return choose_kernel(name)


def choose_machine(config: TrainConfig, group: ProcessGroup = SINGLE) -> Machine:
    """Resolve `auto`, refuse what is not there, and set determinism. In a process group each has a GPU of its own."""
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
    if device.type == "cuda" and not group.is_single:
        device = group.take_gpu(device)  # which becomes the present one when the group meets
    elif device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the present one, wherever the tensors are
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    bf16 = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    shared_out = not group.is_single and (config.fsdp or config.expert_parallel != "off")
    fast = config.fast == "auto" and device.type == "cuda" and has_triton() and not shared_out
    if config.kernel == "triton" and config.fast == "off":
        raise ConfigError("train.kernel triton is part of the fast model; set train.fast auto, or use auto or grouped")
    if config.kernel == "triton" and not fast:
        raise ConfigError("train.kernel triton needs a CUDA GPU and the triton package; use auto or grouped")
    if config.kernel == "grouped" and device.type == "cuda" and not bf16:
        raise ConfigError("train.kernel grouped computes in bf16 alone on a GPU; set train.precision bf16, or use auto")
    return Machine(device, bf16, fast)


def settle_experts(config: RunConfig) -> RunConfig:
    """Replace model.expert_dtype `auto` by what this machine computes in, so that the run's config says it."""
    if config.model.expert_dtype != "auto":
        return config
    halves = choose_machine(config.train).bf16 and config.model.trainability != "full"
    return config.override({"model.expert_dtype": "bfloat16" if halves else "float32"})

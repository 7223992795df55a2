"""What a run says of where it comes from: program, versions, commit, machine, command."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import some_moe
from some_moe.system.processes import git_commit, quote_command

if TYPE_CHECKING:
    import torch


def describe_program() -> dict[str, Any]:
    """What runs, wherever it does."""
    return {
        "some_moe": some_moe.__version__,
        "commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch_version(),
    }


def torch_version() -> str:
    """Without loading it, which takes seconds."""
    try:
        return version("torch")
    except PackageNotFoundError:  # one that was built where it lies
        import torch

        return torch.__version__


def describe_environment(command: str, device: str) -> dict[str, Any]:
    """What a reader needs to repeat a run elsewhere; device: the one that computes, in words."""
    import torch

    return describe_program() | {
        "platform": platform.platform(),
        "device": device,
        "cpu_threads": torch.get_num_threads(),
        "command": command,
    }


def describe_device(device: "torch.device") -> str:
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def command_line() -> str:
    """The command as it was typed, without the path to its interpreter."""
    return quote_command([Path(sys.argv[0]).name, *sys.argv[1:]])

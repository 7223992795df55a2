"""What a run says of where it comes from: program, versions, commit, machine, command."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import some_moe
from some_moe.processes import quote_command


def describe_program() -> dict[str, Any]:
    """What runs, wherever it does."""
    return {
        "some_moe": some_moe.__version__,
        "commit": _git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def describe_environment(command: str, device: str) -> dict[str, Any]:
    """What a reader needs to repeat a run elsewhere; device: the one that computes, in words."""
    return describe_program() | {
        "platform": platform.platform(),
        "device": device,
        "cpu_threads": torch.get_num_threads(),
        "command": command,
    }


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _git_commit() -> str | None:
    """The commit of the source that runs, with + where it has changes; None outside a checkout."""
    here = Path(__file__).parents[1]
    try:
        # Installed inside another project's repository, it is no file of that project's commits.
        subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "."], cwd=here, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.returncode else "")


def command_line() -> str:
    """The command as it was typed, without the path to its interpreter."""
    return quote_command([Path(sys.argv[0]).name, *sys.argv[1:]])

"""What is installed here, what will compute, and where things are kept: `some doctor`."""

import os
import platform
import re
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from some_moe.memory import free_disk, free_memory
from some_moe.system.cache import cache_folder, cache_limit

DISTRIBUTION, OLDEST_TORCH = "some-moe", (2, 11)
MOST_FILES = 200_000  # of a cache that are counted
REQUIREMENT = re.compile(r"\s*([\w.-]+)(?:[>=]=([\d.]+))?[^;]*(?:;\s*extra\s*==\s*[\"']([\w-]+)[\"'])?")


def examine() -> dict[str, Any]:
    """Everything that a report of a fault should say, as plain data; `problems` are sentences."""
    problems: list[str] = []
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory_free_bytes": free_memory(),
        "disk_free_bytes": free_disk("."),
        "extras": list_extras(problems),
        "caches": list_caches(),
        "problems": problems,
    }
    if find_spec("torch") is None:
        problems.append("torch is not installed; run pip install torch")
        return found | {"torch": None}
    found |= examine_torch(problems)
    return found


def list_extras(problems: list[str]) -> dict[str, dict[str, str | None]]:
    """The optional packages, {extra: {package: version, or None where it is missing}}; old ones are problems."""
    extras: dict[str, dict[str, str | None]] = {}
    with suppress(PackageNotFoundError):
        for line in requires(DISTRIBUTION) or ():
            match = REQUIREMENT.match(line)
            if match and match[3] and match[3] != "dev":
                package, least, extra = match.groups()
                found = extras.setdefault(extra, {})[package] = find_version(package)
                if found is not None and numbers_of(found) < numbers_of(least or "0"):
                    old = f"{package} {found} is older than {least}, which the extra {extra} needs"
                    problems.append(f"{old}; run pip install -U 'some-moe[{extra}]'")
    return extras


def numbers_of(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version.partition("+")[0])[:3])


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def list_caches() -> list[dict[str, Any]]:
    """Folders outside of runs that this program, or what it uses, writes to."""
    home = Path(os.path.expanduser("~"))
    places = {
        "prepared data": cache_folder(),
        "hub": Path(os.environ.get("HF_HOME") or home / ".cache" / "huggingface"),
        "compiled kernels": Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
    }
    found = []
    for name, place in places.items():
        size, whole = measure_folder(place)
        known: dict[str, Any] = {"limit_bytes": cache_limit()} if name == "prepared data" else {}
        found.append({"name": name, "path": str(place), "bytes": size, "counted_whole": whole} | known)
    return found


def measure_folder(place: Path) -> tuple[int, bool]:
    """Bytes of all files in a folder, links not followed; and whether all of them were counted."""
    total = count = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
            count += 1
        if count > MOST_FILES:
            return total, False
    return total, True


def examine_torch(problems: list[str]) -> dict[str, Any]:
    """torch, its devices, what a run would compute with, and whether a small layer computes what it should."""
    import torch

    from some_moe.config import TrainConfig
    from some_moe.environment import describe_program
    from some_moe.training.machine import choose_machine, has_triton

    if numbers_of(torch.__version__) < OLDEST_TORCH:
        problems.append(f"torch {torch.__version__} is older than 2.11; run pip install -U torch")
    gpus = [
        {"name": torch.cuda.get_device_name(n), "memory_bytes": torch.cuda.get_device_properties(n).total_memory}
        for n in range(torch.cuda.device_count())
    ]
    if not gpus and shutil.which("nvidia-smi"):
        why = "has no CUDA" if torch.version.cuda is None else "cannot use it: see nvidia-smi"
        problems.append(f"there is an NVIDIA driver, but torch {torch.__version__} {why}")
    if gpus and not has_triton():
        problems.append("the fast model needs the triton package, which is not installed; run pip install triton")
    machine = choose_machine(TrainConfig())
    kernels = "the fast model: fused Triton kernels, steps captured" if machine.fast else "the plain model"
    if not machine.fast:
        kernels += ", experts by grouped products" if gpus else ", experts by matrix products of each one's tokens"
    difference = check_layer(machine.device)
    if difference > 1e-4:
        problems.append(f"experts differ from the obvious computation by {difference:.2g}; please report this")
    return describe_program() | {
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "triton": find_version("triton"),
        "threads": torch.get_num_threads(),
        "runs_on": machine.describe(),
        "precision": "bf16 layers, fp32 weights" if machine.bf16 else "fp32",
        "kernels": kernels,
        "layer_difference": difference,
    }


def check_layer(device: Any) -> float:
    """How far a small layer's output is from the obvious path's."""
    import torch

    from some_moe.config import ModelConfig
    from some_moe.model.layer import SomeLayer

    config = ModelConfig(d_model=32, num_heads=2, num_experts=8, d_ffn=48, top_k=2)
    x = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        fast, plain = (SomeLayer(config, kernel=kernel, device=device)(x)[0] for kernel in ("auto", "reference"))
    return float((fast - plain).abs().max())

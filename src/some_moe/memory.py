"""How much memory and disk a run needs, by formula, and how much is there. Imports torch for a GPU alone."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError, RunConfig
from some_moe.config.parameters import count_parameters

MARGIN = 1.5  # the formula is rough: only what needs clearly more than there is is refused
SHORTEST_BATCH = 32  # tokens a row


def needed_bytes(
    config: RunConfig, *, training: bool, seq_len: int | None = None, shares: tuple[int, int] = (1, 1)
) -> int:
    """Weights, the frozen library, gradients, optimizer and the activations of a batch; or weights and one row.

    seq_len: of the longest row, where that is not the config's. shares: of what is trained, and of each library, that
    processes have one each of.
    """
    model, seq_len = config.model, seq_len or config.data.seq_len
    trainable, total = count_parameters(model)
    trunk = count_parameters(model.override({"trainability": "frozen"})).trainable
    trained = trunk // shares[0] + (trainable - trunk) // max(shares)
    halves = config.train.precision == "bf16" or model.expert_dtype == "bfloat16"
    width, has_experts = 2 if halves else 4, model.ffn == "some"
    hidden = 3 if model.activation == "swiglu" else 2
    slots = model.top_k * (hidden * model.d_ffn + 2 * model.d_model) if has_experts else hidden * model.dense_width
    per_layer = 14 * model.d_model + slots + (2 * model.num_experts if has_experts else 0)
    logits = model.vocab_size * (4 + 2 * width)
    weights = 4 * trained + (total - trainable) // shares[1] * (2 if model.expert_dtype == "bfloat16" else 4)
    rows = config.data.batch_size if training else 1
    kept_layers = 1 if config.train.checkpoint_activations or not training else model.num_layers
    masks = seq_len * (model.num_heads if model.positions == "alibi" else 0)
    activations = rows * seq_len * (kept_layers * per_layer * width + logits) + 4 * seq_len * masks
    return weights + activations + (12 * trained if training else 0)


def available_bytes(device: Any) -> int | None:
    """Bytes that are free on a device ("cpu", "cuda:0", or torch's); None where the system does not tell."""
    if str(device).startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def refuse_too_large(
    config: RunConfig, device: Any, *, training: bool, longest: int | None = None, shares: tuple[int, int] = (1, 1)
) -> None:
    """Refuse what needs clearly more memory than is there, before any of it is taken.

    longest: tokens of the longest row, where the data has been read; until then bucketed rows may all be short. shares:
    as in `needed_bytes`.
    """
    if longest is None and config.data.batching == "bucketed":
        longest = SHORTEST_BATCH
    seq_len = min(config.data.seq_len, longest or config.data.seq_len)
    needed = needed_bytes(config, training=training, seq_len=seq_len, shares=shares)
    free = available_bytes(device)
    if free is None or needed <= MARGIN * free:
        return
    cure = "model.num_layers, model.num_experts, model.d_model, data.seq_len or data.batch_size"
    raise ConfigError(
        f"{config.name!r} needs about {format_bytes(needed)}, and {format_bytes(free)} are free; "
        + (f"lower {cure}, or use a larger machine" if training else "use a larger machine")
    )


def checkpoint_bytes(config: RunConfig, *, whole: bool) -> int:
    """A checkpoint's size: what is trained, keys and their books, experts that no seed makes again; whole: with the
    optimizer's memory."""
    model = config.model
    trainable, total = count_parameters(model)
    keys = model.num_layers * model.num_experts * (8 * model.d_model + 64) if model.ffn == "some" else 0
    is_remade = model.ffn == "some" and model.init_method != "orthogonal"
    frozen = 0 if is_remade else (total - trainable) * (2 if model.expert_dtype == "bfloat16" else 4)
    return 4 * trainable + keys + frozen + (8 * trainable if whole else 0)


def disk_bytes(config: RunConfig, steps: int | None) -> tuple[int, int]:
    """What one checkpoint takes, and all that lie there at once: those kept, the best, and one being written.

    steps: that the run makes, where they are known; it may make fewer checkpoints than it would keep.
    """
    train = config.train
    one = checkpoint_bytes(config, whole=train.checkpoints == "all")
    if train.checkpoints == "best":  # at the end; where it is interrupted, beside all that it goes on from
        return one, one + checkpoint_bytes(config, whole=True)
    saved = train.keep_last + 2
    if steps is not None:
        periods = [every for every in (train.save_every, train.eval_every) if every]
        saved = min(saved, sum(steps // every for every in periods) + train.epochs + 2)
    return one, saved * one


def free_disk(place: str | Path) -> int:
    """Bytes that can be written where a folder is or will be."""
    here = Path(place).absolute()
    return shutil.disk_usage(next(part for part in (here, *here.parents) if part.is_dir())).free


def refuse_full_disk(config: RunConfig, place: Path, steps: int, *, there: int) -> None:
    """Refuse a run whose checkpoints would fill the disk, before it begins; there: how many lie there already."""
    (one, needed), free = disk_bytes(config, steps), free_disk(place)
    if max(needed - there * one, one) <= free:
        return
    smaller = {"all": ", or set train.checkpoints to weights or best", "weights": ", or set train.checkpoints to best"}
    fewer = "" if config.train.checkpoints == "best" else ", lower train.keep_last"
    raise ConfigError(
        f"the checkpoints of {config.name!r} take up to {format_bytes(needed)} ({format_bytes(one)} each), and "
        f"{format_bytes(free)} are free in {str(place)!r}; make room, choose another --out{fewer}"
        + smaller.get(config.train.checkpoints, "")
    )


def format_bytes(count: float) -> str:
    """A count of bytes in the unit that suits it."""
    for unit in ("MiB", "GiB", "TiB", "PiB"):
        count /= 1024 if unit != "MiB" else 1 << 20
        if count < 1000:
            break
    return f"{count:,.1f} {unit}"


def free_memory(root: str | Path = "/") -> int | None:
    """Bytes of main memory that can still be had; None where the system does not tell. root: where /proc and /sys are.

    A Mac tells the whole of its memory alone, and Windows nothing.
    """
    root = Path(root)
    found = list(_find_limits(root))
    meminfo = _read_fields(root / "proc/meminfo", ":")
    if "MemAvailable" in meminfo:
        found.append(1024 * (meminfo["MemAvailable"] + meminfo.get("SwapFree", 0)))
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found)) if found else None


def _find_limits(root: Path) -> Iterator[int]:
    """What the control groups of this process, of either version, and those above them leave it."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, kinds, name = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        place = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        # Within a container the groups above its own are not to be seen, nor is their name of any use.
        for group in {place, *(place / part for part in [Path(name[1:]), *Path(name[1:]).parents])}:
            limit, used = (_read(group / file).strip() for file in files)
            if limit.isdecimal() and used.isdecimal():
                cached = _read_fields(group / "memory.stat").get("inactive_file", 0)  # given up where it is needed
                yield int(limit) - int(used) + cached


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _read_fields(path: Path, separator: str | None = None) -> dict[str, int]:
    """The first number behind each name."""
    parts = (line.split(separator, 1) for line in _read(path).splitlines())
    numbers = ((name, rest.split()[0]) for name, rest in (part for part in parts if len(part) == 2) if rest.strip())
    return {name: int(number) for name, number in numbers if number.isdecimal()}

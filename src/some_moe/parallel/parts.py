"""Checkpoints of a model that several processes share out: everybody writes its parts, and they become standard files.

The parts are written by torch's DCP, as safetensors (its own format holds pickles), beside the checkpoint that is being
made; the main process puts them together, from disk to disk. So a checkpoint looks the same, whoever has written it,
and any number of processes can read it: each takes its parts out of the one file.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import rmtree

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from some_moe.config import ConfigError
from some_moe.parallel.process_group import Files, ProcessGroup, local
from some_moe.system.files import name_scratch
from some_moe.system.reading import open_tensors, refuse_other_shapes


@contextmanager
def put_together(group: ProcessGroup, folder: Path, files: Files) -> Iterator[Files]:
    """Within, the main process has whole tensors, some of them on disk; the others have theirs."""
    model = files["model.safetensors"]
    place: Path = group.barrier(name_scratch(folder / "parts") if group.is_main else None)[0]
    with ExitStack() as opened:
        if group.is_main:
            opened.callback(rmtree, place, ignore_errors=True)
        whole: dict[str, dict[str, Tensor]] = {}
        for name, tensors in files.items():
            shown = {key: show_like(tensor, model.get(key.rpartition("/")[0])) for key, tensor in tensors.items()}
            parts = {key: tensor for key, tensor in shown.items() if isinstance(tensor, DTensor)}
            whole[name] = {key: tensor for key, tensor in shown.items() if key not in parts}
            if parts:
                writer = HuggingFaceStorageWriter(str(place / name), save_distributed=True, enable_consolidation=True)
                try:
                    dcp.save(parts, storage_writer=writer)  # type: ignore[attr-defined]
                except CheckpointException as error:  # what went wrong in some process, told to all
                    raise next(iter(error.failures.values()))[0] from None
            if parts and group.is_main:
                (written,) = (place / name).glob("*.safetensors")
                file = opened.enter_context(open_tensors(written))
                whole[name] |= {key: file.get_tensor(key) for key in parts}
        yield whole


def show_like(memory: Tensor, parameter: Tensor | None) -> Tensor:
    """What an optimizer remembers of a parameter, as a part where the parameter is one."""
    if not isinstance(parameter, DTensor) or isinstance(memory, DTensor) or memory.dim() == 0:
        return memory.detach()
    return DTensor.from_local(memory.detach(), parameter.device_mesh, parameter.placements, run_check=False)


def read_parts(path: Path, wanted: Mapping[str, Tensor], cure: str) -> dict[str, Tensor]:
    """As `read_fitting`, with parts of those tensors that are wanted in part; nothing else is read."""
    refuse_other_shapes(path, wanted)
    found = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    with open_tensors(path) as file:
        for name, tensor in found.items():
            here = local(tensor)
            if not isinstance(tensor, DTensor):
                here.copy_(file.get_tensor(name))
            elif here.numel():
                # Where this part lies in the whole.
                (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
                within = zip(chunk.offsets, chunk.sizes, strict=True)
                here.copy_(file.get_slice(name)[tuple(slice(first, first + size) for first, size in within)])
            if here.is_floating_point() and not bool(here.isfinite().all()):
                raise ConfigError(f"{str(path)!r} has nan or infinity in {name}; {cure}")
    return found


logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)

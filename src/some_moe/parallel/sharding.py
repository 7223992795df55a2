"""What the processes of a run share out among them, where a setting asks for it.

`train.expert_parallel`: each process makes, keeps and trains its share of every library (see dispatch.py).
`train.fsdp`: trained parameters, their gradients and AdamW's memory lie in equal parts in all processes (FSDP2).
Keys and all that gravity remembers are whole everywhere, and move everywhere by the same sums.

Whoever asks a model for its state finds parts as torch's `DTensor`, with the names and shapes of the whole.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from some_moe.config.parameters import count_parameters
from some_moe.config.run import RunConfig
from some_moe.data.batches import Batch
from some_moe.model.transformer import SomeLM
from some_moe.parallel.dispatch import Dispatch, exchange_rows
from some_moe.parallel.process_group import ProcessGroup, local

PARTS = [Replicate(), Shard(0)]  # how an expert's tensors lie over machines and over the processes that share a library


class Sharding:
    """How a model lies in the processes of a group, as one of them sees it."""

    def __init__(self, config: RunConfig, group: ProcessGroup, num_sharing: int) -> None:
        """num_sharing: the number of processes that have one library together."""
        assert group.device is not None
        self.group, self.fsdp, self.num_sharing = group, config.train.fsdp, num_sharing
        shape = (group.world_size // num_sharing, num_sharing)
        self.mesh = init_device_mesh(group.device.type, shape, mesh_dim_names=("replicas", "experts"))
        share = config.model.num_experts // num_sharing
        first = group.rank % num_sharing * share
        self.experts = range(first, first + share) if num_sharing > 1 else None
        self.own: set[nn.Parameter] = set()  # the trained parameters of those experts

    def take_over(self, model: SomeLM) -> SomeLM:
        """Let a model that has these experts alone compute with all processes."""
        if self.experts is not None:
            exchange = exchange_rows(self.mesh.get_group("experts"), self.group.listening)
            for library in model.libraries:
                library.mix = Dispatch(library.mix, model.model.num_experts, self.num_sharing, exchange)
                library.checksum = self.sum_checksum(library.checksum)  # type: ignore[method-assign]
                library.register_state_dict_post_hook(partial(show_whole, self.mesh))  # type: ignore[no-untyped-call]
                library.register_load_state_dict_pre_hook(take_parts)  # type: ignore[no-untyped-call]
                self.own |= set(library.parameters(recurse=False))
            model.count_parameters = lambda: count_parameters(model.model)  # type: ignore[method-assign]
        if self.fsdp:
            self.shard_parameters(model)
        return model

    def shard_parameters(self, model: SomeLM) -> None:
        """Hand the model to FSDP2, block by block."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing is added to it
        mesh = init_device_mesh(self.mesh.device_type, (self.group.world_size,))
        # Whole in every process: what gravity or a snapshot reads, single numbers, and what is shared out already.
        stores = [layer.state for layer in model.layers if layer.state is not None]
        whole = {p for store in stores for p in store.parameters()} | self.own
        whole |= {p for p in model.parameters() if p.dim() == 0}
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, ignored_params=whole)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                # Each process's loss is its share of the step's, so gradients are summed; gloo can do no more.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    # --- a step -----------------------------------------------------------------------------------------------

    def add_up_parts(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Complete the gradients of parts, and return the parameters that are whole in every process."""
        mine = [p.grad for p in parameters if p in self.own and p.grad is not None]
        if self.mesh.size(0) > 1:
            self.group.sum_in_place(mine, self.mesh.get_group("replicas"))
        return [p for p in parameters if p not in self.own and not isinstance(p, DTensor)]

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """As `clip_grad_norm_`, over all parts of all processes; the same norm, to the bit, in each of them."""
        gradients = [(p, local(p.grad)) for p in parameters if p.grad is not None]
        is_copy = self.mesh.get_local_rank("replicas") > 0  # of experts that another machine counts
        parts = [grad for p, grad in gradients if isinstance(p, DTensor) or (p in self.own and not is_copy)]
        whole = [grad for p, grad in gradients if not isinstance(p, DTensor) and p not in self.own]
        squares, of_whole = (self.sum_squares(some, gradients[0][1].dtype) for some in (parts, whole))
        self.group.sum_in_place([squares])
        norm = (of_whole + squares).sqrt()
        torch._foreach_mul_([grad for _, grad in gradients], (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def sum_squares(self, gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Σ ‖g‖², in one type in every process, also in those that have none."""
        norms = [norm.to(dtype) for norm in torch._foreach_norm(gradients)] if gradients else []
        return torch.stack([torch.zeros((), dtype=dtype, device=self.group.device), *norms]).square().sum()

    # --- looking: every process takes part in every forward pass ----------------------------------------------

    def take_turns(self, batches: Iterator[Batch]) -> Iterator[tuple[int, Batch, bool]]:
        """This process's batches with their numbers. Who has none left helps with one that does not count."""
        step, size = 0, self.group.world_size
        while some := list(islice(batches, size)):
            place = self.group.rank
            yield step + place, some[min(place, len(some) - 1)], place < len(some)
            step += size

    @contextmanager
    def one_voice(self, model: SomeLM) -> Iterator[None]:
        """Within, every process sees the first one's logits, so that all choose the same next token."""
        import torch.distributed as dist

        def repeat(module: nn.Module, arguments: Any, output: Any) -> Any:  # noqa: ARG001
            logits = output.logits.contiguous()
            with self.group.listening():
                dist.broadcast(logits, 0)
            return replace(output, logits=logits)

        hook = model.register_forward_hook(repeat)
        try:
            yield
        finally:
            hook.remove()

    # --- the whole state, seen from one part --------------------------------------------------------------------

    def sum_checksum(self, checksum: Callable[[], str]) -> Callable[[], str]:
        """The checksum of the whole library from those of its parts, which add up in wrapping 64-bit integers."""

        def whole() -> str:
            part = int(checksum(), 16)
            signed = torch.tensor([part - (part >> 63 << 64)], device=self.group.device)
            self.group.sum_in_place([signed], self.mesh.get_group("experts"))
            return f"{int(signed) & 0xFFFFFFFFFFFFFFFF:016x}"

        return whole


def show_whole(mesh: DeviceMesh, library: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # noqa: ARG001
    """Where a library's state is asked for, show its own tensors as parts of whole ones."""
    for name in list_parts(library, state, prefix):
        state[name] = DTensor.from_local(state[name], mesh, PARTS, run_check=False)


def take_parts(library: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # noqa: ARG001
    """The other way: what is loaded into a library is this process's part."""
    for name in list_parts(library, state, prefix):
        state[name] = local(state[name])


def list_parts(library: nn.Module, state: dict[str, Any], prefix: str) -> list[str]:
    own = [*library.named_parameters(recurse=False), *library.named_buffers(recurse=False)]
    return [prefix + name for name, _ in own if prefix + name in state]

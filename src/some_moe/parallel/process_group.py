"""Several processes that train one model: `torchrun --nproc-per-node N -m some_moe train …`.

Each process holds the whole model and takes an equal share of each step's rows. Gradients, loss and routing sums
are added up over the group, and nothing else travels; then every process makes the same optimizer step and the
same gravity step, so that parameters and keys stay alike to the bit. `docs/distributed.md` says what follows.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from some_moe.config import ConfigError, RunConfig, TrainingStoppedError
from some_moe.data.batches import Batch
from some_moe.errors import SomeError, in_a_sentence
from some_moe.model.routing import SUMS, Routing
from some_moe.model.transformer import SomeLM
from some_moe.system.reading import read_fitting

if TYPE_CHECKING:
    from some_moe.parallel.sharding import Sharding

PATIENCE = timedelta(minutes=30)  # how long a process waits for the others
BUCKET_BYTES = 25 * 2**20  # sums travel in pieces of about this size, so that their copy stays small

Files = Mapping[str, Mapping[str, Tensor]]  # what each file of a checkpoint holds


class ProcessGroupError(TrainingStoppedError):
    """The processes cannot go on together: one is gone, or holds something else than the others."""


class SharedError(ConfigError):
    """Bad input that one process found and all know of."""


@dataclass
class ProcessGroup:
    """The processes of one run, as one of them sees it. A group of one communicates with nobody."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the processes of this machine
    local_world_size: int = 1
    patience: timedelta = PATIENCE
    device: torch.device | None = None  # where this process computes; None until it has joined
    sharding: "Sharding | None" = None  # where a setting asks for it; else every process has the whole model

    @classmethod
    def from_environment(cls) -> Self:
        """Read what torchrun says to each process that it starts; without torchrun, a group of one."""
        size = _read_number("WORLD_SIZE", 1)
        if size == 1:
            return cls()
        rank = _read_number("RANK", None)
        if not rank < size:
            raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is {size}; start the processes with torchrun")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise ConfigError(f"WORLD_SIZE is {size}, but {name} is not set; start the processes with torchrun")
        return cls(rank, size, _read_number("LOCAL_RANK", rank), _read_number("LOCAL_WORLD_SIZE", size), PATIENCE)

    @property
    def is_single(self) -> bool:
        return self.world_size == 1

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes and speaks."""
        return self.rank == 0

    def describe(self, machine: str) -> str:
        return machine if self.is_single else f"{self.world_size} processes, each on {machine}"

    def take_gpu(self, device: torch.device) -> torch.device:
        """The GPU that this process has for its own."""
        if device.index is not None:
            raise ConfigError(
                f"train.device '{device}' is one GPU for {self.world_size} processes; use auto, cuda or cpu"
            )
        if self.local_world_size > torch.cuda.device_count():
            raise ConfigError(
                f"{self.local_world_size} processes were started on this machine, but torch sees "
                f"{torch.cuda.device_count()} GPUs; start one process a GPU, or use --train.device cpu"
            )
        return torch.device("cuda", self.local_rank)

    # --- coming together and parting ------------------------------------------------------------------------

    def join(self, device: torch.device, config: RunConfig | None = None) -> None:
        """Meet the other processes: over NCCL where they compute on GPUs, else over gloo.

        config: says whether they share the model out.
        """
        if self.is_single:
            return
        import torch.distributed as dist

        if device.type == "cuda":
            torch.cuda.set_device(device)
        with self.listening():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=self._open_store(),
                rank=self.rank,
                world_size=self.world_size,
                timeout=self.patience,
                device_id=device if device.type == "cuda" else None,
            )
        self.device = device
        if config is not None and (config.train.fsdp or self.count_sharing(config) > 1):
            from some_moe.parallel.sharding import Sharding

            self.sharding = Sharding(config, self, self.count_sharing(config))

    def _open_store(self) -> Any:
        """Where the processes find each other: torchrun's own store, under a name of this attempt; None is torch's way.

        torchrun keeps one store over its restarts, where a new attempt would find the dead one's addresses.
        """
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

        host, port = os.environ["MASTER_ADDR"], _read_number("MASTER_PORT", None)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"attempt-{attempt}", TCPStore(host, port, is_master=False, timeout=self.patience))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # With a process gone, an orderly farewell might wait for it.
        if self.device is not None and not isinstance(error, ProcessGroupError):
            import torch.distributed as dist

            dist.destroy_process_group()
            self.device = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn the failure of a message into a sentence."""
        try:
            yield
        except ProcessGroupError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0] or type(error).__name__
            raise ProcessGroupError(
                f"process {self.rank} of {self.world_size} lost touch with the others ({reason})"
            ) from None

    @contextmanager
    def in_touch(self) -> Iterator[None]:
        """The same for messages that torch sends by itself (FSDP); other errors stay what they are."""
        try:
            yield
        except RuntimeError as error:
            import torch.distributed as dist

            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            with self.listening():
                raise

    # --- setting up: every message is a meeting, so that whoever has a problem finds the others listening -----

    def barrier(self, note: Any = None, *, problem: str = "") -> list[Any]:
        """Wait for all, and return everyone's note in the order of ranks. A problem of one is raised in all."""
        if self.is_single:
            return [note]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world_size
        with self.listening():
            dist.all_gather_object(found, (note, problem))
        problems = [theirs for _, theirs in found if theirs]
        if problems:
            raise SharedError(problems[0])
        return [theirs for theirs, _ in found]

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """What any process finds here to be wrong ends all of them, with the same sentence; else all leave together."""
        try:
            with in_a_sentence():
                yield
            self.barrier()
        except (SharedError, ProcessGroupError):
            raise
        except SomeError as error:
            if self.device is not None:
                self.barrier(problem=str(error))
            raise

    @contextmanager
    def one_goes_first(self) -> Iterator[None]:
        """One process of each machine does what is within; then the others, who find what it left in a cache."""
        if self.local_rank > 0:
            self.barrier()
        yield
        if self.local_rank == 0:
            self.barrier()

    def verify(self, digests: Mapping[str, str]) -> None:
        """Go on only if all processes hold the same under each of these names."""
        found = self.barrier(dict(digests))
        for rank, theirs in enumerate(found):
            differing = [name for name in digests if theirs[name] != found[0][name]]
            if differing:
                raise ProcessGroupError(
                    f"process {rank} does not have the same {', '.join(differing)} as process 0 (all need the same "
                    "command, data and versions)"
                )

    # --- a step -----------------------------------------------------------------------------------------------

    def refuse_uneven(self, config: RunConfig) -> None:
        """Refuse what these processes cannot share equally."""
        rows, experts, sharing = config.rows_a_step, config.model.num_experts, self.count_sharing(config)
        if rows % self.world_size:
            raise ConfigError(
                f"a step of {rows} rows cannot be shared equally by {self.world_size} processes; make "
                f"data.batch_size a multiple of {self.world_size}, or start another number of them"
            )
        if experts % sharing or self.world_size % sharing:
            raise ConfigError(
                f"model.num_experts {experts} cannot be shared equally by {sharing} of {self.world_size} processes; "
                "start another number of them, or set train.expert_parallel off"
            )
        if sharing > 1 and (config.model.ffn != "some" or config.model.router == "weights"):
            found = "ffn" if config.model.ffn != "some" else "router"
            raise ConfigError(
                f"model.{found} {getattr(config.model, found)} needs all experts in every process; set "
                "train.expert_parallel off"
            )
        if (sharing > 1 or (config.train.fsdp and not self.is_single)) and config.train.compile:
            raise ConfigError(
                "train.compile true is not for a model that several processes share out; set train.compile null, or "
                "train.expert_parallel off and train.fsdp false"
            )

    def count_sharing(self, config: RunConfig) -> int:
        """How many processes have the experts of a layer together."""
        return {"off": 1, "machine": self.local_world_size, "all": self.world_size}[config.train.expert_parallel]

    def count_shares(self, config: RunConfig) -> tuple[int, int]:
        """Into how many parts what is trained is divided, and each library."""
        return self.world_size if config.train.fsdp else 1, self.count_sharing(config)

    def own_experts(self) -> range | None:
        """The experts of each layer that this process makes; None is all."""
        return None if self.sharding is None else self.sharding.experts

    def take_over(self, model: SomeLM) -> SomeLM:
        """Share out a model, where that is asked for."""
        return model if self.sharding is None else self.sharding.take_over(model)

    def share(self, batch: Batch, *, keep_length: bool) -> Batch:
        """This process's rows of a step, with their numbers within the whole step."""
        return batch.split(len(batch.rows) // self.world_size, keep_length=keep_length)[self.rank]

    def add_up(
        self, parameters: Sequence[Tensor], loss: Tensor, routings: tuple[Routing, ...]
    ) -> tuple[Tensor, tuple[Routing, ...]]:
        """Make gradients (in place), loss and routings those of the whole step, the same bits in every process."""
        if self.is_single:
            return loss, routings
        if self.sharding is not None:
            parameters = self.sharding.add_up_parts(parameters)
        # Which parameters have a gradient follows from the config, so it is the same everywhere.
        gradients = [p.grad for p in parameters if p.grad is not None]
        sums = [getattr(routing, name) for routing in routings for name in SUMS]
        self.sum_in_place([*gradients, loss, *sums])
        return loss, self._merge_samples(routings)

    def _merge_samples(self, routings: tuple[Routing, ...]) -> tuple[Routing, ...]:
        """Of all processes' samples keep those that come first, by the rule by which routings add up."""
        if not routings:
            return ()
        samples = self.gather(torch.stack([routing.sample for routing in routings]))  # (ranks, layers, S, D)
        orders = self.gather(torch.stack([routing.sample_order for routing in routings]))  # (ranks, layers, S)
        merged = []
        for layer, routing in enumerate(routings):
            first = replace(routing, sample=samples[0, layer], sample_order=orders[0, layer])
            others = Routing(
                **{name: getattr(routing, name).new_zeros(()) for name in SUMS},  # the sums are complete already
                sample=samples[1:, layer].flatten(0, 1),
                sample_order=orders[1:, layer].flatten(),
            )
            merged.append(first + others)
        return tuple(merged)

    # --- looking at the model -----------------------------------------------------------------------------------

    def take_turns(self, batches: Iterator[Batch]) -> Iterator[tuple[int, Batch, bool]]:
        """The batches that are this process's, with their numbers, and whether they count (else: see `Sharding`)."""
        if self.sharding is not None:
            yield from self.sharding.take_turns(batches)
            return
        for step, batch in enumerate(batches):
            if step % self.world_size == self.rank:
                yield step, batch, True

    def one_voice(self, model: SomeLM) -> AbstractContextManager[None]:
        """Within, a model answers every process that takes part in its forward pass alike."""
        return nullcontext() if self.sharding is None else self.sharding.one_voice(model)

    @property
    def has_model(self) -> bool:
        """Whether this process is needed where one has to look at the model: the main one, and all that have parts."""
        return self.is_main or self.sharding is not None

    def put_together(self, folder: Path, files: Files) -> AbstractContextManager[Files]:
        """Within, the main process has the same with whole tensors; folder: where it may leave parts meanwhile."""
        if self.sharding is None:
            return nullcontext(files)
        from some_moe.parallel import parts

        return parts.put_together(self, folder, files)

    # --- tensors that travel ------------------------------------------------------------------------------------

    def sum_in_place(self, tensors: Sequence[Tensor], group: Any = None) -> None:
        """Replace each tensor by its sum over all processes, or those of torch's `group`, with few messages."""
        if self.is_single:
            return
        import torch.distributed as dist

        for bucket in fill_buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self.listening():
                dist.all_reduce(flat, group=group)
            for tensor, part in zip(bucket, flat.split_with_sizes([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather(self, tensor: Tensor) -> Tensor:
        """Stack every process's tensor (…) in the order of ranks: (ranks, …)."""
        if self.is_single:
            return tensor[None]
        import torch.distributed as dist

        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self.listening():
            dist.all_gather(found, tensor.contiguous())
        return torch.stack(found)

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        if self.is_single:
            return flag
        raised = torch.tensor([int(flag)], device=self.device)
        self.sum_in_place([raised])
        return bool(raised)


SINGLE = ProcessGroup()


def _read_number(name: str, default: int | None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or (name.endswith("SIZE") and int(text) == 0):
        shown = "not set" if text is None else f"{text!r}, not a number that counts processes"
        raise ConfigError(f"the environment variable {name} is {shown}; start the processes with torchrun")
    return int(text)


def fill_buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors of one dtype, in order, into buckets of about BUCKET_BYTES."""
    buckets: list[list[Tensor]] = []
    open_buckets: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        bucket, size = open_buckets.get(tensor.dtype, ([], BUCKET_BYTES))
        if size >= BUCKET_BYTES:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        open_buckets[tensor.dtype] = (bucket, size + tensor.nbytes)
    return buckets


def is_part(tensor: Tensor) -> bool:
    """Whether this process has some of a tensor alone: it is a `DTensor`, which is not imported to know it."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if is_part(tensor) else tensor  # type: ignore[attr-defined]


def hold_like(memory: Tensor, parameter: Tensor) -> Tensor:
    """What an optimizer remembers of a parameter, where the parameter is and as it is held there."""
    return (memory if is_part(parameter) else local(memory)).to(parameter.device)


def read_held(path: Path, wanted: Mapping[str, Tensor], cure: str) -> dict[str, Tensor]:
    """As `read_fitting`; of what this process holds in part, its part alone."""
    if not any(is_part(tensor) for tensor in wanted.values()):
        return read_fitting(path, wanted, cure)
    from some_moe.parallel.parts import read_parts

    return read_parts(path, wanted, cure)


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, types, shapes and every bit; of those that are whole here."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if is_part(tensor):
            continue
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()

"""Stories as rows of ids, and rows as batches, in an order that follows from (seed, epoch) alone.

A row is bos, story, eos: its inputs are all but the last id, its targets all but the first. Shapes: B rows,
T positions. Three ways to fill a batch (`data.batching`):

- padded: one story a row, every row seq_len long (the published protocol);
- bucketed: the same rows, grouped by like length, each batch as long as its longest row;
- packed: rows filled with whole stories, which do not see each other.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from some_moe.config import DataConfig
from some_moe.data.tokenizer import BOS, EOS, PAD, Tokenizer, in_chunks
from some_moe.system.streams import GrowingFile

LENGTH_STEP = 32  # bucketed batches are as long as a multiple of this: few shapes, little padding
GPU_LENGTHS = 6  # on a GPU each length is compiled and recorded, so there are fewer
Writable = BinaryIO | GrowingFile
BUCKET_BATCHES = 32  # so many batches are sorted by length together


@dataclass(frozen=True)
class Rows:
    """Many rows, end to end: row i is ids[starts[i] : starts[i+1]], bos and eos included, in 16 bits.

    A row is a story, or a part of a long one where `data.long` splits these.
    """

    ids: np.ndarray  # (total,) uint16
    starts: np.ndarray  # (rows + 1,) int64
    num_cut: int = 0  # ids that lay beyond seq_len
    num_stories: int = 0  # that the rows were made of, where that is known

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, story: int) -> np.ndarray:
        return self.ids[self.starts[story] : self.starts[story + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Positions each story fills: one less than its ids."""
        return np.diff(self.starts) - 1

    def to_lists(self) -> list[list[int]]:
        return [self[story].tolist() for story in range(len(self))]


class RowWriter:
    """Rows of stories, written to a file of ids and to one of where each row ends.

    A story that fills more than seq_len positions is cut (and then has no eos), or split: a row of it then begins with
    the id that the row before it ends with, so that each is a target once.
    """

    def __init__(self, ids: Writable, starts: Writable, seq_len: int, *, split: bool) -> None:
        self.ids, self.starts, self.seq_len, self.split = ids, starts, seq_len, split
        self.num_ids = self.num_cut = self.num_stories = 0
        if not starts.tell():
            starts.write(np.zeros(1, np.int64).tobytes())

    def append(self, stories: Iterable[list[int]]) -> None:
        pieces: list[np.ndarray] = []
        for ids in stories:
            whole = [BOS, *ids, EOS]
            kept = np.array(whole if self.split else whole[: self.seq_len + 1], dtype=np.uint16)
            pieces += [kept[at : at + self.seq_len + 1] for at in range(0, len(kept) - 1, self.seq_len)]
            self.num_cut += len(whole) - len(kept)
            self.num_stories += 1
        if pieces:
            ends = self.num_ids + np.cumsum([*map(len, pieces)])
            self.ids.write(np.concatenate(pieces).tobytes())
            self.starts.write(ends.tobytes())
            self.num_ids = int(ends[-1])


def encode_rows(texts: Iterable[str], tokenizer: Tokenizer, seq_len: int, *, split: bool = False) -> Rows:
    """Encode stories into rows in memory."""
    ids, starts = BytesIO(), BytesIO()
    writer = RowWriter(ids, starts, seq_len, split=split)
    for chunk in in_chunks(texts, len):
        writer.append(tokenizer.encode_many(chunk))
    arrays = np.frombuffer(ids.getbuffer(), np.uint16), np.frombuffer(starts.getbuffer(), np.int64)
    return Rows(*arrays, writer.num_cut, writer.num_stories)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's rows, or some of them."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64; PAD behind the story
    real: Tensor  # (B, T) bool: the target is text or eos
    rows: Tensor  # (B,) int64: number of each row within the step
    positions: Tensor | None = None  # (B, T) place within the story, for packed rows
    segments: Tensor | None = None  # (B, T) number of the story within the row, for packed rows

    @cached_property
    def num_real(self) -> int:
        return int(self.real.sum())

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same with every tensor changed."""
        return Batch(**{name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)})

    def pin(self) -> "Batch":
        """Move to page-locked memory, from where a GPU fetches without making the host wait."""
        return self.map(Tensor.pin_memory)

    def split(self, rows_each: int, *, keep_length: bool) -> list["Batch"]:
        """Cut into micro-batches of at most rows_each rows, each as long as it must be (unless keep_length)."""
        if len(self.rows) <= rows_each:
            return [self]
        return [self._take(slice(a, a + rows_each), keep_length) for a in range(0, len(self.rows), rows_each)]

    def _take(self, rows: slice, keep_length: bool) -> "Batch":
        used = int(self.real[rows].any(0).nonzero().max()) + 1 if self.real[rows].any() else 1
        time = self.inputs.shape[1] if keep_length else min(self.inputs.shape[1], -(-used // LENGTH_STEP) * LENGTH_STEP)
        return self.map(lambda tensor: tensor[rows] if tensor.dim() == 1 else tensor[rows, :time])

    def to(self, device: torch.device) -> "Batch":
        if device.type == "cpu":
            return self
        return self.map(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))


class Batches:
    """The batches of a split. `rows_a_step` stories (or packed rows) make one step; a last partial one is dropped."""

    def __init__(
        self,
        rows: Rows,
        config: DataConfig,
        *,
        rows_a_step: int,
        seed: int,
        keep_partial: bool = False,
        for_gpu: bool = False,
    ) -> None:
        self.rows, self.config, self.rows_a_step, self.seed = rows, config, rows_a_step, seed
        self.keep_partial, self.for_gpu = keep_partial, for_gpu
        few = -(-config.seq_len // (GPU_LENGTHS * LENGTH_STEP)) * LENGTH_STEP
        self.length_step = few if for_gpu else LENGTH_STEP
        self.groups = pack_stories(rows.lengths, config.seq_len) if config.batching == "packed" else None

    @property
    def num_rows(self) -> int:
        return len(self.rows) if self.groups is None else len(self.groups)

    def __len__(self) -> int:
        """Steps an epoch."""
        whole, rest = divmod(self.num_rows, self.rows_a_step)
        return whole + (1 if rest and self.keep_partial else 0)

    def plan(self, epoch: int, *, shuffle: bool = True) -> list[np.ndarray]:
        """Which rows make each step of an epoch. Nothing but seed and epoch decides it."""
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order = generator.permutation(self.num_rows) if shuffle else np.arange(self.num_rows)
        size = self.rows_a_step
        if self.config.batching != "bucketed":
            return [order[step * size : (step + 1) * size] for step in range(len(self))]
        lengths = self.rows.lengths
        order = order[: len(self) * size]
        steps: list[np.ndarray] = []
        for start in range(0, len(order), size * BUCKET_BATCHES):
            bucket = order[start : start + size * BUCKET_BATCHES]
            bucket = bucket[np.argsort(lengths[bucket], kind="stable")]
            steps += [bucket[a : a + size] for a in range(0, len(bucket), size)]
        return [steps[place] for place in generator.permutation(len(steps))] if shuffle else steps

    def make(self, chosen: np.ndarray) -> Batch:
        """Lay the chosen rows out as tensors."""
        stories = [[int(row)] for row in chosen] if self.groups is None else [self.groups[int(row)] for row in chosen]
        used = max(sum(len(self.rows[story]) - 1 for story in group) for group in stories)
        time = self.config.seq_len
        if self.config.batching == "bucketed":
            time = min(time, -(-used // self.length_step) * self.length_step)
        shape = (len(stories), time)
        inputs, targets, positions = (np.full(shape, fill, np.int64) for fill in (PAD, PAD, 0))
        real, segments = np.zeros(shape, bool), np.full(shape, -1, np.int64)
        for row, group in enumerate(stories):
            start = 0
            for segment, story in enumerate(group):
                ids = self.rows[story]
                end = start + len(ids) - 1
                inputs[row, start:end], targets[row, start:end] = ids[:-1], ids[1:]
                real[row, start:end] = True
                positions[row, start:end] = np.arange(end - start)
                segments[row, start:end] = segment
                start = end
            if start < time and self.config.batching == "padded":
                # The published protocol reads on: eos, then padding, predicting padding.
                inputs[row, start] = targets[row, start - 1]
        arrays = {"inputs": inputs, "targets": targets, "real": real, "rows": np.arange(len(stories))}
        if self.groups is not None:
            arrays |= {"positions": positions, "segments": segments}
        batch = Batch(**{name: torch.from_numpy(array) for name, array in arrays.items()})
        return batch.pin() if self.for_gpu else batch

    def epoch(self, epoch: int, start: int = 0, *, shuffle: bool = True) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on, in order, laid out ahead of time by threads."""
        plan = self.plan(epoch, shuffle=shuffle)[start:]
        with ThreadPoolExecutor(self.config.workers) as pool:
            pending: deque[Future[Batch]] = deque()
            for chosen in plan:
                pending.append(pool.submit(self.make, chosen))
                if len(pending) > self.config.prefetch:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()


@dataclass(frozen=True)
class Groups:
    """Stories by the row that they are in: those of row i are stories[starts[i] : starts[i+1]]."""

    stories: np.ndarray  # (stories,) int64
    starts: np.ndarray  # (rows + 1,) int64

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> list[int]:
        return list(map(int, self.stories[self.starts[row] : self.starts[row + 1]]))


def pack_stories(lengths: np.ndarray, seq_len: int) -> Groups:
    """Fill rows of seq_len positions with whole stories, longest first, each into the fullest row that has room."""
    by_room = [array("q") for _ in range(seq_len + 1)]  # rows by the room they have left
    order = np.argsort(-lengths, kind="stable")
    rows = np.empty(len(order), np.int64)
    num_rows = 0
    for place, story in enumerate(order):
        need = int(lengths[story])
        room = next((r for r in range(need, seq_len + 1) if by_room[r]), None)
        if room is None:
            row, room, num_rows = num_rows, seq_len, num_rows + 1
        else:
            row = by_room[room].pop()
        rows[place] = row
        by_room[room - need].append(row)
    counts = np.bincount(rows, minlength=num_rows)
    return Groups(order[np.argsort(rows, kind="stable")], np.concatenate(([0], np.cumsum(counts))))

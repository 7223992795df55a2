"""Stories as rows of ids, and rows as batches, in an order that follows from (seed, epoch) alone.

A row is bos, story, eos: its inputs are all but the last id, its targets all but the first. Shapes: B rows,
T positions. Three ways to fill a batch (`data.batching`):

- padded: one story a row, every row seq_len long (the published protocol);
- bucketed: the same rows, grouped by like length, each batch as long as its longest row;
- packed: rows filled with whole stories, which do not see each other.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from some_moe.config import ConfigError, DataConfig
from some_moe.data.tokenizer import BOS, EOS, PAD, Tokenizer

LENGTH_STEP = 32  # bucketed batches are as long as a multiple of this: few shapes, little padding
GPU_LENGTHS = 6  # on a GPU each length is compiled and recorded, so there are fewer
BUCKET_BATCHES = 32  # so many batches are sorted by length together


@dataclass(frozen=True)
class Rows:
    """Many rows, end to end: row i is ids[starts[i] : starts[i+1]], bos and eos included, in 16 bits.

    A row is a story, or a part of a long one where `data.long` splits these.
    """

    ids: np.ndarray  # (total,) uint16
    starts: np.ndarray  # (rows + 1,) int64
    num_cut: int = 0  # ids that lay beyond seq_len

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, story: int) -> np.ndarray:
        return self.ids[self.starts[story] : self.starts[story + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Positions each story fills: one less than its ids."""
        return np.diff(self.starts) - 1

    @property
    def num_stories(self) -> int:
        """Stories that the rows were made of: each begins with bos, and the rows that go on with a long one do not."""
        return int((self.ids[self.starts[:-1]] == BOS).sum())

    def to_lists(self) -> list[list[int]]:
        return [self[story].tolist() for story in range(len(self))]


def encode_rows(texts: list[str], tokenizer: Tokenizer, seq_len: int, *, split: bool = False) -> Rows:
    """Encode stories; one that fills more than seq_len positions is cut (and then has no eos), or split.

    A row of a story that was split begins with the id that the row before it ends with: each is a target once.
    """
    if tokenizer.vocab_size > 1 << 16:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} ids, more than 16 bits hold; use a smaller one")
    pieces, num_cut = [], 0
    for ids in tokenizer.encode_each(texts):
        whole = [BOS, *ids, EOS]
        kept = np.array(whole if split else whole[: seq_len + 1], dtype=np.uint16)
        num_cut += len(whole) - len(kept)
        pieces += [kept[start : start + seq_len + 1] for start in range(0, len(kept) - 1, seq_len)]
    starts = np.cumsum([0, *map(len, pieces)])
    return Rows(np.concatenate(pieces) if pieces else np.zeros(0, np.uint16), starts, num_cut)


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


def pack_stories(lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    """Fill rows of seq_len positions with whole stories, longest first, each into the fullest row that has room."""
    by_room: list[list[int]] = [[] for _ in range(seq_len + 1)]  # rows by the room they have left
    groups: list[list[int]] = []
    for story in np.argsort(-lengths, kind="stable").tolist():
        need = int(lengths[story])
        room = next((r for r in range(need, seq_len + 1) if by_room[r]), None)
        if room is None:
            row, room = len(groups), seq_len
            groups.append([])
        else:
            row = by_room[room].pop()
        groups[row].append(story)
        by_room[room - need].append(row)
    return groups

"""Batches: every story once an epoch, in an order that seed and epoch decide, laid out by hand-checked rules."""

import numpy as np
import pytest
import torch

from some_moe.config import DataConfig
from some_moe.data.batches import LENGTH_STEP, Batches, Rows, pack_stories
from some_moe.data.tokenizer import BOS, EOS, PAD

MODES = ("padded", "bucketed", "packed")


def make_rows(lengths: list[int]) -> Rows:
    """Stories of the given lengths in positions; story i consists of the id 10 + i."""
    stories = [np.array([BOS, *[10 + i] * (n - 1), EOS], dtype=np.uint16) for i, n in enumerate(lengths)]
    return Rows(np.concatenate(stories), np.cumsum([0, *map(len, stories)]))


LENGTHS = [5, 60, 33, 2, 64, 17, 40, 8, 9, 50, 31, 12, 3]
ROWS = make_rows(LENGTHS)


def make_batches(batching: str, rows_a_step: int = 4, **options: object) -> Batches:
    config = DataConfig(seq_len=64, batch_size=rows_a_step, batching=batching)  # type: ignore[arg-type]
    return Batches(ROWS, config, rows_a_step=rows_a_step, seed=3, **options)  # type: ignore[arg-type]


def stories_of(batches: Batches, epoch: int) -> list[int]:
    return [int(i) - 10 for batch in batches.epoch(epoch) for i in batch.inputs.unique() if i >= 10]


def test_a_padded_row_is_laid_out_as_published() -> None:
    batch = Batches(make_rows([3]), DataConfig(seq_len=6, batching="padded"), rows_a_step=1, seed=0).make(np.array([0]))
    assert batch.inputs.tolist() == [[BOS, 10, 10, EOS, PAD, PAD]]
    assert batch.targets.tolist() == [[10, 10, EOS, PAD, PAD, PAD]]
    assert batch.real.tolist() == [[True, True, True, False, False, False]]


def test_a_packed_row_restarts_positions_and_separates_stories() -> None:
    config = DataConfig(seq_len=6, batching="packed")
    batches = Batches(make_rows([3, 2]), config, rows_a_step=1, seed=0)
    batch = batches.make(np.array([0]))
    assert batch.inputs.tolist() == [[BOS, 10, 10, BOS, 11, PAD]]
    assert batch.targets.tolist() == [[10, 10, EOS, 11, EOS, PAD]]
    assert batch.positions is not None
    assert batch.segments is not None
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, -1]]


@pytest.mark.parametrize("batching", MODES)
def test_every_story_comes_at_most_once_an_epoch_and_all_with_partial_steps(batching: str) -> None:
    seen = stories_of(make_batches(batching), 0)
    assert len(seen) == len({*seen})
    assert sorted(stories_of(make_batches(batching, keep_partial=True), 0)) == list(range(13))


@pytest.mark.parametrize("batching", MODES)
def test_order_follows_from_seed_and_epoch_alone(batching: str) -> None:
    first, again = make_batches(batching), make_batches(batching)
    for epoch in range(3):
        plans = [[part.tolist() for part in batches.plan(epoch)] for batches in (first, again)]
        assert plans[0] == plans[1]
    assert [p.tolist() for p in first.plan(0)] != [p.tolist() for p in first.plan(1)]


@pytest.mark.parametrize("batching", MODES)
def test_an_epoch_continues_where_it_was_left(batching: str) -> None:
    batches = make_batches(batching, 2)
    whole = list(batches.epoch(1))
    rest = list(batches.epoch(1, start=2))
    assert len(rest) == len(whole) - 2
    for left, right in zip(whole[2:], rest, strict=True):
        assert torch.equal(left.inputs, right.inputs)


def test_the_last_partial_step_is_dropped_as_published() -> None:
    assert len(make_batches("padded")) == 13 // 4
    assert len(make_batches("bucketed")) == 13 // 4
    assert len(make_batches("padded", keep_partial=True)) == 4


def test_buckets_waste_less_than_padding() -> None:
    def waste(batching: str) -> float:
        batches = list(make_batches(batching).epoch(0))
        return sum(int((~b.real).sum()) for b in batches) / sum(b.real.numel() for b in batches)

    assert waste("packed") < waste("bucketed") < waste("padded")
    assert {b.inputs.shape[1] % LENGTH_STEP for b in make_batches("bucketed").epoch(0)} == {0}


def test_packing_keeps_stories_whole_and_rows_within_length() -> None:
    groups = pack_stories(np.array(LENGTHS), 64)
    assert sorted(story for group in groups for story in group) == list(range(13))
    assert all(sum(LENGTHS[story] for story in group) <= 64 for group in groups)
    assert len(groups) <= -(-sum(LENGTHS) // 64) + 1


@pytest.mark.parametrize("batching", MODES)
def test_parts_of_a_step_hold_its_rows_and_number_them(batching: str) -> None:
    batch = next(iter(make_batches(batching).epoch(0)))
    parts = batch.split(3, keep_length=batching == "padded")
    assert torch.cat([part.rows for part in parts]).tolist() == list(range(len(batch.rows)))
    assert sum(part.num_real for part in parts) == batch.num_real
    for part in parts:
        time = part.inputs.shape[1]
        assert torch.equal(part.inputs, batch.inputs[part.rows, :time])
        assert not batch.real[part.rows, time:].any()


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 0), (3, 1), (2, 8)])
def test_workers_and_prefetch_change_nothing(workers: int, prefetch: int) -> None:
    config = DataConfig(seq_len=64, batch_size=2, workers=workers, prefetch=prefetch)
    batches = Batches(ROWS, config, rows_a_step=2, seed=3)
    for left, right in zip(batches.epoch(0), make_batches("bucketed", 2).epoch(0), strict=True):
        assert torch.equal(left.inputs, right.inputs)

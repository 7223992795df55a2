"""What `some train --dry-run` tells of a run is what the run does."""

from typing import Any

import pytest

from some_moe.data.batches import Batch
from some_moe.lab import estimate
from some_moe.training.machine import settle_experts
from some_moe.training.step import Stepper
from tests.shared.tiny import A1, TINY


def test_the_timed_step_is_one_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def look(self: Stepper, batch: Batch, _: int) -> None:
        seen.append((tuple(batch.inputs.shape), self.model.checkpoint_activations))

    monkeypatch.setattr(Stepper, "run_eager", look)
    changes = TINY | {"train.global_batch_tokens": 3 * 8 * 64, "train.checkpoint_activations": True}
    config = settle_experts(A1.config.override(changes | {"data.train_subset_size": 48}))
    printed = estimate.estimate(config)
    assert set(seen) == {((24, 64), True)}
    assert "steps: 2\n" in printed
    assert " s for a full step of 24 rows, about 0 s for the run" in printed


def test_no_step_is_a_number_of_steps() -> None:
    few = settle_experts(A1.config.override(TINY | {"data.train_subset_size": 7}))
    assert "steps: 0\n" in estimate.estimate(few)
    unknown = few.override({"data.train_subset_size": None})
    assert "steps: known once the data is read\n" in estimate.estimate(unknown)

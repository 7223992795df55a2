"""What `some train --dry-run` tells of a run, at once and without a step of it."""

import subprocess
import sys

import pytest

from some_moe.config import RunConfig
from some_moe.lab import estimate
from some_moe.lab.estimate import Place
from some_moe.lab.registry.presets import find_preset
from some_moe.training.machine import settle_experts
from tests.shared.tiny import A1, TINY

CPU = Place("cpu", "a CPU", bf16=False)


@pytest.fixture(autouse=True)
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "measure_flops", lambda: 1e10)


def test_a_step_is_all_its_rows() -> None:
    one = A1.config.override(TINY)
    three = one.override({"train.global_batch_tokens": 3 * 8 * 64})
    layers = estimate.LAYER_SECONDS * one.model.num_layers
    alone, together = (estimate.estimate_step(config, CPU) for config in (one, three))
    assert alone is not None
    assert together == pytest.approx(3 * (alone - layers) + layers)
    printed = estimate.estimate(three.override({"data.train_subset_size": 48}))
    assert "steps: 2\n" in printed
    assert " for a step of 24 full rows, about " in printed


def test_no_step_is_a_number_of_steps() -> None:
    few = A1.config.override(TINY | {"data.train_subset_size": 7})
    assert "steps: 0\n" in estimate.estimate(few)
    assert "steps: known once the data is read\n" in estimate.estimate(few.override({"data.train_subset_size": None}))


@pytest.mark.parametrize(
    "changes", [{}, {"train.precision": "bf16"}, {"model.trainability": "full", "train.precision": "bf16"}]
)
def test_experts_are_stored_as_the_run_would_store_them(changes: dict[str, str]) -> None:
    config = A1.config.override(TINY | changes)
    assert Place.find(config).settle(config) == settle_experts(config)


def test_too_little_memory_is_said_beside_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "available_bytes", lambda _: 1 << 30)
    printed = estimate.estimate(RunConfig().override({"train.device": "cpu"}))
    assert "of which 1.0 GiB are free; make the model or the batch smaller" in printed


def test_a_gpu_without_a_known_peak_has_no_time() -> None:
    config = find_preset("A1")
    assert estimate.estimate_step(config, Place("cuda", "some GPU", bf16=True)) is None
    assert "some bench step" in estimate.describe_time(config, None)
    seconds = estimate.estimate_step(config, Place("cuda", "NVIDIA H200", bf16=True))
    assert seconds == pytest.approx(0.014, rel=0.3)  # benchmarks/RESULTS.md


def test_on_a_cpu_no_torch_is_loaded() -> None:
    code = (
        "import sys; from some_moe.cli import main\n"
        "code = main(['train', '--preset', 'smoke', '--dry-run'])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "time: roughly 0." in done.stdout


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.034, "0.03 s"), (70, "70 s"), (600, "10 min"), (9000, "2.5 h"), (1e7, "116 days")]
)
def test_times_are_said_in_the_unit_that_suits(seconds: float, text: str) -> None:
    assert estimate.describe_seconds(seconds) == text

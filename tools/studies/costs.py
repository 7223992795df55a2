"""What a run costs on an H200, by formula: GPU seconds alone on the chip, and memory. Imports no torch."""

from dataclasses import dataclass

from some_moe.config import RunConfig
from some_moe.config.parameters import count_parameters
from some_moe.lab.bench.shapes import PEAK_FLOPS, step_flops_per_token
from some_moe.lab.scaling import Stories, scale
from some_moe.memory import needed_bytes
from tools.studies.plan import STORIES, Plan, Run, Settings, Study
from tools.studies.records import Records

PEAK, MFU = PEAK_FLOPS["NVIDIA H200"], 0.36
OPTIMIZER = 46 / 4.2e12  # seconds a trained parameter: AdamW, norm, casts and gradients, in bytes over bandwidth
LAUNCHES = 1e-3  # seconds a step besides
START = 14.0  # seconds of a run that are not its steps: loading torch, capturing, evaluation; measured 12 to 20
WORKERS = 6
MEAN_TOKENS = {"tinystories": 215, "novels": 320}  # of a row, as cut at 384
GPU_BYTES = 139 << 30
SHARE_USED = 0.7  # of the formula's bytes: A6 took 12.0 GiB of 18.5


@dataclass(frozen=True)
class Cost:
    """Of one run."""

    steps: int
    gpu_seconds: float
    needed_bytes: int  # by the product's formula, which is generous

    @property
    def used_bytes(self) -> float:
        return SHARE_USED * self.needed_bytes


def estimate(run: Run) -> Cost:
    """Without reading the text."""
    config = run.config
    fitted, schedule = scale(config, cut(config, run.arm.data))
    steps = schedule.steps or 0
    data = config.data
    row = data.seq_len if data.batching == "padded" else min(data.seq_len, MEAN_TOKENS[run.arm.data])
    flops = config.rows_a_step * row * step_flops_per_token(config.model, row)
    step = flops / (MFU * PEAK) + LAUNCHES + OPTIMIZER * count_parameters(config.model).trainable
    halves = {"train.precision": "bf16"}
    if config.model.trainability != "full":
        halves["model.expert_dtype"] = "bfloat16"
    return Cost(steps, steps * step, needed_bytes(fitted.override(halves), training=True))


def cut(config: RunConfig, data: str) -> Stories:
    """How many stories a run gets."""
    there = STORIES[data]
    sizes = (config.data.train_subset_size, config.data.val_subset_size, config.data.val_subset_size)
    return Stories(*(count if size is None else min(count, size) for count, size in zip(there, sizes, strict=True)))


def foretell(plan: Plan, study: Study, records: Records) -> tuple[int, int, float]:
    """(runs in all, done, GPU seconds of what is open): of runs that are not known yet, those of typical settings."""
    total = done = 0
    seconds = 0.0
    for arm in study.arms:
        known = plan.known_runs(arm, records)
        finished = sum(run.record in records for run in known)
        count = max(plan.count_runs(arm), len(known))
        typical = Settings(1.2e-3, 0.1, 0.1) if arm.grid is not None or arm.like else None
        passes = (plan.find_passes(arm, records) or 8) if arm.seconds_of else None
        cost = estimate(Run(arm=arm, seed=arm.seeds[0], settings=typical, passes=passes))
        total += count
        done += finished
        seconds += (count - finished) * cost.gpu_seconds
    return total, done, seconds


def minutes_of(runs: int, gpu_seconds: float, workers: int) -> float:
    """Minutes that a machine takes for them: bound by the chip, or by what each run does beside its steps."""
    return max(gpu_seconds / 0.9, (gpu_seconds + START * runs) / workers) / 60

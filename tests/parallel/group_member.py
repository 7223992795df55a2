"""One process of a group, as test_process_group.py starts it: a fork of a server that has imported torch already.

Globals that the test sets: `environment` (what torchrun would say), `job`, `place` (a folder) and `options`.
"""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from some_moe import cli
from some_moe.commands import training
from some_moe.config import ConfigError, DataConfig, GravityConfig, ModelConfig, RunConfig, TrainConfig
from some_moe.data.batches import Batches, Rows
from some_moe.data.tokenizer import BOS, EOS
from some_moe.model.routing import Routing
from some_moe.model.transformer import SomeLM
from some_moe.parallel import process_group
from some_moe.parallel.process_group import SINGLE, ProcessGroup
from some_moe.training import loop
from some_moe.training.evaluate import evaluate
from some_moe.training.optim import make_optimizer
from some_moe.training.step import prepare, train_step

CPU = torch.device("cpu")
MODEL = ModelConfig(
    d_model=16, num_layers=2, num_heads=2, vocab_size=20, num_experts=4, d_ffn=8, top_k=2, center_queries=True
)
GRAVITY = GravityConfig(
    alpha=0.1,
    delta=0.1,
    theta_percentile=0.3,
    decay_mode="seek",
    respawn_below=0.97,
    respawn_patience=1,
    token_fraction=0.5,
    ema_decay=0.5,
)
STEPS = 5
# Rows a step, rows a micro-batch, and the convention. Two short rows have fewer tokens than gravity would sample.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "bucketed": (16, 16, {}),
    "accumulated": (32, 8, {}),
    "packed": (8, 8, {"batching": "packed"}),
    "padding counts": (16, 16, {"batching": "padded", "loss_on": "all_positions", "count_padding": True}),
    "few tokens": (2, 2, {}),
}


def make_rows(count: int) -> Rows:
    random = np.random.default_rng(0)
    lengths = random.integers(2, 33, count)
    stories = [np.array([BOS, *random.integers(3, 20, n - 1), EOS], dtype=np.uint16) for n in lengths]
    return Rows(np.concatenate(stories), np.cumsum([0, *map(len, stories)]))


# Models whose experts are shared out, by what is trained of them.
KINDS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "full": {"trainability": "full"},
    "lora": {"trainability": "lora", "lora_rank": 2},
    "gains": {"gains": True, "router": "learned", "center_queries": False, "learn_temperature": True},
    "shared_down": {"shared_down": True, "output_scale": True},
    "orthogonal": {"init_method": "orthogonal"},
}


def make_config(model: ModelConfig, batch_size: int, data: dict[str, Any], **train: Any) -> RunConfig:
    return RunConfig(
        model=model,
        gravity=GRAVITY if model.router == "gravity" else GravityConfig.off(),
        data=DataConfig(seq_len=40, batch_size=batch_size, **data),
        train=TrainConfig(learning_rate=3e-3, **train),
    )


def take_steps(group: ProcessGroup = SINGLE) -> dict[str, torch.Tensor]:
    """Five steps of each case in float64."""
    found: dict[str, torch.Tensor] = {}
    for case, (rows_a_step, batch_size, data) in CASES.items():
        config = make_config(MODEL, batch_size, data)
        found |= {f"{case}/{name}": value for name, value in take(config, rows_a_step, torch.float64, group).items()}
    return found


def take(config: RunConfig, rows_a_step: int, dtype: torch.dtype, group: ProcessGroup) -> dict[str, torch.Tensor]:
    """Five steps: losses, gradient norms, the last step's routing, parameters and keys, all of them whole."""
    batches = Batches(make_rows(400), config.data, rows_a_step=rows_a_step, seed=1)
    model = SomeLM(config.model, config.gravity, experts=group.own_experts()).to(dtype)
    group.take_over(model)
    sharing = group.count_sharing(config)
    assert all(len(library.up) * sharing == config.model.num_experts for library in model.libraries)
    optimizer = make_optimizer(model, config.train)
    if group.sharding is not None:
        optimizer.clip = group.sharding.clip
    results = []
    for step, batch in zip(range(STEPS), batches.epoch(0), strict=False):
        inputs = prepare(batch, config, step, STEPS, CPU, group)
        results.append(train_step(model, optimizer, inputs, config, group))
    found = {"losses": torch.stack([result.loss for result in results])}
    found["norms"] = torch.stack([result.gradient_norm for result in results])
    for layer, routing in enumerate(results[-1].routings):
        values = {f.name: getattr(routing, f.name) for f in fields(Routing)}
        # Of the rows of this process alone are what it has chosen for each of them.
        of_rows = set() if group.sharding is None else {"experts", "gates", "query"}
        found |= {f"{layer}.{k}": value for k, value in values.items() if value is not None and k not in of_rows}
    for name, value in model.state_dict().items():
        found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: value.contiguous() for name, value in found.items()}


def share_out(kind: str, dtype: torch.dtype, group: ProcessGroup, **train: Any) -> dict[str, torch.Tensor]:
    """Five steps of a kind of model that a group shares out as `train` says."""
    config = make_config(MODEL.override(KINDS[kind]), 8, {}, **train)
    if not group.is_single:
        from some_moe.parallel.sharding import Sharding

        group.refuse_uneven(config)
        group.sharding = Sharding(config, group, group.count_sharing(config))
    return take(config, 16, dtype, group)


def run_sharded(place: Path, options: dict[str, Any]) -> int:
    """Steps of every kind in options["kinds"], shared out in each of options["ways"]."""
    with ProcessGroup.from_environment() as group:
        group.join(CPU)
        for kind in options["kinds"]:
            for way, train in options["ways"].items():
                for dtype in (torch.float64, torch.float32):
                    found = share_out(kind, dtype, group, **train)
                    if group.is_main:
                        save_file(found, place / f"{kind} {way} {str(dtype).removeprefix('torch.')}.safetensors")
    return 0


def measure(num_rows: int, group: ProcessGroup = SINGLE) -> dict[str, Any]:
    """Score rows, eight at a time."""
    config = RunConfig(model=MODEL, gravity=GRAVITY, data=DataConfig(seq_len=40, batch_size=8))
    found = evaluate(SomeLM(MODEL, GRAVITY), make_rows(num_rows), config, np.arange(20), CPU, group=group)
    return found.to_dict() | {"stories": found.stories}


def run_steps(place: Path, options: dict[str, Any]) -> int:
    with ProcessGroup.from_environment() as group:
        group.join(CPU)
        save_file(take_steps(group), place / f"steps-{group.rank}.safetensors")
        messages = [group.any(False), group.any(group.rank == 1), group.barrier(f"note {group.rank}")]
        (place / f"messages-{group.rank}.json").write_text(json.dumps(messages))
        figures = [measure(num_rows, group) for num_rows in options["measure"]]
        (place / f"figures-{group.rank}.json").write_text(json.dumps(figures))
    return 0


# --- what may happen to one process ---------------------------------------------------------------------------


def die(trainer: loop.Trainer) -> None:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_backward(trainer: loop.Trainer) -> None:
    """Half-way through the next step."""
    trainer.model.blocks[0].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def freeze(trainer: loop.Trainer) -> None:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGSTOP)


def be_asked_to_stop(trainer: loop.Trainer) -> None:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # and once more, by a launcher that passes it on


def die_when_parts_are_written(trainer: loop.Trainer) -> None:  # noqa: ARG001
    """The next part that this process is to write is its last."""
    from torch.distributed.checkpoint import hf_storage

    def write_data(*arguments: Any) -> Any:  # noqa: ARG001
        os.kill(os.getpid(), signal.SIGKILL)

    hf_storage.HuggingFaceStorageWriter.write_data = write_data  # type: ignore[method-assign]


def have_no_room(trainer: loop.Trainer) -> None:  # noqa: ARG001
    """Nor has the next part that this process is to write."""
    from torch.distributed.checkpoint import hf_storage

    def write_data(*arguments: Any) -> Any:  # noqa: ARG001
        raise OSError(errno.ENOSPC, "No space left on device")

    hf_storage.HuggingFaceStorageWriter.write_data = write_data  # type: ignore[method-assign]


def drift(trainer: loop.Trainer) -> None:
    with torch.no_grad():
        trainer.model.head.bias[3] += 1e-6


DEEDS: dict[str, Callable[[loop.Trainer], None]] = {
    "die": die,
    "die when parts are written": die_when_parts_are_written,
    "die in backward": die_in_backward,
    "have no room": have_no_room,
    "freeze": freeze,
    "be asked to stop": be_asked_to_stop,
    "drift": drift,
}


def befall(deed: Callable[[loop.Trainer], None], at_step: int) -> None:
    original = loop.Trainer.should_sync

    def should_sync(trainer: loop.Trainer, step: int) -> bool:
        if step == at_step:
            deed(trainer)
        return original(trainer, step)

    loop.Trainer.should_sync = should_sync  # type: ignore[method-assign]


def find_no_data(*arguments: Any, **options: Any) -> Any:  # noqa: ARG001
    raise ConfigError("data.source 'x' does not exist here; give another")


def run_command(place: Path, options: dict[str, Any]) -> int:
    """Run `some` with options["words"]; its output goes to files. options["deed"] befalls the second process."""
    rank = os.environ["RANK"]
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        with (place / f"{name}-{rank}").open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    training.FAREWELL_SECONDS = 0.0
    process_group.PATIENCE = timedelta(seconds=options.get("patience", 60))
    words, deed = options["words"], options.get("deed")
    if rank == "1" and deed == "have another seed":
        words = [*words, "--train.seed", "1"]
    elif rank == "1" and deed == "find no data":
        loop.prepare = find_no_data
    elif rank == "1" and deed is not None:
        befall(DEEDS[deed], options["at_step"])
    code = cli.main(words)
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(globals()["environment"])
    jobs = {"steps": run_steps, "command": run_command, "sharded": run_sharded}
    sys.exit(jobs[globals()["job"]](Path(globals()["place"]), globals()["options"]))

"""The training loop, read downwards: next batch → one step → record → now and then evaluate, save, look.

Everything that must survive the process is in `Progress` and the checkpoint; the order of the data and every
random choice follow from (seed, step). So a run that was killed and resumed ends with the same bits on a CPU.
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from some_moe.config import ConfigError, RunConfig
from some_moe.data.batches import Batches
from some_moe.data.dataset import Dataset, prepare
from some_moe.data.tokenizer import Tokenizer
from some_moe.metrics.usage import gini
from some_moe.model.transformer import SomeLM
from some_moe.train.board import Board
from some_moe.train.checkpoint import (
    describe_libraries,
    load_model,
    load_optimizer,
    prune_checkpoints,
    read_state,
    save_checkpoint,
)
from some_moe.train.display import Display
from some_moe.train.evaluate import Evaluation, evaluate
from some_moe.train.machine import Machine, choose_machine
from some_moe.train.optim import make_optimizer
from some_moe.train.recorder import RunFolder
from some_moe.train.result import epoch_record, make_result
from some_moe.train.sampling import sample_text
from some_moe.train.step import train_step


class TrainingStoppedError(RuntimeError):
    """The run ended before its time. Its message says what happened and how to go on; `code` is the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Progress:
    """How far a run has come: everything but the tensors. Saved as JSON, which keeps every float exactly."""

    step: int = 0
    tokens: int = 0  # real tokens trained on
    seconds: float = 0.0  # in training steps
    epoch_loss: float = 0.0  # sum of the step losses of the present epoch
    epoch_steps: int = 0
    best_val_loss: float | None = None
    best_step: int | None = None
    stale: int = 0  # evaluations since the best one
    stopped_early: bool = False
    epochs: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """One run from its config to its result."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, display: Display, tokenizer: Tokenizer | None = None
    ) -> None:
        self.config, self.folder, self.display = config, folder, display
        self.machine: Machine = choose_machine(config.train)
        self.dataset: Dataset = prepare(config.data, config.model.vocab_size, tokenizer)
        self.token_bytes = self.dataset.tokenizer.token_bytes()
        per_batch = config.data.batch_size * config.data.seq_len
        self.accumulation = max(1, math.ceil((config.train.global_batch_tokens or 0) / per_batch))
        rows_a_step = config.data.batch_size * self.accumulation
        self.batches = Batches(self.dataset.train, config.data, rows_a_step=rows_a_step, seed=config.train.seed)
        if len(self.batches) == 0:
            raise ConfigError(
                f"data.source {config.data.source!r} gives {self.batches.num_rows} training rows, fewer than one step "
                f"of {rows_a_step}; lower data.batch_size or give more stories"
            )
        self.steps_an_epoch = len(self.batches)
        self.total_steps = min(self.steps_an_epoch * config.train.epochs, config.train.max_steps or 10**12)
        self.model = SomeLM(
            config.model,
            config.gravity,
            seed=config.train.seed,
            kernel=config.train.kernel,
            checkpoint_activations=config.train.checkpoint_activations,
            device=self.machine.device,
        )
        self.optimizer = make_optimizer(self.model, config.train)
        self.libraries = describe_libraries(self.model)
        self.progress = Progress()
        shape = (len(self.model.layers), config.model.num_experts)
        self.epoch_counts = torch.zeros(shape, dtype=torch.int64, device=self.machine.device)
        self.board = Board(folder.path / "tensorboard") if config.train.tensorboard else None
        self.last_valid: Evaluation | None = None  # of the last step evaluated, which ends every run
        self.saved_step: int | None = None
        self.interrupted = False

    # --- saving and restoring -------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint, unless this step has one; then remove what is no longer needed."""
        if self.saved_step == self.progress.step:
            return
        state = asdict(self.progress) | {"libraries": self.libraries, "data_digest": self.dataset.digest}
        save_checkpoint(self.folder.checkpoints, self.model, self.optimizer, state, {"epoch_counts": self.epoch_counts})
        self.saved_step = self.progress.step
        prune_checkpoints(self.folder.checkpoints, self.config.train.keep_last, self.progress.best_step)

    def restore(self, place: Path) -> None:
        """Continue from a checkpoint, to the same bits as if nothing had happened."""
        state = read_state(place)
        if state["data_digest"] != self.dataset.digest:
            raise ConfigError(
                f"data.source {self.config.data.source!r} has changed since {str(place)!r} was saved; restore the "
                "data, or start a new run with --init-from"
            )
        load_model(place, self.model, state)
        extra = load_optimizer(place, self.model, self.optimizer, ("epoch_counts",))
        self.epoch_counts = extra["epoch_counts"].to(self.machine.device)
        self.progress = Progress(**{name: state[name] for name in asdict(self.progress)})
        self.saved_step = self.progress.step
        self.folder.cut_back(self.progress.step)

    # --- the loop -------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end and return the result."""
        progress, config = self.progress, self.config.train
        self.display.begin(progress.step, self.total_steps)
        if progress.step == 0:
            self.snapshot_keys()
        model = torch.compile(self.model) if config.compile else self.model
        with self.catch_interrupts():
            while progress.step < self.total_steps and not progress.stopped_early:
                epoch, first = divmod(progress.step, self.steps_an_epoch)
                for batch in self.batches.epoch(epoch, first):
                    started = time.perf_counter()
                    # --- a single training step ---
                    result = train_step(
                        model,  # type: ignore[arg-type]
                        self.optimizer,
                        batch,
                        self.config,
                        progress.step,
                        self.total_steps,
                        device=self.machine.device,
                        bf16=self.machine.bf16,
                    )
                    # --- what it leaves behind ---
                    loss = float(result.loss)
                    if not math.isfinite(loss) or not math.isfinite(float(result.gradient_norm)):
                        raise TrainingStoppedError(self.describe_divergence(loss))
                    progress.step += 1
                    progress.tokens += batch.num_real
                    progress.epoch_loss += loss
                    progress.epoch_steps += 1
                    for place, routing in enumerate(result.routings):
                        self.epoch_counts[place] += routing.counts
                    progress.seconds += time.perf_counter() - started
                    self.display.advance(progress.step)
                    # --- now and then ---
                    if progress.step % config.log_every == 0 or progress.step == self.total_steps:
                        self.log(loss, float(result.gradient_norm), result.rate, result.top_k, self.middle_gini(result))
                    self.look_up(epoch)
                    if progress.stopped_early or progress.step >= self.total_steps:
                        break
        return self.finish()

    def look_up(self, epoch: int) -> None:
        """Snapshot, sample, evaluate and save, where this step asks for it."""
        progress, config = self.progress, self.config.train
        step = progress.step
        ends_epoch = step % self.steps_an_epoch == 0 or step == self.total_steps

        def due(every: int) -> bool:
            return every > 0 and step % every == 0

        if due(config.snapshot_every) or step == self.total_steps:
            self.snapshot_keys()
        if due(config.sample_every) or ends_epoch:
            self.sample()
        if due(config.eval_every) or ends_epoch:
            self.evaluate(epoch, ends_epoch)
            self.save()
        elif due(config.save_every):
            self.save()
        if self.interrupted:
            self.save()
            raise TrainingStoppedError(
                f"interrupted at step {step}, which is saved; continue with: "
                f"some train --out {self.folder} --resume auto",
                code=130,
            )

    def evaluate(self, epoch: int, ends_epoch: bool) -> None:
        """Measure on valid, remember the best, and close the books of an epoch that ends."""
        progress = self.progress
        found = self.last_valid = self.measure("valid")
        if progress.best_val_loss is None or found.loss < progress.best_val_loss:
            progress.best_val_loss, progress.best_step, progress.stale = found.loss, progress.step, 0
        else:
            progress.stale += 1
            progress.stopped_early = 0 < self.config.train.early_stop <= progress.stale
        record = {"step": progress.step, "epoch": epoch + 1, "tokens": progress.tokens} | {
            f"val_{name}" if name.startswith("loss") else name: value for name, value in found.to_dict().items()
        }
        self.record(record)
        self.display.say(self.describe_evaluation(epoch, found))
        if ends_epoch or progress.stopped_early:
            train_loss = progress.epoch_loss / max(1, progress.epoch_steps)
            counts = [row.cpu() for row in self.epoch_counts]
            progress.epochs.append(epoch_record(epoch + 1, progress.step, progress.tokens, train_loss, found, counts))
            progress.epoch_loss, progress.epoch_steps = 0.0, 0
            self.epoch_counts.zero_()

    def measure(self, split: str) -> Evaluation:
        rows = getattr(self.dataset, split)
        return evaluate(self.model, rows, self.config, self.token_bytes, self.machine.device, bf16=self.machine.bf16)

    def finish(self) -> dict[str, Any]:
        """Report by test, on the checkpoint that valid chose, and write result.json."""
        progress = self.progress
        valid, test_last = self.last_valid or self.measure("valid"), self.measure("test")
        test_best = test_last
        best = self.folder.checkpoints / f"step-{progress.best_step}"
        if progress.best_step != progress.step and best.is_dir():
            last = {name: value.clone() for name, value in self.model.state_dict().items()}
            load_model(best, self.model, read_state(best))
            test_best = self.measure("test")
            self.model.load_state_dict(last)
        result = make_result(
            self.config, self.model, asdict(progress), valid, test_best, test_last, self.machine.describe()
        )
        self.folder.write_result(result)
        return result

    # --- small things ---------------------------------------------------------------------------------------

    def snapshot_keys(self) -> None:
        keys: dict[str, Tensor] = {}
        for layer in self.model.layers:
            if layer.state is not None:
                keys |= {f"{layer.layer}.keys": layer.state.keys, f"{layer.layer}.usage": layer.state.usage}
        if keys and self.config.train.snapshot_every:
            self.folder.save_keys(self.progress.step, keys)

    def sample(self) -> None:
        config = self.config.train
        if config.sample_tokens:
            text = sample_text(
                self.model,
                self.dataset.tokenizer,
                config.sample_prompt,
                config.sample_tokens,
                seed=config.seed * 1_000_003 + self.progress.step,
            )
            self.folder.append("samples.jsonl", {"step": self.progress.step, "text": text})

    def middle_gini(self, result: Any) -> float | None:
        """Gini of the middle layer in this step alone: what the bar shows."""
        if not result.routings:
            return None
        return gini(result.routings[len(result.routings) // 2].counts)

    def log(self, loss: float, norm: float, rate: float, top_k: int, usage: float | None) -> None:
        progress = self.progress
        speed = progress.tokens / progress.seconds if progress.seconds else 0.0
        record = {
            "step": progress.step,
            "epoch": (progress.step - 1) // self.steps_an_epoch + 1,
            "tokens": progress.tokens,
            "train_loss": loss,
            "gradient_norm": norm,
            "learning_rate": rate,
            "top_k": top_k,
            "gini_middle": usage,
            "tokens_per_second": speed,
        }
        self.record(record)
        self.display.show(progress.step, loss, speed, usage)

    def record(self, figures: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl, and to TensorBoard where that is asked for."""
        self.folder.append("metrics.jsonl", figures)
        if self.board is not None:
            self.board.add(figures)

    def describe_evaluation(self, epoch: int, found: Evaluation) -> str:
        text = f"epoch {epoch + 1}, step {self.progress.step}: val loss {found.loss:.4f}"
        text += f", perplexity {found.perplexity:.2f}"
        if found.loss_padded is not None:
            text += f" (over padding too: {found.loss_padded:.4f})"
        if found.layers:
            middle = found.layers[len(found.layers) // 2]
            text += (
                f", middle layer gini {middle['gini']:.3f}, {middle['experts_used']}/{middle['num_experts']} experts"
            )
        return text

    def describe_divergence(self, loss: float) -> str:
        newest = self.folder.newest_checkpoint()
        kept = f"the last good checkpoint is {newest}" if newest else "no checkpoint had been saved yet"
        return (
            f"the loss became {loss} at step {self.progress.step + 1}; {kept}; "
            "lower train.learning_rate or set train.clip"
        )

    @contextmanager
    def catch_interrupts(self) -> Iterator[None]:
        """Ctrl-C and a polite kill end the run after the present step, with a checkpoint; a second one ends it now."""

        def note(number: int, frame: Any) -> None:  # noqa: ARG001
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            self.display.say("stopping after this step; press Ctrl-C again to stop at once")

        try:
            previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:
            # Not in the main thread: signals belong to somebody else.
            yield
            return
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def start(
    config: RunConfig, folder: RunFolder, display: Display, command: str, init_from: Path | None = None
) -> Trainer:
    """Begin a new run in an empty folder; init_from is a checkpoint whose weights and keys it starts with."""
    folder.refuse_if_used()
    tokenizer = None
    if init_from is not None:
        tokenizer = Tokenizer.load(init_from.parent.parent / "tokenizer.json")
    trainer = Trainer(config, folder, display, tokenizer)
    if init_from is not None:
        load_model(init_from, trainer.model, read_state(init_from))
    folder.create(config, trainer.dataset.tokenizer.to_json(), command)
    return trainer


def resume(folder: RunFolder, display: Display, place: Path | None) -> Trainer:
    """Continue a run from a checkpoint, or from its beginning where it has none yet."""
    config = folder.read_config()
    trainer = Trainer(config, folder, display, Tokenizer.load(folder.tokenizer_file))
    if place is None:
        folder.cut_back(-1)
    else:
        trainer.restore(place)
    return trainer


def train(trainer: Trainer) -> dict[str, Any]:
    """Run to the end. A disk that is full or gone ends the run with a sentence, the last checkpoint whole."""
    try:
        with trainer.display:
            return trainer.run()
    except OSError as error:
        newest = trainer.folder.newest_checkpoint()
        kept = f"the last whole checkpoint is {newest}" if newest else "no checkpoint had been saved yet"
        raise TrainingStoppedError(
            f"cannot write to {trainer.folder} ({error.strerror or error}); {kept}; "
            "make room and continue with --resume auto"
        ) from None

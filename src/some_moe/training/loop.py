"""The training loop, read downwards: next batch → one step → record → now and then evaluate, save, look.

Everything that must survive the process is in `Progress` and the checkpoint; the order of the data and every
random choice follow from (seed, step). So a run that was killed and resumed ends with the same bits on a CPU.
"""

import math
import time
from collections.abc import Container
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from some_moe.config import ConfigError, RunConfig, TrainingStoppedError
from some_moe.config.run import LENGTH
from some_moe.data.batches import Batches
from some_moe.data.dataset import Dataset, prepare
from some_moe.data.tokenizer import Tokenizer
from some_moe.errors import INTERRUPTED
from some_moe.hashing import derive_key
from some_moe.memory import refuse_full_disk, refuse_too_large
from some_moe.metrics.usage import gini
from some_moe.model.transformer import SomeLM
from some_moe.parallel.process_group import SINGLE, ProcessGroup, ProcessGroupError, digest_tensors
from some_moe.sinks.display import Display
from some_moe.sinks.trackers import open_sinks
from some_moe.sinks.words import describe_evaluation
from some_moe.system.phases import Phases
from some_moe.system.processes import Interrupts
from some_moe.training import checkpoint
from some_moe.training.evaluate import Evaluation, evaluate
from some_moe.training.generation import stream_text
from some_moe.training.machine import Machine, choose_machine
from some_moe.training.result import epoch_record, make_result
from some_moe.training.run_folder import RunFolder
from some_moe.training.schedule import rate_at, top_k_at
from some_moe.training.step import StepResult

Kept = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]  # what a checkpoint is written from
AGAIN = "make room, and resume it again"


@dataclass
class Progress:
    """How far a run has come: everything but the tensors. Saved as JSON, which keeps every float exactly."""

    step: int = 0
    tokens: int = 0  # real tokens trained on
    seconds: float = 0.0  # in training steps, compiling apart
    compile_seconds: float = 0.0
    epoch_loss: float = 0.0  # sum of the step losses of the present epoch
    epoch_steps: int = 0
    best_val_loss: float | None = None
    best_step: int | None = None
    stale: int = 0  # evaluations since the best one
    stopped_early: bool = False
    epochs: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)  # of settings on the way: step, field, before, after
    phases: dict[str, float] = field(default_factory=dict)  # seconds of the run's earlier processes


class Trainer:
    """One run from its config to its result; in a process group, every process has one, and they go in step."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        display: Display,
        tokenizer: Tokenizer | None,
        group: ProcessGroup,
        model: SomeLM | None = None,  # one that was made already, of which a part learns
    ) -> None:
        self.config, self.folder, self.display, self.group = config, folder, display, group
        self.phases = Phases()
        self.machine: Machine = choose_machine(config.train, group)
        group.refuse_uneven(config)
        group.join(self.machine.device, config)
        with self.phases("data"), group.one_goes_first():
            self.dataset: Dataset = prepare(
                config.data, config.model.vocab_size, tokenizer, say=display.say, track=display.track
            )
        self.token_bytes = self.dataset.tokenizer.token_bytes()
        self.batches = Batches(
            self.dataset.train,
            config.data,
            rows_a_step=config.rows_a_step,
            seed=config.train.seed,
            for_gpu=self.machine.device.type == "cuda",
        )
        if len(self.batches) == 0:
            raise ConfigError(
                f"data.source {config.data.source!r} gives {self.batches.num_rows} training rows, fewer than one step "
                f"of {config.rows_a_step}; lower data.batch_size or give more stories"
            )
        self.steps_an_epoch = len(self.batches)
        self.total_steps = config.count_steps(self.batches.num_rows)
        longest, shares = int(self.dataset.train.lengths.max()), group.count_shares(config)
        refuse_too_large(config, self.machine.device, training=True, longest=longest, shares=shares)
        refuse_full_disk(config, folder.path, self.total_steps, there=len(folder.list_checkpoints()))
        with self.phases("model"):
            self.model = self.machine.make_model(config, group) if model is None else self.machine.adopt(model)
            self.stepper = stepper = self.machine.make_stepper(self.model, config, self.total_steps, group)
            self.libraries = checkpoint.describe_libraries(self.model)
        self.optimizer, self.uncompiled, self.score = stepper.optimizer, stepper.uncompiled, stepper.score
        self.progress = Progress()
        shape = (len(self.model.layers), config.model.num_experts)
        self.epoch_counts = torch.zeros(shape, dtype=torch.int64, device=self.machine.device)
        self.sinks = open_sinks(folder.path, config) if group.is_main else []
        self.last_valid: Evaluation | None = None  # of the last step evaluated, which ends every run
        self.saved_step: int | None = None
        alone = group.is_single and self.machine.device.type == "cuda"
        self.writer = ThreadPoolExecutor(1) if alone else None  # of checkpoints
        self.written: Future[None] | None = None
        self.staging: dict[str, Tensor] = {}  # where a checkpoint waits to be written
        self.best: Kept | None = None  # a checkpoint in memory, where only the best is to be written, at the end
        self.interrupts = Interrupts(lambda text: self.display.say(text), launched=not group.is_single)
        self.interrupted = False  # in this process or another of the group
        self.pending_metrics: list[tuple[Tensor, Tensor]] = []  # loss and gradient norm of steps since the last look
        self.clock = 0.0

    # --- saving and restoring -------------------------------------------------------------------------------

    def save(self, *, leaving: bool = False) -> None:
        """Write a checkpoint, unless this step has one; then remove what is no longer needed.

        Of a run that writes the best alone, the best stays in memory until it ends. leaving: it stops here.
        """
        progress, kind = self.progress, self.config.train.checkpoints
        if self.saved_step == progress.step:
            return
        self.verify_group()
        whole = kind == "all" or (kind == "best" and leaving)
        memory = checkpoint.name_memory(self.model, self.optimizer) if whole else {}
        kept = dict(self.model.state_dict()), memory | {"epoch_counts": self.epoch_counts}, self.describe_state(whole)
        if kind != "best" or leaving:
            self.write_best()
            self.write(kept)
            self.saved_step = progress.step
        elif progress.best_step == progress.step:
            weights, memory, state = kept
            self.best = checkpoint.copy_to_cpu(weights), checkpoint.copy_to_cpu(memory), state

    def write(self, kept: Kept) -> None:
        """Write a checkpoint; beside a GPU that goes on learning, while it does."""
        with self.phases("checkpoints"):
            self.wait_for_writer()
            if self.writer is None:
                self.write_now(kept, self.progress.best_step)
                return
            weights, memory, state = kept
            weights, memory = (checkpoint.copy_to_cpu(tensors, self.staging) for tensors in (weights, memory))
            self.written = self.writer.submit(self.write_now, (weights, memory, state), self.progress.best_step)

    def write_now(self, kept: Kept, best_step: int | None) -> None:
        if self.group.has_model:
            checkpoint.save_checkpoint(self.folder.checkpoints, *kept, self.group)
        if self.group.is_main:
            self.prune(best_step)
        self.group.barrier()  # a process that ended now would have the one that writes killed

    def wait_for_writer(self) -> None:
        """Until the last checkpoint is on the disk. What kept it from there is raised here."""
        if self.written is not None:
            written, self.written = self.written, None
            written.result()

    def write_best(self) -> None:
        """Bring what is kept in memory to the disk."""
        if self.best is not None:
            self.write(self.best)
            self.best = None

    def prune(self, best_step: int | None, *, finished: bool = False) -> None:
        """Remove the checkpoints that nobody needs any more."""
        config = self.config.train
        keep_last = config.keep_last if config.checkpoints != "best" else int(not finished)
        checkpoint.prune_checkpoints(self.folder.checkpoints, keep_last, best_step)

    def describe_state(self, whole: bool = True) -> dict[str, Any]:
        """What state.json says beside the hashes. whole: with the optimizer's memory."""
        about = {"libraries": self.libraries, "data_digest": self.dataset.digest, "config": self.config.flatten()}
        progress = asdict(self.progress) | {"phases": self.phases.table(self.progress.phases)}
        return progress | about | ({} if whole else {"without_optimizer": True})

    def verify_group(self) -> None:
        """Go on only if every process of a group holds the same."""
        if not self.group.is_single:
            tensors = digest_tensors(self.model.state_dict())
            held = {"settings": self.config.to_yaml(), "data": self.dataset.digest, "experts": str(self.libraries)}
            self.group.verify(held | {"parameters and keys": tensors})

    def restore(self, place: Path) -> dict[str, Any]:
        """Continue from a checkpoint, to the same bits as if nothing had happened. Returns its state."""
        state = checkpoint.load_model(place, self.model)
        if state["data_digest"] != self.dataset.digest:
            raise ConfigError(
                f"data.source {self.config.data.source!r} has changed since {str(place)!r} was saved; restore the "
                "data, or start a new run with --init-from"
            )
        extra = {"epoch_counts": self.epoch_counts}
        forgets = bool(state["step"] and state.get("without_optimizer"))
        steps = 0 if forgets else state["step"]
        extra = checkpoint.load_optimizer(place, self.model, self.optimizer, extra, steps=steps)
        self.epoch_counts = extra["epoch_counts"].to(self.machine.device)
        self.progress = Progress(**{name: state[name] for name in asdict(self.progress) if name in state})
        if forgets:
            self.progress.changes.append({"step": state["step"], "field": "optimizer", "before": "", "after": "anew"})
            self.display.say(f"{place} holds weights alone: the optimizer begins anew, and the run ends otherwise")
        self.saved_step = self.progress.step
        return state

    def accept(self, changes: list[dict[str, Any]]) -> None:
        """Go on with settings that were changed on the way, and keep a record of it."""
        progress = self.progress
        if self.total_steps <= progress.step:
            raise ConfigError(
                f"{self.folder!r} has made all of the {self.total_steps} steps that its settings ask for; give more by "
                "--train.epochs (or a larger --train.max-steps, where it is set)"
            )
        before = self.config.override({one["field"]: one["before"] for one in changes if one["field"] in LENGTH})
        last = before.count_steps(self.batches.num_rows)
        progress.changes += changes
        progress.stopped_early, progress.stale = False, 0
        if last != self.total_steps:
            rate = rate_at(progress.step, self.total_steps, self.config.train)
            self.display.say(
                f"training to step {self.total_steps} instead of {last}: the learning rate follows the longer schedule "
                f"and goes on from {rate:.3g} (it was {rate_at(max(0, progress.step - 1), last, before.train):.3g})"
            )

    # --- the loop -------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end and return the result."""
        progress = self.progress
        self.display.begin(progress.step, self.total_steps)
        if progress.step == 0:
            self.snapshot_keys()
        while progress.step < self.total_steps and not progress.stopped_early:
            epoch, first = divmod(progress.step, self.steps_an_epoch)
            self.clock = time.perf_counter()
            for batch in self.batches.epoch(epoch, first):
                # --- a single training step ---
                result = self.stepper(batch, progress.step)
                # --- what it leaves behind: a GPU is not asked for it until somebody looks ---
                progress.step += 1
                progress.tokens += batch.num_real
                self.pending_metrics.append((result.loss, result.gradient_norm))
                if result.routings:
                    self.epoch_counts += torch.stack([routing.counts for routing in result.routings])
                self.display.advance(progress.step)
                # --- now and then ---
                if self.should_sync(progress.step):
                    self.interrupted = self.group.any(self.interrupts.noted)  # nobody stops alone
                    self.read_pending(result)
                    self.run_periodic(epoch)
                    self.clock = time.perf_counter()
                if progress.stopped_early or progress.step >= self.total_steps:
                    break
        return self.finish()

    def should_sync(self, step: int) -> bool:
        """Whether anything is to be done at this step but learning."""
        config = self.config.train
        periods = (config.log_every, config.snapshot_every, config.sample_every, config.eval_every, config.save_every)
        due = any(every > 0 and step % every == 0 for every in periods)
        ends = step % self.steps_an_epoch == 0 or step == self.total_steps
        # A group looks at the same steps in every process, whichever of them was interrupted.
        asked = self.interrupts.noted and self.group.is_single
        return due or ends or asked or self.machine.device.type == "cpu"

    def read_pending(self, result: StepResult) -> None:
        """Fetch the losses of the steps since the last look; stop at the first that is not a number."""
        progress = self.progress
        first = progress.step - len(self.pending_metrics) + 1
        pairs = [torch.stack((loss.double(), norm.double())) for loss, norm in self.pending_metrics]
        figures = torch.stack(pairs).tolist()
        self.pending_metrics.clear()
        compiled, self.stepper.compile_seconds = self.stepper.compile_seconds, 0.0
        seconds = time.perf_counter() - self.clock - compiled
        progress.compile_seconds += compiled
        progress.seconds += seconds
        self.phases.add("compiling", compiled)
        self.phases.add("steps", seconds)
        for step, (loss, norm) in enumerate(figures, first):
            if not math.isfinite(loss) or not math.isfinite(norm):
                self.write_best()
                self.wait_for_writer()
                raise TrainingStoppedError(self.describe_divergence(loss, norm, step))
            progress.epoch_loss += loss
            progress.epoch_steps += 1
        if progress.step % self.config.train.log_every == 0 or progress.step == self.total_steps:
            self.log(loss, norm, result)

    def run_periodic(self, epoch: int) -> None:
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
            self.save(leaving=True)
            self.wait_for_writer()
            again = f"continue with: {self.folder.resume_command}"
            raise TrainingStoppedError(f"interrupted at step {step}, which is saved; {again}", INTERRUPTED)

    def evaluate(self, epoch: int, ends_epoch: bool) -> None:
        """Measure on valid, remember the best, and close the books of an epoch that ends."""
        progress = self.progress
        found = self.last_valid = self.measure("valid")
        if progress.best_val_loss is None or found.loss < progress.best_val_loss:
            progress.best_val_loss, progress.best_step, progress.stale = found.loss, progress.step, 0
        else:
            progress.stale += 1
            progress.stopped_early = 0 < self.config.train.early_stop <= progress.stale
        now: dict[str, Any] = {"step": progress.step, "epoch": epoch + 1, "tokens": progress.tokens}
        figures = {f"val_{name}" if name.startswith("loss") else name: value for name, value in found.to_dict().items()}
        for layer, usage in zip(self.model.layers, figures.get("layers", ()), strict=True):
            usage["respawns"] = 0 if layer.state is None else int(layer.state.respawns.sum())
        self.record(now | figures)
        self.display.say(describe_evaluation(epoch + 1, progress.step, found.to_dict()))
        if ends_epoch or progress.stopped_early:
            train_loss = progress.epoch_loss / max(1, progress.epoch_steps)
            now = {"epoch": epoch + 1} | now | {"train_loss": train_loss}
            progress.epochs.append(epoch_record(now, found, self.epoch_counts.cpu()))
            progress.epoch_loss, progress.epoch_steps = 0.0, 0
            self.epoch_counts.zero_()

    def measure(self, split: str) -> Evaluation:
        given = self.model, getattr(self.dataset, split), self.config, self.token_bytes, self.machine.device
        with self.phases("evaluation"), self.uncompiled():
            return evaluate(*given, group=self.group, score=self.score)

    def finish(self) -> dict[str, Any]:
        """Report by test, on the checkpoint that valid chose, and write result.json."""
        progress = self.progress
        self.write_best()
        self.wait_for_writer()
        valid, test_last = self.last_valid or self.measure("valid"), self.measure("test")
        test_best = test_last
        best = self.folder.checkpoints / f"step-{progress.best_step}"
        if progress.best_step != progress.step and best.is_dir():
            last = {name: value.clone() for name, value in self.model.state_dict().items()}
            checkpoint.load_model(best, self.model)
            test_best = self.measure("test")
            self.model.load_state_dict(last)
        result = make_result(self.config, self.model, asdict(progress), (valid, test_best, test_last)) | {
            "device": self.group.describe(self.machine.describe()),
            "data_digest": self.dataset.digest,
            "data": self.dataset.describe(),
            "epochs": progress.epochs,
            "changes": progress.changes,
            "phases": self.phases.table(progress.phases),
        }
        if (asked := self.config.train.story_losses) != "none":
            result["stories"] = ({"valid": valid.stories} if asked == "all" else {}) | {"test": test_best.stories}
        if self.group.is_main:
            self.prune(progress.best_step, finished=True)  # a process that died may have left one too many
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
        if config.sample_tokens and self.group.has_model:
            tokenizer, prompt = self.dataset.tokenizer, config.sample_prompt
            seed = derive_key(config.seed, self.progress.step)[0] & 0x7FFFFFFF
            with self.phases("samples"), self.uncompiled(), self.group.one_voice(self.model):
                text = prompt + "".join(stream_text(self.model, tokenizer, prompt, config.sample_tokens, seed=seed))
            self.folder.append("samples.jsonl", {"step": self.progress.step, "text": text})

    def log(self, loss: float, norm: float, result: StepResult) -> None:
        progress, config, routings = self.progress, self.config, result.routings
        step = progress.step - 1  # the one that was taken
        speed = progress.tokens / progress.seconds if progress.seconds else 0.0
        usage = gini(routings[len(routings) // 2].counts) if routings else None  # of this step alone
        record = {
            "step": progress.step,
            "epoch": (progress.step - 1) // self.steps_an_epoch + 1,
            "tokens": progress.tokens,
            "train_loss": loss,
            "gradient_norm": norm,
            "learning_rate": rate_at(step, self.total_steps, config.train),
            "top_k": top_k_at(step, self.total_steps, config.model.top_k, config.train),
            "gini_middle": usage,
            "tokens_per_second": speed,
        }
        self.record(record)
        self.display.show(progress.step, loss, speed, usage)

    def record(self, figures: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl, and to TensorBoard and the like where they are asked for."""
        self.folder.append("metrics.jsonl", figures)
        for sink in self.sinks:
            sink.add(figures)

    def describe_divergence(self, loss: float, norm: float, step: int) -> str:
        what = f"norm of the gradient became {norm}" if math.isfinite(loss) else f"loss became {loss}"
        kept = self.folder.describe_newest("good")
        cure = "lower train.learning_rate" + ("" if self.config.train.clip else " or set train.clip")
        if step == 1:  # before anything was learned, no rate is to blame
            cure = "bring model.embedding_std and the other scales of the model nearer to their defaults"
        return f"the {what} at step {step}; {kept}; {cure}"


def start(
    config: RunConfig,
    folder: RunFolder,
    display: Display,
    init_from: Path | None = None,
    group: ProcessGroup = SINGLE,
    *,
    grown: tuple[SomeLM, dict[str, Any]] | None = None,
) -> Trainer:
    """Begin a new run in an empty folder; init_from is a checkpoint whose weights and keys it starts with.

    grown: a model with branches to start with, and its grown.json; init_from is then its base.
    """
    folder.refuse_if_used()
    model, record = grown or (None, None)
    tokenizer = None if init_from is None else RunFolder(init_from.parent.parent).read_tokenizer()
    if init_from is not None and model is None:
        checkpoint.refuse_other_model(init_from, config)
    trainer = Trainer(config, folder, display, tokenizer, group, model)
    if init_from is not None and model is None:
        checkpoint.load_model(init_from, trainer.model)
    trainer.verify_group()
    with folder.claim(), folder.writing():
        folder.create(trainer.dataset.tokenizer.to_json(), group.describe(trainer.machine.describe()), record)
        if init_from is not None:
            trainer.save(leaving=True)  # a run that dies early begins again with these weights, not with the seed's
        folder.write_config(config)
    return trainer


def resume(
    folder: RunFolder,
    display: Display,
    place: Path | None,
    group: ProcessGroup = SINGLE,
    *,
    config: RunConfig | None = None,
    accepted: Container[str] = (),
) -> Trainer:
    """Continue a run from a checkpoint, or from its beginning where it has none yet.

    config: the run's own with changes that were asked for; accepted: fields that may differ from those that the
    checkpoint was trained with. The folder is changed when everything was found good, and not before.
    """
    with folder.claim():
        with folder.writing(AGAIN):
            folder.carry_out()  # what a process that died had decided
        saved = folder.read_config()
        config = config or saved
        changes = [] if place is None else checkpoint.list_changes(place, config, saved, accepted)
        from some_moe.growth.opening import open_branches  # which opens bases, and so needs what is here

        model = open_branches(folder.path, learns=True)
        if place is not None and model is None:
            checkpoint.refuse_other_model(place, config)
        trainer = Trainer(config, folder, display, folder.read_tokenizer(), group, model)
        state = None if place is None else trainer.restore(place)
        if changes:
            trainer.accept(changes)
        trainer.verify_group()
        anew = state | trainer.describe_state() if state and changes else None
        with folder.writing(AGAIN):
            folder.rewind(-1 if place is None else trainer.progress.step, None if config == saved else config, anew)
    return trainer


def train(trainer: Trainer) -> dict[str, Any]:
    """Run to the end. A disk that is full, or a process that is gone, ends it with a sentence, the checkpoint whole."""
    folder = trainer.folder
    with trainer.interrupts:
        try:
            with trainer.display, trainer.group.in_touch():
                return trainer.run()
        except ProcessGroupError as error:
            kept = folder.describe_newest("whole")
            raise ProcessGroupError(f"{error}; {kept}; continue with --resume auto") from None
        except KeyboardInterrupt:
            raise TrainingStoppedError(
                f"stopped at once, at step {trainer.progress.step}; {folder.describe_newest('whole')}; continue with: "
                + folder.resume_command,
                INTERRUPTED,
            ) from None
        except OSError as error:
            if not folder.path.is_dir():
                raise TrainingStoppedError(
                    f"the run folder {folder!r} is gone: it was moved or removed while it was trained in; put it back, "
                    "or continue where it is now with --resume FOLDER"
                ) from None
            raise TrainingStoppedError(
                f"cannot write to {folder} ({error.strerror or error}); {folder.describe_newest('whole')}; make room "
                "and continue with --resume auto"
            ) from None
        finally:
            for sink in trainer.sinks:
                sink.close()
            folder.release()

"""`some_moe.train`: all that `some train` does, from Python."""

from pathlib import Path
from typing import TYPE_CHECKING

from some_moe.config import ConfigError, RunConfig
from some_moe.training.run_folder import ReadOnlyFolder, RunFolder, find_checkpoint, find_run
from some_moe.training.runs import Run

if TYPE_CHECKING:
    from some_moe.parallel.process_group import ProcessGroup
    from some_moe.sinks.display import Display
    from some_moe.training.loop import Trainer

AUTO = "auto"


def train(
    config: RunConfig | str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    init_from: str | Path | None = None,
    display: "Display | bool" = True,
) -> Run:
    """Train a model in a run folder to the end, and return the run; an interrupted one raises TrainingStoppedError.

    config: settings, the name of a preset or registered experiment, or a config.yaml; None: those of the resumed run.
    out: the run folder (runs/NAME). resume: "auto" continues the run in `out` or begins it; or a run folder or
    checkpoint to continue. init_from: a run or checkpoint whose weights and keys to begin with. display: True chooses
    what suits the terminal, False says nothing.
    """
    from some_moe.parallel.process_group import ProcessGroup
    from some_moe.sinks.display import Display, choose_display

    if isinstance(config, str | Path):
        config = find_config(config)
    if not isinstance(display, Display):
        display = choose_display() if display else Display()
    with ProcessGroup.from_environment() as group:
        folder, place = find_folder(out, config, resume)
        if not group.is_main:
            folder, display = ReadOnlyFolder(folder.path), Display()
        if resume is not None and folder.exists():
            return _resume(folder, place, config, init_from, display, group)
        if config is None:
            raise ConfigError("a new run needs a config; give a RunConfig, a preset such as demo, or a config.yaml")
        return _start(folder, config, init_from, display, group)


def find_config(config: str | Path) -> RunConfig:
    """A preset or registered experiment by name, or a config.yaml."""
    if isinstance(config, Path) or config.endswith((".yaml", ".yml")):
        return RunConfig.load(config)
    from some_moe.lab.registry.presets import find_preset

    return find_preset(config)


def find_folder(
    out: str | Path | None, config: RunConfig | None, resume: str | Path | None
) -> tuple[RunFolder, Path | None]:
    """Where a run is or will be, and the checkpoint to resume where that was named."""
    if out == "":
        raise ConfigError("--out is empty; give a folder, or leave it out")
    if resume is not None and resume != AUTO:
        return find_run(resume)
    return RunFolder(out or f"runs/{(config or RunConfig()).name}"), None


def _start(
    folder: RunFolder, config: RunConfig, init_from: str | Path | None, display: "Display", group: "ProcessGroup"
) -> Run:
    from some_moe.training.loop import start
    from some_moe.training.machine import settle_experts

    config = settle_experts(config)
    source = None if init_from is None else find_checkpoint(init_from)
    with group.setting_up():
        trainer = start(config, folder, display, source, group)
    return _finish(trainer)


def _resume(
    folder: RunFolder,
    place: Path | None,
    config: RunConfig | None,
    init_from: str | Path | None,
    display: "Display",
    group: "ProcessGroup",
) -> Run:
    from some_moe.training.loop import resume

    if init_from is not None:
        raise ConfigError(
            f"--init-from {init_from} begins a run, but {str(folder)!r} has begun already; leave it out to resume "
            "that run, or choose another --out"
        )
    saved = folder.read_config()
    if config is not None:
        refuse_other_config(folder, saved, config)
    finished = folder.read_result()
    if finished is not None and place is None:
        display.say(f"{folder} is finished already")
        return Run(folder.path, saved, result=finished)
    with group.setting_up():
        trainer = resume(folder, display, place or folder.newest_checkpoint(), group)
    display.say(f"resuming {folder} at step {trainer.progress.step} of {trainer.total_steps}")
    return _finish(trainer)


def refuse_other_config(folder: RunFolder, saved: RunConfig, asked: RunConfig) -> None:
    """A resumed run keeps its config: name what is asked for otherwise."""
    from some_moe.lab.jobs import list_differences

    differing = list_differences(saved, asked)
    if differing:
        raise ConfigError(
            f"{str(folder)!r} was started with another config: {', '.join(differing)}; resume it without these "
            "settings, or begin a new run with its weights by --init-from"
        )


def _finish(trainer: "Trainer") -> Run:
    """Say what is trained on what, and train to the end."""
    from some_moe.training.loop import train

    data, display = trainer.dataset, trainer.display
    device = trainer.group.describe(trainer.machine.describe())
    trainable, total = trainer.model.count_parameters()
    ids = len(data.train.ids)
    display.say(
        f"{len(data.train):,} training stories, {ids:,} tokens, vocabulary {data.tokenizer.vocab_size:,}; "
        f"{trainable:,} parameters trained of {total:,}; {trainer.total_steps:,} steps on {device}"
    )
    if data.duplicates:
        display.say(f"{data.duplicates:,} repeated stories were left out")
    if data.train.num_cut:
        share = data.train.num_cut / (ids + data.train.num_cut)
        display.say(
            f"{share:.1%} of the training tokens lie beyond seq_len {trainer.config.data.seq_len} and are cut off"
        )
    result = train(trainer)
    return Run(trainer.folder.path, trainer.config, result=result)

"""`some_moe.train`: all that `some train` does, from Python."""

from pathlib import Path

from some_moe.config import ConfigError, RunConfig
from some_moe.config.run import LENGTH
from some_moe.data.dataset import settle_data
from some_moe.errors import in_a_sentence
from some_moe.lab.jobs import list_differences
from some_moe.lab.registry.presets import find_preset
from some_moe.memory import refuse_too_large
from some_moe.parallel.process_group import ProcessGroup
from some_moe.sinks.display import Display
from some_moe.training import loop
from some_moe.training.machine import choose_machine, settle_experts
from some_moe.training.run_folder import ReadOnlyFolder, RunFolder, find_checkpoint, find_run
from some_moe.training.runs import Run

WORTH_A_CURE = 0.05  # share of the tokens that are cut off


@in_a_sentence()
def train(
    config: RunConfig | str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    init_from: str | Path | None = None,
    accept_changes: bool = False,
    display: Display | bool = True,
) -> Run:
    """Train a model in a run folder to the end, and return the run; an interrupted one raises TrainingStoppedError.

    config: settings, the name of a preset or registered experiment, or a config.yaml; None: those of the resumed run.
    out: the run folder (runs/NAME). resume: "auto" continues the run in `out` or begins it; or a run folder or
    checkpoint to continue; more epochs or steps than it was to make let it train longer. init_from: a run or checkpoint
    whose weights and keys to begin with. accept_changes: continue with settings that differ from those it was trained
    with; the result then lists them. display: True chooses what suits the terminal, False says nothing.
    """
    if isinstance(config, Path) or (isinstance(config, str) and config.endswith((".yaml", ".yml"))):
        config = RunConfig.load(config)
    elif isinstance(config, str):
        config = find_preset(config)
    if isinstance(display, bool):
        display = Display(speaks=display)
    with ProcessGroup.from_environment() as group:
        folder, place = find_folder(out, config, resume)
        if not group.is_main:
            folder, display = ReadOnlyFolder(folder.path), Display()
        if resume is None or not folder.exists():
            if config is None:
                raise ConfigError("a new run needs a config; give a RunConfig, a preset such as demo, or a config.yaml")
            config = settle_data(settle_experts(config))
            device, shares = choose_machine(config.train, group).device, group.count_shares(config)
            refuse_too_large(config, device, training=True, shares=shares)
            source = None if init_from is None else find_checkpoint(init_from)
            with group.setting_up():
                trainer = loop.start(config, folder, display, source, group)
            return _finish(trainer)
        if init_from is not None:
            raise ConfigError(
                f"--init-from {init_from} begins a run, but {str(folder)!r} has begun already; leave it out to resume "
                "that run, or choose another --out"
            )
        saved = folder.read_config()
        config = (config or saved).settle_as(saved)
        asked = config.differences(saved.flatten())
        lengths = LENGTH & asked.keys()
        longer = lengths if any(is_more(*asked[name]) for name in lengths) else frozenset()
        if not accept_changes and asked.keys() - longer:
            differing = ", ".join(list_differences(saved, config))
            raise ConfigError(
                f"{str(folder)!r} was started with another config: {differing}; resume it without these settings, add "
                "--accept-changes, or begin a new run with its weights by --init-from"
            )
        finished = folder.read_result()
        if finished is not None and place is None and not asked:
            folder.tidy()
            display.say(f"{folder} is finished already")
            return Run(folder.path, saved, result=finished)
        accepted = RunConfig.field_names() if accept_changes else longer
        with group.setting_up():
            place = place or folder.newest_checkpoint()
            trainer = loop.resume(folder, display, place, group, config=config, accepted=accepted)
        display.say(f"resuming {folder} at step {trainer.progress.step} of {trainer.total_steps}")
        return _finish(trainer)


def is_more(before: int | None, now: int | None) -> bool:
    """Whether a limit has risen; None is no limit."""
    return before is not None and (now is None or now > before)


def find_folder(
    out: str | Path | None, config: RunConfig | None, resume: str | Path | None
) -> tuple[RunFolder, Path | None]:
    """Where a run is or will be, and the checkpoint to resume where that was named."""
    if out == "":
        raise ConfigError("--out is empty; give a folder, or leave it out")
    if resume is not None and resume != "auto":
        return find_run(resume)
    return RunFolder(out or f"runs/{(config or RunConfig()).name}"), None


def _finish(trainer: loop.Trainer) -> Run:
    """Say what is trained on what, and train to the end."""
    data, display = trainer.dataset, trainer.display
    device = trainer.group.describe(trainer.machine.describe())
    trainable, total = trainer.model.count_parameters()
    ids, cut, stories, rows = len(data.train.ids), data.train.num_cut, data.train.num_stories, len(data.train)
    in_rows = f" in {rows:,} rows" if rows > stories else ""
    display.say(
        f"{stories:,} training stories{in_rows}, {ids:,} tokens, vocabulary {data.tokenizer.vocab_size:,}; "
        f"{trainable:,} parameters trained of {total:,}; {trainer.total_steps:,} steps on {device}"
    )
    if data.duplicates:
        display.say(f"{data.duplicates:,} repeated stories were left out")
    if data.unused:
        of_all = f"{stories:,} of {stories + data.unused:,} training stories"
        display.say(f"{of_all} are used (data.train_subset_size; null takes all)")
    if cut:
        lost, seq_len = cut / (ids + cut), trainer.config.data.seq_len
        cure = "; --data.long split makes rows of them" if lost > WORTH_A_CURE else ""
        display.say(f"{lost:.1%} of the training tokens lie beyond seq_len {seq_len} and are cut off{cure}")
    return Run(trainer.folder.path, trainer.config, result=loop.train(trainer))

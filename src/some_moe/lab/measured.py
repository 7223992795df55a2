"""results/NAME-seedS.json: a measured run as it travels, with all that is needed to judge and repeat it."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError
from some_moe.environment import describe_program
from some_moe.lab.jobs import Job, hide_place
from some_moe.lab.scaling import Schedule
from some_moe.system.files import write_whole
from some_moe.system.reading import read_object
from some_moe.training.run_folder import RunFolder, drop_nan, read_log

Record = dict[str, Any]
LOSSES = ("val_loss", "val_loss_on_padding", "val_loss_padded", "perplexity", "bits_per_byte")
NUMBERS = re.compile(r"\[([-+.,\de\s]+)\]")  # a list of them takes one line
USAGE = ("gini", "entropy_bits", "experts_used")  # of the middle layer, as the reports print it


def write_record(path: Path, job: Job, folder: RunFolder, *, at_once: int | None = None) -> None:
    """Write the record of a finished run. at_once: how many shared its machine, where that is known."""
    try:
        record = drop_nan(make_record(job, folder) | {"at_once": at_once})
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        cure = "restore its files, or move it away to run it again"
        raise ConfigError(f"{str(folder)!r} is damaged: its figures are not whole ({error!r}); {cure}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    write_whole(path, NUMBERS.sub(lambda found: "[" + re.sub(r"\s+", "", found[1]) + "]", text) + "\n")


def refuse_other_record(path: Path, job: Job, folder: RunFolder) -> None:
    """A record made with other data or settings is never written over; one of the same command and data is."""
    if not path.exists():
        return
    try:
        record = read_object(path)
        made_by, digest = record["command"], record.get("data_digest")
    except (OSError, ConfigError, KeyError):
        made_by, digest = "something else", None
    if made_by == job.command:
        # Absolute paths are cut from commands, and files change: only the digest tells the data apart. A finished run
        # has recorded it, unless it is an old one; for an unfinished one the data is read.
        if digest is None:
            return
        result, data, vocab_size = folder.read_result(), job.config.data, job.config.model.vocab_size
        from some_moe.data.dataset import prepare  # which loads torch, for seconds

        found = prepare(data, vocab_size).digest if result is None else result.get("data_digest")
        if found in (digest, None):
            return
        made_by = f"other data called {hide_place(data.source)!r}"
    raise ConfigError(f"{str(path)!r} is of {made_by}; choose another folder with --results")


def make_record(job: Job, folder: RunFolder) -> Record:
    """Everything in result.json, and where it comes from. No absolute paths."""
    result = folder.read_result()
    assert result is not None, f"{folder} is not finished"
    program = folder.read_object("env.json") or describe_program()  # a run killed when it began has none
    log = read_log(folder.path / "metrics.jsonl")
    finished = datetime.fromtimestamp(folder.result_file.stat().st_mtime, UTC)
    return result | {
        "experiment": job.experiment.name,
        "seed": job.seed,
        "command": job.command,
        "overrides": {name: hide_place(value) for name, value in job.overrides.items()},
        "commit": program["commit"],
        "versions": {name: program[name] for name in ("python", "torch", "some_moe")},
        "date": finished.isoformat(timespec="seconds"),
        "source": hide_place(job.config.data.source),
        # A run from before data was described knows how much there was.
        "data": result.get("data") or {"documents": job.schedule.stories._asdict()},
        "published_steps": job.experiment.steps,
        "epochs_scaled": job.schedule.describe_scaling(),
        "published_epochs": list_published_epochs(job.schedule, result, log),
        "max_gradient_norm": max((line["gradient_norm"] for line in log if "gradient_norm" in line), default=None),
    }


def list_published_epochs(schedule: Schedule, result: Record, log: list[Record]) -> list[Record]:
    """One row an epoch of the config that was asked for, from the evaluation made at its last step.

    `train_loss` is the mean over the epoch's steps; over its logged ones where the data's epochs end elsewhere.
    `train_loss_steps` says how many steps that is.
    """
    evaluations = {line["step"]: line for line in log if "val_loss" in line}
    whole_epochs = {epoch["step"]: epoch for epoch in result["epochs"]}
    ends = [step for step in schedule.epoch_ends or whole_epochs if step <= result["steps"]]
    if ends[-1:] != [result["steps"]]:  # stopped early
        ends.append(result["steps"])
    rows = []
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
        found = evaluations[end]
        middle = found["layers"][result["middle_layer"]] if found["layers"] else {}
        if schedule.scaled:
            losses = [line["train_loss"] for line in log if "train_loss" in line and start < line["step"] <= end]
            train_loss, averaged = sum(losses) / len(losses) if losses else None, len(losses)
        else:
            train_loss, averaged = whole_epochs[end]["train_loss"], end - start
        rows.append(
            {"epoch": number, "step": end, "tokens": found["tokens"]}
            | {"train_loss": train_loss, "train_loss_steps": averaged}
            | {name: found[name] for name in LOSSES}
            | {name: middle.get(name) for name in USAGE}
            | {name: middle[name] for name in ("gini_real", "entropy_bits_real") if name in middle}
        )
    return rows

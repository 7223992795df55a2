"""The run folder: what a run writes, how it stays whole whenever the process dies, and how it is read again.

config.yaml, env.json, tokenizer.json, metrics.jsonl, samples.jsonl, keys/step-N.safetensors,
checkpoints/step-N/, result.json. All but the two logs are written whole and renamed into place. A run has begun
when config.yaml is there, which comes after all that a first step needs. One process at a time trains in a folder;
anybody may read it, in whatever state it was left, and without torch.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from some_moe.config import FORMAT_VERSION, ConfigError, RunConfig
from some_moe.errors import MACHINE, FailureError, SomeError
from some_moe.system.files import clear_scratch, inside, remove_whole, write_tensors, write_whole
from some_moe.system.processes import quote_command, take_lock
from some_moe.system.reading import read_object, refuse_irregular
from some_moe.system.records import WHOLE_RESULT, cut_log, drop_nan, read_log, read_record

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from torch import Tensor

    from some_moe.data.tokenizer import Tokenizer

__all__ = ["RunFolder", "drop_nan", "find_checkpoint", "find_run", "list_steps", "read_log"]
LOGS = ("metrics.jsonl", "samples.jsonl")
LOCK = ".run.lock"
DECISION = ".resume.json"
BEFORE_CONFIG = {LOCK, "tokenizer.json", "env.json", "grown.json", "checkpoints"}  # what is made before config.yaml
OWNED = {
    *LOGS,
    DECISION,
    "config.yaml",
    "tokenizer.json",
    "env.json",
    "grown.json",
    "result.json",
    "tracking-id",
}  # written by training
CURE = "remove that folder to use the checkpoint before it, or restore it"


class RunFolder:
    """One run on disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file, self.result_file = self.path / "config.yaml", self.path / "result.json"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.checkpoints, self.snapshots = self.path / "checkpoints", self.path / "keys"
        self.lock: BaseFileLock | None = None  # while this process trains here

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return repr(str(self.path))

    # --- reading --------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        return self.config_file.is_file()

    def read_config(self) -> RunConfig:
        if not self.exists():
            raise ConfigError(f"{self!r} is not a run: it has no config.yaml; give a folder made by `some train`")
        decided = self.read_decision()
        if decided is not None and decided["config"] is not None:
            return RunConfig.from_yaml(decided["config"])
        return RunConfig.load(inside(self.path, "config.yaml"))

    def read_tokenizer(self) -> "Tokenizer":
        if not self.tokenizer_file.is_file():
            raise ConfigError(f"the run {self!r} has no tokenizer.json; restore it, or give another run")
        from some_moe.data.tokenizer import Tokenizer

        return Tokenizer.load(inside(self.path, "tokenizer.json"))

    def read_object(self, name: str, needed: tuple[str, ...] = ()) -> dict[str, Any] | None:
        """result.json or env.json; None where it is missing. needed: fields that must be there."""
        path = self.path / name
        return read_record(path, "restore it, or remove it and resume the run", needed) if path.exists() else None

    def read_result(self) -> dict[str, Any] | None:
        """The figures of a finished run, none missing; None where it has not finished."""
        return None if self.read_decision() else self.read_object("result.json", WHOLE_RESULT)

    def read_decision(self) -> dict[str, Any] | None:
        """What `rewind` has decided and a process that died has not carried out."""
        path = self.path / DECISION
        return read_record(path, "remove it to go on with what is there") if path.exists() else None

    def list_checkpoints(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        decided = self.read_decision()
        found = list_steps(self.checkpoints).items()
        return [place for step, place in found if decided is None or step <= decided["step"]]

    def newest_checkpoint(self) -> Path | None:
        return next(reversed(self.list_checkpoints()), None)

    def describe_newest(self, quality: str) -> str:
        """Say which checkpoint a run that has stopped can go on from."""
        newest = self.newest_checkpoint()
        return f"the last {quality} checkpoint is {newest}" if newest else "no checkpoint had been saved yet"

    @property
    def resume_command(self) -> str:
        """What to type to go on."""
        return quote_command(["some", "train", "--out", str(self), "--resume", "auto"])

    def choose_checkpoint(self, which: str) -> Path:
        """Find the checkpoint called best, last or step-N."""
        found = {place.name: place for place in self.list_checkpoints()}
        if not found:
            raise ConfigError(f"{self!r} has no checkpoint yet; wait for its first one, or train it")
        newest = next(reversed(found.values()))
        if which == "last":
            return newest
        if which == "best":
            return found.get(f"step-{read_state_file(newest)['best_step']}", newest)
        if which not in found:
            raise ConfigError(f"{self!r} has no checkpoint {which!r}; it has {', '.join(found)} (or say best or last)")
        return found[which]

    # --- writing --------------------------------------------------------------------------------------------

    def is_free(self) -> bool:
        """Whether a run can begin here: nothing is there, but for what a start that was killed has left."""
        if not self.path.is_dir():
            return not self.path.exists()
        names = {file.name for file in self.path.iterdir()}
        left_over = LOCK in names and all(name in BEFORE_CONFIG or name.endswith(".tmp") for name in names)
        return left_over or not names

    def refuse_if_used(self) -> None:
        """A folder with something in it is never written over."""
        if self.path.is_file():
            raise ConfigError(f"the output folder {self!r} is a file; choose another with --out")
        if not self.is_free():
            raise ConfigError(
                f"the output folder {self!r} is not empty; continue it with --resume auto, or choose another with --out"
            )

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Keep other processes out from here on, until `release`, the end of this process, or an error within."""
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            cure = "wait for it to end, or choose another folder with --out"
            self.lock = take_lock(inside(self.path, LOCK), f"another process is training in {self!r}; {cure}")
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let other processes train here."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    @contextmanager
    def writing(self, cure: str = "choose another with --out") -> Iterator[None]:
        """Turn what the disk refuses before the first step into a sentence."""
        try:
            yield
        except OSError as error:
            kind = FailureError if error.errno in MACHINE else ConfigError
            raise kind(f"the output folder {self!r} cannot be written ({error.strerror or error}); {cure}") from None

    def create(self, tokenizer_json: str, device: str, grown: dict[str, Any] | None = None) -> None:
        """Write what comes before config.yaml into a folder that was claimed; grown: what it takes from its base."""
        from some_moe.environment import command_line, describe_environment

        self.refuse_if_used()  # another process may have begun here since the first look
        self.cut_back(-1)
        self.clear_left_overs()
        write_whole(self.tokenizer_file, tokenizer_json)
        write_whole(self.path / "env.json", json.dumps(describe_environment(command_line(), device), indent=1))
        if grown is not None:
            write_whole(self.path / "grown.json", json.dumps(grown, indent=1))

    def write_config(self, config: RunConfig) -> None:
        """Let the run have begun: from here on it can be resumed."""
        config.save(self.config_file)

    def append(self, log: str, record: dict[str, Any]) -> None:
        """Add one line to a log and hand it to the system at once."""
        with inside(self.path, log).open("a", encoding="utf-8") as file:
            file.write(json.dumps(drop_nan(record)) + "\n")
            file.flush()

    def rewind(self, step: int, config: RunConfig | None = None, state: dict[str, Any] | None = None) -> None:
        """Drop what the folder says of later steps, for they will be made again; write config and state anew.

        All of it is decided by one rename: a process that dies leaves what was, or what the next one carries out.
        """
        for name in OWNED:  # what cannot be written is refused now, not on the way
            if inside(self.path, name).exists():
                refuse_irregular(self.path / name)
        for log in LOGS:
            read_log(self.path / log)
        self.list_later(step)
        text = None if config is None else config.to_yaml()
        write_whole(self.path / DECISION, json.dumps({"step": step, "config": text, "state": state}))
        self.carry_out()

    def carry_out(self) -> None:
        """Do what was decided, from wherever a process that died has left it."""
        decided = self.read_decision()
        if decided is None:
            return
        self.cut_back(decided["step"])
        if decided["state"] is not None:
            place = inside(self.path, f"checkpoints/step-{decided['step']}/state.json")
            write_whole(place, json.dumps(decided["state"], indent=1))
        if decided["config"] is not None:
            write_whole(self.config_file, decided["config"])
        self.clear_left_overs()
        (self.path / DECISION).unlink()

    def cut_back(self, step: int) -> None:
        """Drop what the folder says of later steps."""
        self.result_file.unlink(missing_ok=True)
        for place in self.list_later(step):
            remove_whole(place)
        for log in LOGS:
            cut_log(self.path / log, step)

    def list_later(self, step: int) -> list[Path]:
        """The checkpoints, newest first, and the key snapshots of later steps."""
        found = [*reversed(list_steps(self.checkpoints).items()), *list_steps(self.snapshots, ".safetensors").items()]
        return [place for at, place in found if at > step]

    def clear_left_overs(self) -> None:
        """Remove what killed processes have left half-written; only with the folder claimed."""
        clear_scratch(self.path, owned=OWNED.__contains__)
        for folder in (self.checkpoints, self.snapshots):
            clear_scratch(folder, owned=lambda _: True)

    def tidy(self) -> None:
        """Clear what was left in a run that is finished, unless somebody trains here or it cannot be written."""
        places = (self.path, self.checkpoints, self.snapshots)
        if any(True for folder in places for _ in folder.glob(".*.tmp")):
            with suppress(SomeError), self.claim():
                self.clear_left_overs()
                self.release()

    def save_keys(self, step: int, keys: "dict[str, Tensor]") -> None:
        self.snapshots.mkdir(exist_ok=True)
        write_tensors(inside(self.path, f"keys/step-{step}.safetensors"), keys)

    def write_result(self, result: dict[str, Any]) -> None:
        write_whole(inside(self.path, "result.json"), json.dumps(drop_nan(result), indent=1))


class ReadOnlyFolder(RunFolder):
    """The run folder for all processes but the main one: they read, and what they write is dropped."""

    @contextmanager
    def claim(self) -> Iterator[None]:
        yield

    def write_nothing(self, *arguments: Any, **named: Any) -> None:
        pass

    create = write_config = append = rewind = carry_out = tidy = save_keys = write_result = write_nothing


def find_run(path: str | Path) -> tuple[RunFolder, Path | None]:
    """What to resume: a run folder, and its checkpoint where `path` is one."""
    path = Path(path)
    is_checkpoint = (path / "state.json").is_file()
    folder = RunFolder(path.parent.parent if is_checkpoint else path)
    folder.read_config()  # refuses what is no run
    return folder, path if is_checkpoint else None


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint folder, or the best checkpoint of a run folder."""
    if (Path(path) / "state.json").is_file():
        return Path(path)
    return find_run(path)[0].choose_checkpoint("best")


def list_steps(folder: Path, suffix: str = "") -> dict[int, Path]:
    """What is called step-N in a folder of a run, by step, oldest first; refused where it leads out of the run."""
    if not os.path.lexists(folder):
        return {}
    if not inside(folder.parent, folder.name).is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder; a run needs one there, so remove it")
    pattern = re.compile(r"step-(0|[1-9]\d{0,17})" + re.escape(suffix))
    steps = sorted(int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name)))
    return {step: inside(folder.parent, f"{folder.name}/step-{step}{suffix}") for step in steps}


def read_state_file(place: Path) -> dict[str, Any]:
    """Read a checkpoint's state.json; `checkpoint.read_state` verifies the files that it vouches for, too."""
    whole, path = f"{str(place)!r} is not a whole checkpoint", inside(place, "state.json")
    if not path.exists():
        raise ConfigError(f"{whole}: state.json is missing; {CURE}")
    version = read_object(path, CURE).get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ConfigError(
            f"{str(place)!r} has format version {version}, newer than this program's {FORMAT_VERSION}; update some-moe"
        )
    state = read_record(path, CURE)
    if place.name.startswith("step-") and place.name != f"step-{state['step']}":
        raise ConfigError(f"{whole} of its step: its state.json says step {state['step']}; {CURE}")
    return state

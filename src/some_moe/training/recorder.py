"""The run folder: what a run writes, and how it stays whole whenever the process dies.

config.yaml, env.json, tokenizer.json, metrics.jsonl, samples.jsonl, keys/step-N.safetensors,
checkpoints/step-N/, result.json. All but the two logs are written whole and renamed into place. A run has begun
when config.yaml is there, which comes after all that a first step needs. One process at a time trains in a folder.
"""

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import some_moe
from some_moe.config import ConfigError, RunConfig
from some_moe.data.tokenizer import Tokenizer
from some_moe.files import write_whole
from some_moe.training.checkpoint import list_checkpoints, write_tensors
from some_moe.training.lock import take_lock

LOGS = ("metrics.jsonl", "samples.jsonl")
LOCK = ".run.lock"
BEFORE_CONFIG = {LOCK, "tokenizer.json", "env.json", "checkpoints"}  # what is made before config.yaml


class RunFolder:
    """One run on disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lock: int | None = None  # descriptor of the lock file, while this process trains here

    def __str__(self) -> str:
        return str(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    def exists(self) -> bool:
        return self.config_file.is_file()

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
            raise ConfigError(f"the output folder {str(self.path)!r} is a file; choose another with --out")
        if not self.is_free():
            raise ConfigError(
                f"the output folder {str(self.path)!r} is not empty; continue it with --resume auto, or choose another "
                "with --out"
            )

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Keep other processes out from here on, until `release`, the end of this process, or an error within."""
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = take_lock(
                self.path / LOCK,
                f"another process is training in {str(self.path)!r}; wait for it to end, or choose another folder "
                "with --out",
            )
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let other processes train here."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what the disk refuses before the first step into a sentence."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the output folder {str(self.path)!r} cannot be written ({error.strerror or error}); choose another "
                "with --out"
            ) from None

    def create(self, tokenizer_json: str, command: str, device: str) -> None:
        """Write what comes before config.yaml into a folder that was claimed."""
        self.refuse_if_used()  # another process may have begun here since the first look
        self.cut_back(-1)
        write_whole(self.tokenizer_file, tokenizer_json)
        write_whole(self.path / "env.json", json.dumps(describe_environment(command, device), indent=1))

    def write_config(self, config: RunConfig) -> None:
        """Let the run have begun: from here on it can be resumed."""
        config.save(self.config_file)

    def read_config(self) -> RunConfig:
        if not self.exists():
            raise ConfigError(
                f"{str(self.path)!r} is not a run: it has no config.yaml; give a folder made by `some train`"
            )
        return RunConfig.load(self.config_file)

    def read_tokenizer(self) -> Tokenizer:
        if not self.tokenizer_file.is_file():
            raise ConfigError(f"the run {str(self.path)!r} has no tokenizer.json; restore it, or give another run")
        return Tokenizer.load(self.tokenizer_file)

    def append(self, log: str, record: dict[str, Any]) -> None:
        """Add one line to a log and hand it to the system at once."""
        with (self.path / log).open("a", encoding="utf-8") as file:
            file.write(json.dumps(drop_nan(record)) + "\n")
            file.flush()

    def cut_back(self, step: int) -> None:
        """Drop what the folder says of later steps, for they will be made again."""
        self.result_file.unlink(missing_ok=True)
        for place in list_checkpoints(self.checkpoints):
            if int(place.name.removeprefix("step-")) > step:
                shutil.rmtree(place)
        for log in LOGS:
            path = self.path / log
            if path.is_file():
                kept = [record for record in read_log(path) if record["step"] <= step]
                write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
        for snapshot in (self.path / "keys").glob("step-*.safetensors"):
            if int(snapshot.stem.removeprefix("step-")) > step:
                snapshot.unlink()

    def save_keys(self, step: int, keys: dict[str, Tensor]) -> None:
        (self.path / "keys").mkdir(exist_ok=True)
        write_tensors(self.path / "keys" / f"step-{step}.safetensors", keys)

    def write_result(self, result: dict[str, Any]) -> None:
        write_whole(self.result_file, json.dumps(drop_nan(result), indent=1))

    def read_result(self) -> dict[str, Any] | None:
        if not self.result_file.is_file():
            return None
        result: dict[str, Any] = json.loads(self.result_file.read_text(encoding="utf-8"))
        return result

    def newest_checkpoint(self) -> Path | None:
        found = list_checkpoints(self.checkpoints)
        return found[-1] if found else None

    def describe_newest(self, quality: str) -> str:
        """Say which checkpoint a run that has stopped can go on from."""
        newest = self.newest_checkpoint()
        return f"the last {quality} checkpoint is {newest}" if newest else "no checkpoint had been saved yet"


class ReadOnlyFolder(RunFolder):
    """The run folder for the processes of a team that do not lead it: they read, and what they write is dropped."""

    @contextmanager
    def claim(self) -> Iterator[None]:
        yield

    def create(self, tokenizer_json: str, command: str, device: str) -> None:
        pass

    def write_config(self, config: RunConfig) -> None:
        pass

    def append(self, log: str, record: dict[str, Any]) -> None:
        pass

    def cut_back(self, step: int) -> None:
        pass

    def save_keys(self, step: int, keys: dict[str, Tensor]) -> None:
        pass

    def write_result(self, result: dict[str, Any]) -> None:
        pass


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read a .jsonl log; a last line that a killed process left unfinished is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def drop_nan(value: Any) -> Any:
    """Turn NaN and infinities into null: JSON has no word for them."""
    if isinstance(value, dict):
        return {name: drop_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [drop_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_program() -> dict[str, Any]:
    """What runs, wherever it does."""
    return {
        "some_moe": some_moe.__version__,
        "commit": _git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def describe_environment(command: str, device: str) -> dict[str, Any]:
    """What a reader needs to repeat a run elsewhere; device: the one that computes, in words."""
    return describe_program() | {
        "platform": platform.platform(),
        "device": device,
        "cpu_threads": torch.get_num_threads(),
        "command": command,
    }


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _git_commit() -> str | None:
    """The commit of the source that runs, with + where it has changes; None outside a checkout."""
    here = Path(__file__).parents[1]
    try:
        # Installed inside another project's repository, it is no file of that project's commits.
        subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "."], cwd=here, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.returncode else "")


def command_line() -> str:
    """The command as it was typed, without the path to its interpreter."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])

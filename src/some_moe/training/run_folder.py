"""The run folder: what a run writes, how it stays whole whenever the process dies, and how it is read again.

config.yaml, env.json, tokenizer.json, metrics.jsonl, samples.jsonl, keys/step-N.safetensors,
checkpoints/step-N/, result.json. All but the two logs are written whole and renamed into place. A run has begun
when config.yaml is there, which comes after all that a first step needs. One process at a time trains in a folder;
anybody may read it, in whatever state it was left, and without torch.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from some_moe.config import FORMAT_VERSION, ConfigError, RunConfig
from some_moe.files import write_whole
from some_moe.processes import take_lock

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from torch import Tensor

    from some_moe.data.tokenizer import Tokenizer

LOGS = ("metrics.jsonl", "samples.jsonl")
LOCK = ".run.lock"
BEFORE_CONFIG = {LOCK, "tokenizer.json", "env.json", "checkpoints"}  # what is made before config.yaml
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
        return RunConfig.load(self.config_file)

    def read_tokenizer(self) -> "Tokenizer":
        if not self.tokenizer_file.is_file():
            raise ConfigError(f"the run {self!r} has no tokenizer.json; restore it, or give another run")
        from some_moe.data.tokenizer import Tokenizer

        return Tokenizer.load(self.tokenizer_file)

    def read_object(self, name: str) -> dict[str, Any] | None:
        """result.json or env.json; None where it is missing."""
        path = self.path / name
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ConfigError(f"{str(path)!r} is damaged; restore it, or remove it and resume the run")
        return found

    def read_result(self) -> dict[str, Any] | None:
        return self.read_object("result.json")

    def newest_checkpoint(self) -> Path | None:
        found = list_checkpoints(self.checkpoints)
        return found[-1] if found else None

    def describe_newest(self, quality: str) -> str:
        """Say which checkpoint a run that has stopped can go on from."""
        newest = self.newest_checkpoint()
        return f"the last {quality} checkpoint is {newest}" if newest else "no checkpoint had been saved yet"

    def choose_checkpoint(self, which: str) -> Path:
        """Find the checkpoint called best, last or step-N."""
        found = {place.name: place for place in list_checkpoints(self.checkpoints)}
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
            self.lock = take_lock(self.path / LOCK, f"another process is training in {self!r}; {cure}")
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
    def writing(self) -> Iterator[None]:
        """Turn what the disk refuses before the first step into a sentence."""
        try:
            yield
        except OSError as error:
            sentence = f"the output folder {self!r} cannot be written ({error.strerror or error})"
            raise ConfigError(f"{sentence}; choose another with --out") from None

    def create(self, tokenizer_json: str, device: str) -> None:
        """Write what comes before config.yaml into a folder that was claimed."""
        from some_moe.training.environment import command_line, describe_environment

        self.refuse_if_used()  # another process may have begun here since the first look
        self.cut_back(-1)
        write_whole(self.tokenizer_file, tokenizer_json)
        write_whole(self.path / "env.json", json.dumps(describe_environment(command_line(), device), indent=1))

    def write_config(self, config: RunConfig) -> None:
        """Let the run have begun: from here on it can be resumed."""
        config.save(self.config_file)

    def append(self, log: str, record: dict[str, Any]) -> None:
        """Add one line to a log and hand it to the system at once."""
        with (self.path / log).open("a", encoding="utf-8") as file:
            file.write(json.dumps(drop_nan(record)) + "\n")
            file.flush()

    def cut_back(self, step: int) -> None:
        """Drop what the folder says of later steps, for they will be made again."""
        self.result_file.unlink(missing_ok=True)
        for at, place in list_steps(self.checkpoints).items():
            if at > step:
                shutil.rmtree(place)
        for at, snapshot in list_steps(self.snapshots, ".safetensors").items():
            if at > step:
                snapshot.unlink()
        for log in LOGS:
            cut_log(self.path / log, step)

    def save_keys(self, step: int, keys: "dict[str, Tensor]") -> None:
        from some_moe.training.checkpoint import write_tensors

        self.snapshots.mkdir(exist_ok=True)
        write_tensors(self.snapshots / f"step-{step}.safetensors", keys)

    def write_result(self, result: dict[str, Any]) -> None:
        write_whole(self.result_file, json.dumps(drop_nan(result), indent=1))


class ReadOnlyFolder(RunFolder):
    """The run folder for all processes but the main one: they read, and what they write is dropped."""

    @contextmanager
    def claim(self) -> Iterator[None]:
        yield

    def write_nothing(self, *arguments: Any, **named: Any) -> None:
        pass

    create = write_config = append = cut_back = save_keys = write_result = write_nothing


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
    """What is called step-N in a folder, by step, oldest first."""
    if not folder.is_dir():
        return {}
    pattern = re.compile(r"step-(\d+)" + re.escape(suffix))
    return dict(sorted((int(match[1]), path) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))))


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return list(list_steps(folder).values())


def read_state_file(place: Path) -> dict[str, Any]:
    """Read a checkpoint's state.json; `checkpoint.read_state` verifies the files that it vouches for, too."""
    try:
        state: dict[str, Any] = json.loads((place / "state.json").read_text(encoding="utf-8"))
        version, _ = state["format_version"], state["hashes"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{str(place)!r} is not a whole checkpoint: its state.json cannot be read; {CURE}") from None
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{str(place)!r} has format version {version}, newer than this program's {FORMAT_VERSION}; update some-moe"
        )
    return state


# --- logs -------------------------------------------------------------------------------------------------


def read_log(path: Path, damaged: list[str] | None = None) -> list[dict[str, Any]]:
    """The records of a .jsonl log. Lines that cannot be read are left out; `damaged` takes a sentence on them."""
    records = [record for _, record in _parse_log(path)]
    bad = [number for number, record in enumerate(records, 1) if record is None]
    if damaged is not None and bad == [len(records)]:
        damaged.append(f"The last line of {path.name} is unfinished and left out, as when a run is killed in writing.")
    elif damaged is not None and bad:
        listed = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        damaged.append(f"{path.name} cannot be read at line {listed}: what stood there is left out.")
    return [record for record in records if record is not None]


def cut_log(path: Path, step: int) -> None:
    """Drop the lines of later steps. A damaged line between good ones stays, so that readers still hear of it."""
    parsed = _parse_log(path)
    good = [number for number, (_, record) in enumerate(parsed, 1) if record is not None and record["step"] <= step]
    kept = [line for line, record in parsed[: max(good, default=0)] if record is None or record["step"] <= step]
    if path.is_file():
        write_whole(path, "".join(line + "\n" for line in kept))


def _parse_log(path: Path) -> list[tuple[str, dict[str, Any] | None]]:
    """Each line with its record; None where it is no record of a step."""
    if not path.is_file():
        return []
    parsed: list[tuple[str, dict[str, Any] | None]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        is_whole = isinstance(record, dict) and isinstance(record.get("step"), int)
        parsed.append((line, record if is_whole else None))
    return parsed


def drop_nan(value: Any) -> Any:
    """Turn NaN and infinities into null: JSON has no word for them."""
    if isinstance(value, dict):
        return {name: drop_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [drop_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

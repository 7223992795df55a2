"""Within a child: every file operation below a folder is counted; at a chosen one the process dies, or the disk fails.

Only file operations change a folder, so that dying before each of them, and within each write, leaves every state that
a folder can be found in. Writes of native code (safetensors) are watched by their one function.
"""

import builtins
import errno
import io
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors.numpy
import safetensors.torch
from safetensors import SafetensorError

WRITES = ("write", "tensors")
GROWS = (*WRITES, "create", "mkdir", "link", "fsync")  # what a full disk refuses; it still renames and removes
FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Attack:
    """What is done to one process, and when."""

    how: str = "none"  # none, kill, full (no room from then on), readonly (nothing can be changed from then on)
    moment: int = 0  # which of the counted moments, from 1 on
    target: str = "command"  # or run: the process that a queue starts
    whole: bool = True  # of a queue: both processes die
    seconds: float | None = None  # kill from outside after so long, instead of at a moment

    def __str__(self) -> str:
        when = f"{self.seconds:.3f} s" if self.seconds is not None else str(self.moment)
        return f"{self.how}@{when}" + ("" if self.target == "command" else f" of a run{', whole' * self.whole}")


@dataclass
class Watch:
    """Counts the operations below `root`, and carries out an attack."""

    root: str
    attack: Attack
    labels: list[str] = field(default_factory=list)  # of all moments so far
    is_full: bool = False  # the last half write has been granted
    originals: dict[tuple[ModuleType, str], Any] = field(default_factory=dict)

    def label(self, path: str) -> str:
        name = re.sub(r"\.[0-9a-f]{8}-\d+\.tmp", ".tmp", os.path.relpath(path, self.root))  # a process of its own
        return re.sub(r"\d+", "N", re.sub(r"\b[0-9a-f]{32}\b", "HASH", name))

    def is_due(self, label: str) -> bool:
        self.labels.append(label)
        return self.attack.how == "kill" and len(self.labels) == self.attack.moment

    def die(self) -> None:
        if self.attack.target == "run" and self.attack.whole:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def operation(self, kind: str, path: str | None, act: Callable[[], Any], half: Callable[[], Any] | None) -> Any:
        """Do `act`, unless this is the moment. half: what of a write is done where it is the last."""
        if path is None or not f"{path}/".startswith(f"{self.root}/"):
            return act()
        name = f"{kind} {self.label(path)}"
        if kind != "fsync":  # it changes nothing that a later process sees
            if self.is_due(name):
                self.die()
            if half is not None and self.is_due(f"within {name}"):
                half()
                self.die()
        fails = self.attack.how in ("full", "readonly") and len(self.labels) >= self.attack.moment
        if fails and (self.attack.how == "readonly" or kind in GROWS):
            number = errno.EROFS if self.attack.how == "readonly" else errno.ENOSPC
            if self.attack.how == "full" and half is not None and not self.is_full:
                self.is_full = True
                written = half()
                if kind == "write" and written:
                    return written  # as the system does: fewer bytes than were given, and an error the next time
            if kind == "tensors":
                said = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"
                raise SafetensorError(said)
            raise OSError(number, os.strerror(number), path)
        return act()

    # --- what is watched --------------------------------------------------------------------------------------

    def install(self) -> None:
        for kind in ("mkdir", "rmdir", "unlink", "remove", "truncate"):
            self.wrap_path(kind)
        for kind in ("rename", "replace", "link"):
            self.wrap_rename(kind)
        for kind in ("write", "fsync", "ftruncate"):
            self.wrap_descriptor(kind)
        self.put(os, "open", self.open_descriptor)
        for module in (io, builtins):
            self.put(module, "open", self.open_file)
        for module in (safetensors.torch, safetensors.numpy):
            self.put(module, "serialize_file", self.write_tensors)

    def put(self, module: ModuleType, name: str, watched: Callable[..., Any]) -> None:
        """Replace a function of a module."""
        self.originals[module, name] = getattr(module, name)
        setattr(module, name, watched)

    def remove(self) -> None:
        """Let every function be what it was."""
        for (module, name), original in self.originals.items():
            setattr(module, name, original)

    def wrap_path(self, kind: str) -> None:
        original = getattr(os, kind)

        def watched(path: Any, *rest: Any, dir_fd: int | None = None, **named: Any) -> Any:
            named |= {} if dir_fd is None else {"dir_fd": dir_fd}
            return self.operation(kind, find(path, dir_fd), lambda: original(path, *rest, **named), None)

        self.put(os, kind, watched)

    def wrap_rename(self, kind: str) -> None:
        original = getattr(os, kind)

        def watched(source: Any, target: Any, **named: Any) -> Any:
            path = find(target, named.get("dst_dir_fd"))
            return self.operation(
                "link" if kind == "link" else "rename", path, lambda: original(source, target, **named), None
            )

        self.put(os, kind, watched)

    def wrap_descriptor(self, kind: str) -> None:
        original = getattr(os, kind)

        def watched(descriptor: int, *rest: Any) -> Any:
            half = (lambda: original(descriptor, rest[0][: len(rest[0]) // 2])) if kind == "write" else None
            return self.operation(kind, find(descriptor), lambda: original(descriptor, *rest), half)

        self.put(os, kind, watched)

    def open_descriptor(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        named = {} if dir_fd is None else {"dir_fd": dir_fd}

        def act() -> Any:
            return self.originals[os, "open"](path, flags, mode, **named)

        return self.operation("create", find(path, dir_fd), act, None) if flags & FLAGS else act()

    def open_file(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        path = find(file)
        if not set(mode) & set("wax+") or path is None or not path.startswith(f"{self.root}/"):
            return self.originals[io, "open"](file, mode, buffering, *rest, **named)
        raw_mode = mode.replace("b", "").replace("t", "")
        own = {name: named.pop(name) for name in ("closefd", "opener") if name in named}
        raw = self.operation("create", path, lambda: WatchedFile(file, raw_mode, self, path, **own), None)
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, *rest, **named)
        text.mode = mode  # type: ignore[misc]
        return text

    def write_tensors(self, tensors: Any, path: Any, *rest: Any, **named: Any) -> Any:
        def act() -> Any:
            return self.originals[safetensors.torch, "serialize_file"](tensors, path, *rest, **named)

        def half() -> None:
            act()
            self.originals[os, "truncate"](path, os.path.getsize(path) // 2)

        return self.operation("tensors", find(path), act, half)

    def save(self, path: Path) -> None:
        """Keep the labels of all moments, for the undisturbed run."""
        with self.originals[io, "open"](path, "w") as file:
            json.dump(self.labels, file)


class WatchedFile(io.FileIO):
    """A file whose writes are moments."""

    def __init__(self, file: Any, mode: str, watch: Watch, path: str, **named: Any) -> None:
        super().__init__(file, mode, **named)
        self.watch, self.path = watch, path

    def write(self, data: Any) -> Any:
        def act(part: Any) -> Any:
            return io.FileIO.write(self, part)

        half = memoryview(data)[: len(data) // 2]
        return self.watch.operation("write", self.path, lambda: act(data), lambda: act(half))


def find(path: Any, folder: int | None = None) -> str | None:
    """The absolute path of what an operation names by a path, a name within an open folder, or a descriptor."""
    if isinstance(path, int):
        try:
            return os.readlink(f"/proc/self/fd/{path}")
        except OSError:  # no Linux: such operations are not counted
            return None
    name = os.fsdecode(path)
    if folder is not None and not os.path.isabs(name):
        above = find(folder)
        return None if above is None else os.path.join(above, name)
    return os.path.abspath(name)

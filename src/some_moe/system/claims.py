"""Work that processes on many machines share, by files alone: who does what, and what is to be done again.

Each claim to a piece of work is a file NAME.N.json, N counting up. It is made by a hard link, of which a file system
makes one and no more, NFS too; whoever made the highest N owns the work. The owner touches its file again and again.
One that was silent for as long as its claim allows, or whose process is gone from this very machine, counts as dead:
the next may claim N + 1, and marks the older claim, so that an owner who comes back finds that it has lost.
All times are those of the file server, so that clocks need not agree.
"""

import json
import os
import re
import secrets
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from some_moe.errors import ConfigError
from some_moe.system.files import clear_scratch, is_alive, name_scratch, write_new, write_whole
from some_moe.system.reading import read_object

DEAD_AFTER = 120.0  # seconds of silence
BEATS = 12  # how often a living owner touches its claim in that time
RUNNING, LOST = "running", "lost"
PATTERN = re.compile(r"(.+)\.([1-9]\d{0,8})\.json")
OBEYS = "SOME_CLAIM"  # set for a process that works for the owner of a claim: the claim's token and file


@dataclass
class Claim:
    """One claim as it was read, or as its owner holds it. about: host, process, token, state, and what owners add."""

    name: str
    number: int
    path: Path
    about: dict[str, Any]
    touched: float = 0.0  # by the file server's clock

    @property
    def state(self) -> str:
        return str(self.about.get("state", RUNNING))

    @property
    def dead_after(self) -> float:
        found = self.about.get("dead_after")
        return found if isinstance(found, int | float) and 0 < found < 1e9 else DEAD_AFTER

    @property
    def owner(self) -> str:
        return f"process {self.about.get('process')} on {self.about.get('host')}"

    def is_held(self) -> bool:
        """Whether it still belongs to who made it: it bears its token, and nobody has made the next."""
        try:
            held = read_object(self.path).get("token") == self.about["token"]
        except (ConfigError, FileNotFoundError):
            held = False
        return held and not self.path.with_name(f"{self.name}.{self.number + 1}.json").exists()


class Claims:
    """The claims in one folder, as one process sees and makes them."""

    def __init__(self, folder: Path, dead_after: float = DEAD_AFTER) -> None:
        self.folder, self.dead_after = folder, dead_after
        self.place = describe_place()
        self.clock = name_scratch(folder / "clock")
        self.held: dict[Path, Claim] = {}
        self.taking = threading.Lock()  # one thread at a time
        self.ended = threading.Event()
        self.heart = threading.Thread(target=self._beat, daemon=True)

    def open(self) -> None:
        """Begin: from here on what is held is touched."""
        self.folder.mkdir(parents=True, exist_ok=True)
        clear_scratch(self.folder)
        self.clock.touch()
        self.heart.start()

    def close(self) -> None:
        self.ended.set()
        self.heart.join()
        with suppress(OSError):
            self.clock.unlink(missing_ok=True)

    def read(self) -> dict[str, Claim]:
        """The newest claim to each piece of work."""
        found: dict[str, Claim] = {}
        matches = (PATTERN.fullmatch(path.name) for path in self.folder.glob("*.json"))
        newest: dict[str, int] = {}
        for match in filter(None, matches):
            newest[match[1]] = max(int(match[2]), newest.get(match[1], 0))
        for name, number in newest.items():
            path = self.folder / f"{name}.{number}.json"
            try:
                about = read_object(path)  # opened first: only then does NFS ask the server how old it is
            except (ConfigError, FileNotFoundError):
                about = {}  # being made where there are no hard links, or damaged: its silence will tell
            with suppress(FileNotFoundError):
                found[name] = Claim(name, number, path, about, path.stat().st_mtime)
        return found

    def explain_death(self, claim: Claim) -> str | None:
        """Why a running claim counts as dead; None where it does not."""
        process = claim.about.get("process")
        if claim.about.get("place") == self.place and type(process) is int and not is_alive(process):
            return f"{claim.owner} is gone"
        silent = self.read_clock() - claim.touched
        return f"{claim.owner} was silent for {silent:.0f} s" if silent > claim.dead_after else None

    def read_clock(self) -> float:
        """The file server's time."""
        self.clock.touch()
        return self.clock.stat().st_mtime

    def take(self, name: str, before: Claim | None, **more: Any) -> Claim | None:
        """Claim what nobody else owns: before is the newest claim there was, if any. None where another was faster.

        more: what the claim is to say besides.
        """
        number = 1 if before is None else before.number + 1
        about = {"state": RUNNING, "host": socket.gethostname(), "process": os.getpid(), "place": self.place}
        about |= {"token": secrets.token_hex(16), "dead_after": self.dead_after} | more
        claim = Claim(name, number, self.folder / f"{name}.{number}.json", about)
        with self.taking:
            if not write_new(claim.path, json.dumps(about)):
                return None
            self.held[claim.path] = claim
        if before is not None and before.state == RUNNING:
            write_whole(before.path, json.dumps(before.about | {"state": LOST, "token": ""}))
        return claim

    def settle(self, claim: Claim, **news: Any) -> bool:
        """Write how the work ended, and let the claim go; False where it was lost before, and nothing is written."""
        with self.taking:
            self.held.pop(claim.path, None)
        if not claim.is_held():
            return False
        write_whole(claim.path, json.dumps(claim.about | news))
        return True

    def _beat(self) -> None:
        while not self.ended.wait(self.dead_after / BEATS):
            for claim in [*self.held.values()]:
                with suppress(OSError):  # the file server may be back at the next beat
                    if claim.is_held():
                        os.utime(claim.path)


def describe_place(root: Path = Path("/")) -> str:
    """A machine, and which processes of it can be seen: only there does a process's number tell whether it lives."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append((root / "proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink(root / "proc/self/ns/pid"))
    return " ".join(parts)


def obey(given: str) -> None:
    """Let this process, which works for the owner of a claim, end with it. given: what OBEYS says.

    Without its parent it saves and ends, in half the time that its silence may last; where somebody else owns the work
    it ends at once, and writes nothing.
    """
    token, _, path = given.partition(" ")
    match = PATTERN.fullmatch(Path(path).name)
    if match is None:
        return
    claim, parent = Claim(match[1], int(match[2]), Path(path), {"token": token}), os.getppid()
    with suppress(OSError, ConfigError):
        claim.about |= {"dead_after": read_object(claim.path).get("dead_after")}

    def watch() -> None:
        orphaned: float | None = None
        while True:
            time.sleep(claim.dead_after / BEATS / 4)  # before who takes the work up has waited and begins
            with suppress(OSError):
                if not claim.is_held():
                    os._exit(1)
            if orphaned is None and os.getppid() != parent:
                orphaned = time.monotonic()
                os.kill(os.getpid(), signal.SIGTERM)
            if orphaned is not None and time.monotonic() - orphaned > claim.dead_after / 2:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

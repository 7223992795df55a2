"""One case: a folder is laid out and damaged, a command reads it in this process, and its answer is judged."""

import contextlib
import faulthandler
import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Self

from tests.fuzz.pages import find_fault, find_markup
from tests.fuzz.targets import ANYWHERE, MARKER, Command, Target, find_devices

GOOD = ("accepted", "refused")
FAILURES = ("traceback", "hang", "memory", "killed", "words", "touched", "leak", "page", "escape", "harness")
MOST_MEMORY = 2 * 2**30  # bytes that a command may take
ADDRESS_SPACE = 5 * 2**30  # bytes more than at the beginning: what asks for all of the machine is stopped here
LARGE = 8 * 2**20  # files above are compared by their size alone
# Work without an end is what was asked for where somebody typed or configured it; it is then stopped, not hung.
ENDLESS = (
    "Trainer.run", "stream_text", "generate_text", "bench_layer", "bench_step", "tell", "tell_many",
    "sources.py:load_corpus.<locals>.<genexpr>", "expert_weights.py:checksum", "lengths.py:score_run",
    "tokenizer.py:Tokenizer.train",
)  # fmt: skip
SECRET = f"The {MARKER} is mine. {MARKER} " * 3 + "\n\n" + f"My {MARKER} too.\n\n" * 8
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")
DOING = "doing.json"
NOISE = re.compile(r"^some: |^\s|Traceback|Warning|Error")  # no line that tells how far a command has come
LOCKS = (".run.lock", ".queue.lock")


class Hang(BaseException):
    """Raised in the program when its time is over."""


@dataclass
class Verdict:
    """How one case ended."""

    target: str
    case: int
    kind: str
    place: str = ""  # where in the program, or what about the answer
    damage: str = ""
    command: list[str] = field(default_factory=list)
    answer: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Bench:
    """A worker's place: a folder for the case, one beside it that nobody may touch, and what a command prints."""

    def __init__(self, base: Path, name: str) -> None:
        self.base, self.place = base, base / "work" / name
        self.case, self.canary = self.place / "case", self.place / "canary"
        self.devices = find_devices(self.place)
        shutil.rmtree(self.place, ignore_errors=True)
        self.case.mkdir(parents=True)
        os.environ["SOME_CACHE"] = str(self.case / "cache")
        self.stdout, self.stderr = (os.memfd_create(stream) for stream in ("stdout", "stderr"))
        self.alarmed_at: list[str] = []  # the program's functions when its time was over, innermost last
        self.armed = False
        self.programs: list[str] = json.loads((base / "about.json").read_text(encoding="utf-8"))["programs"]
        signal.signal(signal.SIGALRM, self._ring)
        self.stacks = (self.place / "stacks.txt").open("w")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give back what belongs to the process."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for stream in (self.stdout, self.stderr):
            os.close(stream)
        self.stacks.close()

    def _ring(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if not self.alarmed_at:
            self.alarmed_at = [
                f"{_shorten(at.f_code.co_filename)}:{at.f_code.co_qualname}"
                for at, _ in traceback.walk_stack(frame)
                if "some_moe" in at.f_code.co_filename
            ][::-1] or ["elsewhere"]
        if self.armed:
            raise Hang

    # --- one case -------------------------------------------------------------------------------------------

    def run(self, target: Target, number: int, seed: int) -> Verdict:
        """The case of that number."""
        rng = Random(f"{seed} {target.name} {number}")
        chosen = rng.choices(target.commands, [command.share for command in target.commands])[0]
        verdict = self.try_out(target, chosen, lambda words: target.damage(self.case, rng, words))
        verdict.case = number
        return verdict

    def try_out(self, target: Target, chosen: Command, damage: Callable[[list[str]], str]) -> Verdict:
        """Lay out the folder, damage it, run the command, judge. damage: may change the command's words too."""
        words = list(chosen.words)
        verdict = Verdict(target.name, 0, "harness", command=words)
        try:
            self._lay_out(("common", chosen.part, *target.parts))
            verdict.damage = damage(words)
        except Exception:  # a fault of these files, which is told like one of the program's
            verdict.answer = traceback.format_exc()
            verdict.place = verdict.answer.strip().splitlines()[-1]
            return verdict
        (self.place / DOING).write_text(
            json.dumps([verdict.damage, words]), encoding="ascii"
        )  # for whoever finds us dead
        before, outside = digest_tree(self.case), digest_tree(self.canary)
        started, memory = time.monotonic(), _reset_peak()
        try:
            code, failure = self._call(words, target.patience)
        finally:
            os.chdir(self.place)
        verdict.seconds = time.monotonic() - started
        out, err = self._read_streams()
        verdict.answer = f"exit {code}\n{out[-1500:]}{err[-3000:]}{failure}"
        growth = _read_memory("VmHWM") - memory
        verdict.kind, verdict.place = self._judge(
            target, verdict, chosen, code, failure, out, err, before, outside, growth
        )
        return verdict

    def _lay_out(self, parts: tuple[str, ...]) -> None:
        for place in (self.case, self.canary):
            for path in place.rglob("*") if place.exists() else ():
                if not path.is_symlink() and path.is_dir():
                    path.chmod(0o755)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        (self.canary / "secret.txt").write_text(SECRET, encoding="utf-8")
        for part in parts:
            shutil.copytree(self.base / "parts" / part, self.case, dirs_exist_ok=True)

    def _call(self, words: list[str], patience: float) -> tuple[int | None, str]:
        """The exit code, and the traceback of what escaped."""
        import torch

        from some_moe.cli import main

        torch.set_num_threads(1)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        self.alarmed_at = []
        os.chdir(self.case)
        failure, code = "", None
        with self._streams(), warnings.catch_warnings():
            warnings.resetwarnings()  # as in a process of its own
            for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", hidden)
            # What holds the interpreter, in C, hears no alarm: this writes the stack for whoever ends the process.
            faulthandler.dump_traceback_later(patience + 2, file=self.stacks)
            try:
                self.armed = True
                signal.setitimer(signal.ITIMER_REAL, patience, 2.0)  # again, where the program went on regardless
                code = main(words)
            except Hang:
                pass
            except BaseException:
                failure = traceback.format_exc()
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return code, failure

    @contextlib.contextmanager
    def _streams(self) -> Iterator[None]:
        """Files in memory as the standard streams, for the program, its libraries and its children alike."""
        kept, before = [os.dup(number) for number in (1, 2)], (sys.stdout, sys.stderr)
        for number, stream in ((1, self.stdout), (2, self.stderr)):
            os.ftruncate(stream, 0)
            os.lseek(stream, 0, os.SEEK_SET)
            os.dup2(stream, number)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8")
        errors = io.FileIO(2, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(errors, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError, OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            sys.stdout, sys.stderr = before
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)

    def _read_streams(self) -> tuple[str, str]:
        return tuple(
            os.pread(stream, 4 * 2**20, 0).decode("utf-8", errors="replace") for stream in (self.stdout, self.stderr)
        )  # type: ignore[return-value]

    # --- judging --------------------------------------------------------------------------------------------

    def _judge(
        self, target: Target, verdict: Verdict, command: Command, code: int | None, failure: str, out: str, err: str,
        before: dict[str, str], outside: dict[str, str], growth: int,
    ) -> tuple[str, str]:  # fmt: skip
        name = verdict.command[0]
        if growth > MOST_MEMORY and name != "bench":  # which takes what was typed, where the machine has it
            return "memory", f"{name}, reading {_skeleton(verdict.damage.partition(':')[0])}"
        if self.alarmed_at:
            is_endless = target.name in ("words", "config") and any(at.endswith(ENDLESS) for at in self.alarmed_at)
            if not is_endless:
                return "hang", self.alarmed_at[-1]
            code = 0
        elif failure:
            return "traceback", _find_place(failure)
        if digest_tree(self.canary) != outside:
            return "touched", f"{name}: wrote outside of its folder"
        if damaged := mend_devices(self.devices):
            return "touched", f"{name}: replaced the device {damaged}"
        after = digest_tree(self.case)
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        leaks = [path for path in changed if path in after and self._tells_secret(path)]
        if not target.is_own and (MARKER in out + err or leaks):
            return "leak", f"{name}: {leaks[0] if leaks else 'printed'}"
        # What a model writes and what somebody typed is theirs; what a file brings along must not reach the terminal.
        heard = err if name == "generate" else out + err
        was_typed = target.name == "words" or (target.name == "pages" and name == "trace")
        if not was_typed and (found := CONTROLS.search(heard)):
            return "escape", f"{name}: prints {found[0]!r}"
        if code not in (0, 1, 2):
            return "words", f"{name}: exit {code}"
        *progress, last = err.removesuffix("\n").split("\n")
        if code and (not last.startswith("some: ") or any(map(NOISE.search, progress))):
            return "words", f"{name}: exit {code} with {len(progress) + 1} lines"
        allowed = ("cache",) if code == 2 else ("cache", *command.writes)
        strays = [path for path in changed if not path.startswith(allowed) and not path.endswith(LOCKS)]
        if strays and (code == 2 or (code == 0 and command.writes != ANYWHERE)):
            return "touched", f"{name}: exit {code}, changed {_skeleton(strays[0])}"
        if code:
            return "refused", "memory ran out" if "memory ran out" in err else ""
        is_taken = "renewed" in verdict.damage and re.search(r"→ -?(nan|inf)\b", verdict.damage)
        if target.name == "model" and name == "eval" and is_taken and "nan" in out:
            return "words", f"{name}: a model with nan or inf is scored"
        for path in changed:
            if path in after and (fault := self._find_page_fault(path)):
                return "page", f"{name}: {fault}"
        return "accepted", "still going" if self.alarmed_at else ""

    def _tells_secret(self, path: str) -> bool:
        file = self.case / path
        if file.is_symlink() or not file.is_file() or file.stat().st_size > LARGE:
            return False
        data = file.read_bytes()
        tokens = b"".join(re.findall(rb'"text": ?"([^"]*)"', data))  # a trace shows a text in pieces
        return MARKER.encode() in data or MARKER.encode() in tokens

    def _find_page_fault(self, path: str) -> str | None:
        file = self.case / path
        if not path.endswith((".html", ".md")) or not file.is_file():
            return None
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return "is not UTF-8"
        return find_markup(text) if path.endswith(".md") else find_fault(text, self.programs)


DEVICES = {"null": 3, "zero": 5, "full": 7}


def mend_devices(folder: Path) -> str:
    """Make the devices anew that are none; return the name of one that was something else.

    Only root can make them, and only root could replace those of the machine: others get links to those.
    """
    damaged = ""
    for name, number in DEVICES.items():
        path = folder / name
        if path.exists() and stat.S_ISCHR(path.stat().st_mode):
            continue
        if os.path.lexists(path):
            damaged = name
            path.unlink()
        if os.geteuid():
            path.symlink_to(f"/dev/{name}")
        else:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, number))
    return damaged


def digest_tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, links not followed: its kind, and a digest of what it holds."""
    found: dict[str, str] = {}
    todo = [str(folder)]
    while todo:
        for entry in os.scandir(todo.pop()):
            about = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(about.st_mode):
                todo.append(entry.path)
                continue
            told = f"{stat.S_IFMT(about.st_mode)} {about.st_size}"
            if stat.S_ISLNK(about.st_mode):
                told = f"link {os.readlink(entry.path)}"
            elif stat.S_ISREG(about.st_mode) and about.st_size <= LARGE and about.st_mode & 0o400:
                with open(entry.path, "rb") as file:
                    told = hashlib.blake2b(file.read(), digest_size=16).hexdigest()
            found[os.path.relpath(entry.path, folder)] = told
    return found


def _shorten(path: str) -> str:
    return path.rpartition("some_moe/")[2] if "some_moe/" in path else Path(path).name


def _skeleton(text: str) -> str:
    return re.sub(r"\d+", "N", text)


def _find_place(failure: str) -> str:
    """The error's type, and the innermost function of the program that it passed through."""
    error = failure.strip().splitlines()[-1].partition(":")[0].rpartition(".")[2]
    frames = re.findall(r'File "[^"]*some_moe/([^"]+)", line (\d+), in (\S+)', failure)
    return f"{error} in {frames[-1][0]}:{frames[-1][2]}" if frames else error


def _read_memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> int:
    """Begin to measure the most memory anew; return what is used now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _read_memory("VmRSS")


def limit_memory() -> None:
    """A command that asks for the whole machine gets none of it."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_read_memory("VmSize") + ADDRESS_SPACE, hard))

"""Commands in forked children of a process that has imported everything: one takes a fraction of a second.

Nothing is computed in the parent and torch has one thread there, so that a fork is safe.
"""

import contextlib
import ctypes
import importlib
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tests.kills.moments import Attack, Watch

LONGEST = 120.0  # seconds; a command that takes longer hangs
PRELOADED = (
    "torch._dynamo", "safetensors.numpy", "safetensors.torch", "matplotlib.backends.backend_svg",
    "networkx", "scipy.stats", "sklearn.manifold",
    "some_moe.api", "some_moe.cli", "some_moe.commands.experiments", "some_moe.commands.reporting",
    "some_moe.commands.tables", "some_moe.commands.tracing", "some_moe.commands.training",
    "some_moe.commands.glassbox", "some_moe.lab.jobs", "some_moe.lab.joined", "some_moe.lab.queue",
    "some_moe.lab.registry.presets", "some_moe.lab.registry.selection", "some_moe.environment",
    "some_moe.training.loop", "some_moe.training.runs", "some_moe.glass.api", "some_moe.glass.inspect.collect",
    "some_moe.glass.inspect.findings", "some_moe.glass.inspect.guilds", "some_moe.glass.figures",
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int  # exit code, or minus the signal
    said: str  # stdout and stderr
    seconds: float

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL

    def find_fault(self, good: tuple[int, ...]) -> str | None:
        """What is wrong with an answer that should have been given, with one sentence where it is a refusal."""
        tail = self.said[-1500:]
        if self.code not in good:
            return f"exit code {self.code}, not {' or '.join(map(str, good))}: {tail}"
        if "Traceback" in self.said:
            return f"a traceback: {tail}"
        sentences = [line for line in self.said.splitlines() if line.startswith("some: ")]
        if self.code and len(sentences) != 1:
            return f"exit code {self.code} with {len(sentences)} sentences: {tail}"
        return None


def preload() -> None:
    """Import what the commands import, and be the parent of whoever loses its own."""
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it; elsewhere the system's first process is
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: the dead are buried, and not taken for alive
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # libraries for drawing may be missing
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        draw_little()


def draw_little() -> None:
    """Two figures, small, instead of all, and few trials of guilds: what is written is written in the same way."""
    from some_moe.glass import figures
    from some_moe.glass.figures import canvas
    from some_moe.glass.inspect import guilds

    draw, effort = figures.draw_figures, guilds.Effort
    figures.draw_figures = lambda findings: islice(draw(findings), 2)  # type: ignore[assignment]
    canvas.PIXELS_AN_INCH = 20
    few = {"num_shuffles": 19, "num_bootstraps": 20, "num_key_draws": 2, "num_community_shuffles": 5, "num_sets": 2}
    guilds.Effort = lambda: effort(**few)  # type: ignore[assignment, misc]


def run(words: list[str], cwd: Path, cache: Path, attack: Attack | None = None, labels: Path | None = None) -> Ended:
    """Run one command in a child within `cwd`. labels: where to keep what moments it has."""
    attack = attack or Attack()
    log = cwd.with_name(f"{cwd.name}.log")
    log.touch()  # a child may be killed before it opens it
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        become(words, cwd, cache, attack, labels, log)
    os.close(writing)
    with open(reading, "rb") as end:  # at its end when the child and all of its children have ended
        ready, _, _ = select.select([end], [], [], LONGEST if attack.seconds is None else attack.seconds)
        if not ready:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            select.select([end], [], [], LONGEST)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    said = log.read_text(errors="replace")
    log.unlink()
    if not ready and attack.seconds is None:
        said += f"\nno end after {LONGEST:.0f} s"
    return Ended(os.waitstatus_to_exitcode(status), said, time.monotonic() - started)


def run_together(words: list[str], cwd: Path, cache: Path, attacks: list[Attack]) -> list[Ended]:
    """Run one command in as many children as there are attacks, at the same time, each with an attack of its own."""
    started, logs, codes = time.monotonic(), {}, {}
    for number, attack in enumerate(attacks):
        log = cwd.with_name(f"{cwd.name}-{number}.log")
        log.touch()
        child = os.fork()
        if child == 0:
            become(words, cwd, cache, attack, None, log)
        logs[child] = log
    while len(codes) < len(logs):
        if time.monotonic() - started > LONGEST:
            for child in logs.keys() - codes.keys():
                os.killpg(child, signal.SIGKILL)
        child, status = os.waitpid(-1, os.WNOHANG)  # of their runs, too, that have lost their parents
        if child in logs:
            codes[child] = os.waitstatus_to_exitcode(status)
        elif child == 0:
            time.sleep(0.01)
    seconds = time.monotonic() - started
    return [Ended(codes[child], log.read_text(errors="replace"), seconds) for child, log in logs.items()]


def become(words: list[str], cwd: Path, cache: Path, attack: Attack, labels: Path | None, log: Path) -> None:
    """Be the command `some`, from here to the end of this process."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(cwd)
        os.environ["SOME_CACHE"] = str(cache)
        redirect(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        watch = Watch(str(cwd), attack)
        fork_runs(watch, labels)
        if attack.target == "command":
            watch.install()
        code = call_main(words)
        if labels is not None and attack.target == "command":
            watch.save(labels)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def redirect(log: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Under a test the streams are a test's: what is written goes to the descriptors.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)


def call_main(words: list[str]) -> int:
    from some_moe.cli import main

    try:
        return main(words)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1


def fork_runs(watch: Watch, labels: Path | None) -> None:
    """Let the queue fork its runs instead of starting an interpreter each."""
    from some_moe.lab import queue

    class ForkedRun:
        """As much of subprocess.Popen as the queue uses."""

        def __init__(self, command: list[str], *, env: dict[str, str], stdout: Any, stderr: Any, **_: Any) -> None:
            words = command[command.index("some_moe") + 1 :]
            self.pid = os.fork()
            if self.pid:
                return
            code = 1
            try:
                os.setpgid(0, 0)
                os.environ.update(env)
                if stdout is not None:
                    os.dup2(stdout.fileno(), 1)
                os.dup2(stderr.fileno(), 2)
                if watch.attack.target == "run":
                    watch.install()
                elif watch.attack.how == "kill":
                    watch.remove()  # it is the queue that is to die; a full disk is one for both
                code = call_main(words)
                if labels is not None and watch.attack.target == "run":
                    watch.save(labels)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)

        def wait(self) -> int:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

        def send_signal(self, number: int) -> None:
            os.kill(self.pid, number)

    class Processes:
        Popen = ForkedRun
        DEVNULL = queue.subprocess.DEVNULL

    queue.subprocess = Processes  # type: ignore[attr-defined]

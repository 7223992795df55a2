"""`some watch`: runs as a page that follows them; `some serve`: a run behind OpenAI's completions API."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from some_moe.cli import Parser, write
from some_moe.errors import UsageError

LOOK_SECONDS = 0.2


def say(text: str) -> None:
    write(text + "\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def add_server_options(parser: Parser) -> None:
    parser.add_argument("--port", type=int, metavar="N", help="where it listens (default: 8421, or any that is free)")
    parser.add_argument("--host", default="127.0.0.1", metavar="NAME", help="let other machines in, with a warning")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="where models compute: auto, cpu, cuda, cuda:N")


def watch_runs(arguments: list[str]) -> int:
    """Show runs as they grow."""
    parser = Parser("some watch", "Show runs in the browser as they grow. Prints the page's address; Ctrl-C ends it.")
    parser.add_argument("runs", nargs="*", metavar="RUN", default=["runs"], help="runs, or folders of runs (runs)")
    parser.add_argument("--no-browser", action="store_true", help="print the address, and open nothing")
    add_server_options(parser)
    options = parser.parse(arguments)
    refuse_port(options.port)

    from some_moe.live.server import watch

    where = {"host": options.host, "port": options.port, "device": choose_device(options.device)}
    watch(options.runs or ["runs"], browser=not options.no_browser, say=say, warning=warn, **where)
    return 0


def serve_run(arguments: list[str]) -> int:
    """Answer requests for text."""
    parser = Parser(
        "some serve",
        "Answer OpenAI's completions API (/v1/completions, /v1/models) with a run's model. Prints the base address; "
        "Ctrl-C ends it. With SOME_API_KEY set, clients must show that key.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best (default), last, or step-N")
    parser.add_argument("--base", metavar="DIR", help="of a run with branches: where its base is, if it was moved")
    parser.add_argument("--favour", type=float, metavar="X", help="of a run with branches: choose them more readily")
    add_server_options(parser)
    options = parser.parse(arguments)
    refuse_port(options.port)

    from some_moe.live.server import refuse_absent, serve
    from some_moe.training.runs import load

    refuse_absent()
    load(options.run, checkpoint=options.checkpoint)  # one that is none is refused before torch is loaded
    chosen = {"checkpoint": options.checkpoint, "base": options.base, "favour": options.favour}
    where = {"host": options.host, "port": options.port, "device": choose_device(options.device)}
    serve(options.run, key=os.environ.get("SOME_API_KEY") or None, say=say, warning=warn, **where, **chosen)
    return 0


def refuse_port(port: int | None) -> None:
    if port is not None and not 0 <= port < 65_536:
        raise UsageError(f"--port {port} is out of range; use 1 to 65535, or 0 for any that is free")


def choose_device(name: str) -> str:
    """The device in torch's words; torch is loaded only where it must be asked."""
    if name == "cpu":
        return name
    from some_moe.config import TrainConfig
    from some_moe.training.machine import choose_machine

    return str(choose_machine(TrainConfig(device=name)).device)


@contextmanager
def watched(run: Path, *, browser: bool) -> Iterator[threading.Thread]:
    """`some watch` in a process of its own, as soon as the run has begun; ended with whatever ends the block."""
    from some_moe.live.server import refuse_absent
    from some_moe.system.processes import python_command, python_environment

    refuse_absent()
    words = python_command("-m", "some_moe", "watch", str(run), *([] if browser else ["--no-browser"]))
    processes: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()

    def follow() -> None:
        while not (run / "config.yaml").is_file():
            if ended.wait(LOOK_SECONDS):
                return
        processes.append(subprocess.Popen(words, env=python_environment(), stdin=subprocess.DEVNULL))
        processes[0].wait()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        for process in processes:
            process.terminate()
        sys.stdout.flush()

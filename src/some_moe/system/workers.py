"""A second process that works while this one does something else, and ends with it."""

import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from queue import Queue
from subprocess import PIPE
from tempfile import TemporaryFile
from typing import Any

from some_moe.errors import FailureError
from some_moe.system.processes import python_command, python_environment


@contextmanager
def start_worker(function: str) -> Iterator[tuple[Callable[[Any], None], Callable[[], Any]]]:
    """Call "module:function" in a second process, which ends with the block, and with this process, whatever ends that.

    Gives `send` and `receive`. The function gets one that waits for what is sent, and what it returns is received.

    Not by multiprocessing, whose process would run the caller's script once more; not a fork, for threads of this
    process may hold locks that a copy of it would wait for.
    """
    command = python_command("-c", f"from {__name__} import serve; serve({function!r})")
    # A session of its own: Ctrl-C is ours to answer. Our own folder: libraries read settings from the current one, as
    # numba does, the place of its cache among them.
    options: Any = {"env": python_environment(), "cwd": Path(__file__).parent, "start_new_session": os.name != "nt"}
    with (
        TemporaryFile() as complaints,
        subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=complaints, **options) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        to_child, from_child = process.stdin, process.stdout

        def send(value: Any) -> None:
            with suppress(BrokenPipeError):  # `receive` tells why
                packed = pickle.dumps(value)
                to_child.write(len(packed).to_bytes(8) + packed)
                to_child.flush()

        def receive() -> Any:
            try:
                return pickle.load(from_child)
            except EOFError:
                complaints.seek(0)
                last = (complaints.read().decode(errors="replace").splitlines() or ["it was killed"])[-1]
                raise FailureError(f"a process of this program has ended ({last!r}); run it again") from None

        try:
            yield send, receive
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                to_child.close()


def serve(function: str) -> None:
    """What the second process does."""
    sent: Queue[bytes] = Queue()

    def listen() -> None:
        size = int.from_bytes(sys.stdin.buffer.read(8))
        sent.put(sys.stdin.buffer.read(size))  # not unpacked here: two threads that import are in each other's way
        sys.stdin.buffer.read()
        os._exit(0)  # the end of stdin is the end of the process that asked

    threading.Thread(target=listen, daemon=True).start()
    answer, sys.stdout = sys.stdout.buffer, sys.stderr  # what a library prints is no answer
    try:
        pickle.dump(resolve_name(function)(lambda: pickle.loads(sent.get())), answer)
        answer.flush()
    except Exception:
        traceback.print_exc()
    os._exit(0)  # an orderly end would wait for the thread that listens

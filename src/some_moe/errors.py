"""What can go wrong, as one sentence and an exit code: the commands print it, the Python API raises it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

OUT_OF_MEMORY = "memory ran out; use a smaller model, fewer rows at a time, or a larger machine"
# Torch tells in words that it got no memory: it need not be imported to know.
MEMORY_WORDS = (
    "out of memory", "can't allocate memory", "not enough memory", "Storage size calculation overflowed",
    "Overflow when unpacking long",
)  # fmt: skip


class SomeError(Exception):
    """An error whose message is one sentence that names the value and the cure; `code` is a command's exit code."""

    code = FAILED


class ConfigError(SomeError, ValueError):
    """Input that cannot be used: a setting, a file, a run."""

    code = BAD_INPUT


class UsageError(ConfigError):
    """Bad input on the command line."""


class FailureError(SomeError, RuntimeError):
    """The machine could not do it: a full disk, too little memory."""


class TrainingStoppedError(FailureError):
    """The run ended before its time. Its message says what happened and how to go on."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


CURES = {
    errno.ENOENT: "check the name",
    errno.EACCES: "ask its owner for the permission, or use another",
    errno.EPERM: "ask its owner for the permission, or use another",
    errno.EROFS: "use a place that can be written",
    errno.EISDIR: "name a file in it",
    errno.ENOTDIR: "what lies on the way is a file; check the path",
    errno.ELOOP: "its links go round in a circle; remove one",
    errno.ENAMETOOLONG: "choose a shorter one",
    errno.EEXIST: "choose another name",
}
MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBADF}


def explain(error: BaseException) -> SomeError | None:
    """The same error as one of ours, with its sentence; None for a fault of this program, which keeps its traceback."""
    if isinstance(error, SomeError):
        return error
    if is_out_of_memory(error):
        return FailureError(OUT_OF_MEMORY)
    if isinstance(error, OSError):
        return explain_refusal(error)
    return None


def explain_refusal(error: OSError) -> SomeError:
    """What the operating system refused, and to what."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return FailureError(f"what it writes finds no place ({reason}); give it another, or make room")
    name = error.filename.decode(errors="replace") if isinstance(error.filename, bytes) else str(error.filename)
    if error.errno in MACHINE:
        return FailureError(f"{name!r} cannot be used ({reason}); make room, and run it again")
    return ConfigError(f"{name!r} cannot be used ({reason}); {CURES.get(error.errno or 0, 'check it, or use another')}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python got no memory."""
    in_words = isinstance(error, RuntimeError) and any(word in str(error) for word in MEMORY_WORDS)
    return isinstance(error, MemoryError) or in_words


@contextmanager
def in_a_sentence() -> Iterator[None]:
    """Raise what the machine or its files refuse as an error of ours. It decorates functions of the Python API."""
    try:
        yield
    except Exception as error:
        ours = explain(error)
        if ours is None or ours is error:
            raise
        raise ours from error

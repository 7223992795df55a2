"""Files that are there whole or not at all, whenever the program or the machine stops. Imports no torch."""

import errno
import glob
import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from some_moe.errors import ConfigError

LONGEST_NAME = 180  # bytes of a file's name that its scratch file repeats: both must fit into 255
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}  # what file systems without hard links answer
HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"  # whose process number a scratch file bears


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders, and keeps names by itself
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_beside(path: Path) -> Iterator[Path]:
    """Give a scratch file beside `path` to write to; then bring it to the disk and rename it into place.

    Where anything fails on the way, the scratch file is removed, and what `path` held before stays. A link stays a
    link: what it points to is replaced. A device or a pipe is written to, and never replaced.
    """
    if is_stream(path):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / "scratch"
            with open(path, "wb") as stream, (Path(folder) / "scratch").open("rb") as written:
                shutil.copyfileobj(written, stream)
        return
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(21, "Is a directory", str(path))
    scratch = name_scratch(path)
    clear_scratch(path.parent, path.name)
    try:
        scratch.unlink(missing_ok=True)  # of a process of the same number; or a link, which would be written through
        os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = scratch.stat().st_mode
        yield scratch
        scratch.chmod(stat.S_IMODE(mode))  # some writers make files that only their owner reads
        # Renamed first, a file could be found empty after a power cut.
        sync(scratch)
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise


def name_scratch(path: Path) -> Path:
    """Where to write what will be `path`, or to move what was: beside it, under a name that no other process uses."""
    return path.with_name(f".{os.fsdecode(os.fsencode(path.name)[:LONGEST_NAME])}.{HOST}-{os.getpid()}.tmp")


def is_stream(path: Path) -> bool:
    """Whether a path is something to write through, such as /dev/null, /dev/stdout or a pipe."""
    if os.path.abspath(path).startswith(("/dev/fd/", "/dev/std", "/proc/")):
        return True  # where it leads to depends on the process
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def write_whole(path: Path, contents: str | bytes) -> None:
    """Write a small file, text as UTF-8."""
    with write_beside(path) as scratch:
        scratch.write_bytes(contents.encode() if isinstance(contents, str) else contents)


def write_new(path: Path, contents: str) -> bool:
    """Make a small file where there is none, whole at once; return whether it was this call that made it.

    Of all processes on all machines that try, one succeeds: a hard link is made once, also on NFS, whose locks may not
    be relied upon.
    """
    scratch = name_scratch(path)
    scratch.unlink(missing_ok=True)
    try:
        scratch.write_text(contents, encoding="utf-8")
        sync(scratch)
        os.link(scratch, path)
    except FileExistsError:
        return scratch.stat().st_nlink == 2  # made all the same: the server's answer was lost, and it was asked again
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            return False
        write_whole(path, contents)
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
    return True


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write torch tensors as a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with write_beside(path) as scratch:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, scratch, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_whole(path: Path) -> None:
    """Remove a file, a link or a folder so that it is there whole or not at all."""
    scratch = name_scratch(path)
    if os.path.lexists(scratch):
        _remove(scratch)
    os.replace(path, scratch)
    _remove(scratch)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def clear_scratch(folder: Path, name: str = "", owned: Callable[[str], bool] = lambda _: False) -> None:
    """Remove what processes of this machine that are gone have left half-written in a folder.

    name: of this file alone, where it is given. owned: says of a name whether this process alone may write it now, so
    that whatever is left of it is removed.
    """
    pattern = re.compile(r"\.(.+?)(?:\.([0-9a-f]{8})-(\d{1,9}))?\.tmp")
    for path in folder.glob(f".{glob.escape(name)}*.tmp"):
        found = pattern.fullmatch(path.name)
        if found is None:
            continue
        gone = found[2] == HOST and int(found[3]) != os.getpid() and not is_alive(int(found[3]))
        if gone or owned(found[1]):
            with suppress(OSError):
                _remove(path)


def is_alive(process: int) -> bool:
    """Whether a process of this machine is there, as far as can be told."""
    if os.name == "nt":
        return True  # there is no asking that does not kill
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def inside(folder: str | Path, name: str | Path) -> Path:
    """What is called `name` in a folder; refused where a link on the way leads out of the folder."""
    path = Path(folder) / name
    real, home = os.path.realpath(path), os.path.realpath(folder)
    if real != home and not real.startswith(home.rstrip(os.sep) + os.sep):
        raise ConfigError(f"{str(path)!r} leads out of its folder, to {real!r}; put a copy there instead of the link")
    return path

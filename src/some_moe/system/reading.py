"""Reading files that anybody may have written: whatever is in them, the answer is their content or one sentence.

Nothing but regular files is opened, nothing is run, and nothing larger than it may be is read. Imports no torch.
"""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from some_moe.errors import ConfigError

LARGEST_TEXT = 1 << 28  # bytes of a file that is read into memory whole
LARGEST_TENSORS = 1 << 40
HEADER_BYTES = 1 << 24  # room for the names in a safetensors file
# A packed file may give so many bytes: text packs ten times smaller, hardly ever a hundred times.
UNPACKED_FREE, UNPACKED_TIMES = 1 << 28, 100
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
RESTORE = "restore it, or give another"
# Control characters could rule the terminal that they are printed on; halves of characters cannot be printed at all.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def refuse_irregular(path: str | Path) -> None:
    """Refuse what is no regular file: a folder, a device, or a pipe, which would be waited for."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "a device")
        raise ConfigError(f"{str(path)!r} is {kind}, not a file; name a file")


def read_bytes(path: str | Path, largest: int = LARGEST_TEXT) -> bytes:
    """A file's bytes."""
    refuse_unreadable(path, largest)
    return Path(path).read_bytes()


def refuse_unreadable(path: str | Path, largest: int) -> None:
    """Refuse what is no regular file, what has too many bytes, and a path that cannot be printed."""
    refuse_unprintable(str(path), "the path")
    refuse_irregular(path)
    size = os.stat(path).st_size
    if size > largest:
        raise ConfigError(f"{str(path)!r} has {size:,} bytes, more than the {largest:,} that are read; {RESTORE}")


def read_text(path: str | Path, largest: int = LARGEST_TEXT) -> str:
    """A file's text, which must be UTF-8; a mark at its begin, as some editors write it, is left out."""
    try:
        return read_bytes(path, largest).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not UTF-8 text (byte {error.start}); convert it, or {RESTORE}") from None


def refuse_bomb(path: str | Path, unpacked: int) -> None:
    """Refuse a packed file that has given far more bytes than it has."""
    most = max(UNPACKED_FREE, UNPACKED_TIMES * os.stat(path).st_size)
    if unpacked > most:
        raise ConfigError(f"{str(path)!r} gives more than the {most:,} bytes that it may; give it unpacked, in parts")


def parse_json(text: str | bytes) -> Any:
    """JSON as Python's; ValueError for whatever is none, also for nesting and numbers beyond all measure."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """YAML as Python's, of plain kinds alone; ValueError for whatever is none, with its line where that is known."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        raise ValueError(f"line {where.line + 1}" if where else "it has signs that no YAML has") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (TypeError, OverflowError) as error:  # numbers and dates that there are not
        raise ValueError(str(error)) from None


def read_object(path: str | Path, cure: str = RESTORE) -> dict[str, Any]:
    """The JSON object in a file, with all its text printable."""
    try:
        found = clean(parse_json(read_text(path)))
    except (ConfigError, OSError):
        raise
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(path)!r} is damaged: it holds no JSON object; {cure}")
    return found


def read_tensors(
    path: str | Path, framework: str = "numpy", largest: int = LARGEST_TENSORS
) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a safetensors file (`framework`: numpy or pt), by name, and its metadata."""
    with open_tensors(path, framework, largest) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


@contextmanager
def open_tensors(path: str | Path, framework: str = "pt", largest: int = LARGEST_TENSORS) -> Iterator[Any]:
    """A safetensors file, to read some of it; what cannot be read is refused."""
    from safetensors import safe_open

    refuse_unreadable(path, largest)
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (OSError, ConfigError):
        raise
    except Exception as error:  # the library raises many kinds; whatever it says, the file is none of its own
        raise ConfigError(f"{str(path)!r} is damaged ({_first_line(error)}); {RESTORE}") from None


def refuse_other_shapes(path: Path, wanted: Mapping[str, Any]) -> None:
    """Refuse a file whose tensors have other names or shapes than `wanted`, by its header; damage is not told here."""
    from safetensors import safe_open

    refuse_unreadable(path, LARGEST_TENSORS)
    try:
        with safe_open(path, framework="numpy") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except OSError:
        raise
    except Exception:
        return
    _compare(path, saved, {name: tuple(tensor.shape) for name, tensor in wanted.items()})


def read_fitting(path: Path, wanted: Mapping[str, Any], cure: str) -> dict[str, Any]:
    """The torch tensors of a file, which must have the names, shapes and types of `wanted`, and be numbers."""
    saved, _ = read_tensors(path, "pt", HEADER_BYTES + sum(tensor.nbytes for tensor in wanted.values()))
    _compare(path, *({name: _describe(tensor) for name, tensor in one.items()} for one in (saved, wanted)))
    for name, tensor in saved.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ConfigError(f"{str(path)!r} has nan or infinity in {name}; {cure}")
    return saved


def _compare(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Name the first tensor in which a saved model differs from the one that it is for."""
    for name in wanted | saved:
        there, here = (f"shape {one[name]}" if name in one else "none" for one in (saved, wanted))
        if there != here:
            raise ConfigError(
                f"{str(path.parent)!r} does not fit this config: of {clean(name)} it has {there}, the config {here}; "
                "use the config that was saved with it"
            )


def _describe(tensor: Any) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)}" + ("" if kind == "float32" else f" of {kind}")


def _first_line(error: Exception) -> str:
    return str(clean(str(error).splitlines()[0] if str(error) else type(error).__name__))


def clean(value: Any) -> Any:
    """The same text or JSON, with every sign that rules a terminal, or is none, replaced by a question mark."""
    if isinstance(value, str):
        return UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {clean(name): clean(inner) for name, inner in value.items()}
    return [clean(inner) for inner in value] if isinstance(value, list) else value


def refuse_unprintable(text: str, what: str) -> None:
    """Refuse text that is not UTF-8, or would rule the terminal; line breaks and tabs are allowed."""
    found = UNPRINTABLE.search(text)
    if found:
        raise ConfigError(f"{what} {clean(text)!r} has {found[0]!a} in it, which is no printable sign; leave it out")

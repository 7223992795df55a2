"""Whatever is in a file, reading it gives its content or one sentence."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from some_moe.errors import ConfigError
from some_moe.system.reading import clean, parse_json, read_bytes, read_object, read_tensors, read_text


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder"), (Path("/dev/zero"), "a device")):
        with pytest.raises(ConfigError, match=f"is {kind}, not a file"):
            read_bytes(path)


def test_a_file_that_is_too_large_is_refused_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"has 1,099,511,627,776 bytes, more than the 268,435,456"):
        read_text(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5_000, "", "{", "\ufeff{}", "nul"])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_json(text)


@pytest.mark.parametrize("content", [b"[1]", b"\xff\xfe", b"{" * 5000, b'{"a": ' + b"9" * 5000 + b"}", b"", b"\0"])
def test_a_damaged_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"result\.json' is (damaged|not UTF-8)"):
        read_object(path)


def test_text_that_would_rule_the_terminal_is_made_harmless() -> None:
    texts = ["\x1b]0;title\x07", {"a": "\ud800 \u202e \x9b"}]
    hostile: dict[str, Any] = {"na\x1b[2Jme": texts, "lines": "a\n\tb", "n": 1.5}
    told = {"na\ufffd[2Jme": ["\ufffd]0;title\ufffd", {"a": "\ufffd \ufffd \ufffd"}], "lines": "a\n\tb", "n": 1.5}
    assert clean(hostile) == told


def test_tensors_come_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "keys.safetensors"
    save_file({"0.keys": np.ones((2, 3), np.float32)}, path, {"about": "keys"})
    tensors, metadata = read_tensors(path)
    assert tensors["0.keys"].shape == (2, 3)
    assert metadata == {"about": "keys"}
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:4], b"\xff" * 8 + whole[8:], whole.replace(b"F32", b"F33"), b""):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            read_tensors(path)

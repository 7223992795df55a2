"""What a benchmark leaves on disk: one JSON object, rewritten as it grows, and sections of a Markdown file."""

import json
import os
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from some_moe.config import ConfigError
from some_moe.files import write_whole
from some_moe.training.environment import describe_device, describe_environment
from some_moe.training.run_folder import drop_nan

OUTPUT_FLAGS = ("--json", "--markdown")


def describe_benchmark(kind: str, arguments: Sequence[str], device: torch.device) -> dict[str, Any]:
    """The head of a report: what was run, when, and on what."""
    command = f"some bench {kind} {shlex.join(drop_outputs(arguments))}".rstrip()
    packages = {name: _version(name) for name in ("triton", "transformers")}
    return {
        "benchmark": kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": describe_environment(command, describe_device(device)) | packages,
    }


def drop_outputs(arguments: Sequence[str]) -> list[str]:
    """The arguments without the names of output files, which change nothing that is measured."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in OUTPUT_FLAGS:
            next(words, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in OUTPUT_FLAGS)):
            kept.append(word)
    return kept


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_output(path: str | None, flag: str) -> Path | None:
    """Refuse a file that cannot be written before anything is measured."""
    if path is None:
        return None
    place = Path(path)
    if place.is_dir():
        raise ConfigError(f"{flag} {path!r} is a folder; name a file in it")
    if not place.parent.is_dir():
        raise ConfigError(f"{flag} {path!r} lies in a folder that does not exist; make it, or name another")
    if not os.access(place.parent, os.W_OK):
        raise ConfigError(f"{flag} {path!r} lies in a folder that cannot be written; name another")
    return place


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Write everything found so far, whole."""
    if path is not None:
        write_whole(path, json.dumps(drop_nan(report), indent=1, ensure_ascii=False) + "\n")


def append_section(path: Path | None, section: str) -> None:
    """Add a section at the end of a Markdown file, which need not exist yet."""
    if path is None:
        return
    before = path.read_text(encoding="utf-8").rstrip("\n") + "\n\n" if path.is_file() else "# Benchmarks\n\n"
    write_whole(path, before + section)

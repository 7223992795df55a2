"""What must hold of a folder at any moment, and what two folders must have in common at the end."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from some_moe.config import ConfigError
from some_moe.training.run_folder import RunFolder

TIMES = ("seconds", "compile_seconds", "phases", "tokens_per_second", "date", "created", "command")
LOCKS = (".run.lock", ".queue.lock", ".claims")  # claims tell who was killed
CHECKPOINT = {"model.safetensors", "optimizer.safetensors", "state.json"}
ENDS = {".html": "</html>", ".svg": "</svg>"}


def list_visible(folder: Path) -> dict[str, Path]:
    """Every file that a reader looks at: those that have no dot before their name, nor before that of a folder."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): path
        for path in found
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


# --- at any moment ----------------------------------------------------------------------------------------------


def find_torn(folder: Path) -> list[str]:
    """What a reader would find half-written or half-removed, a sentence each."""
    problems = []
    for name, path in list_visible(folder).items():
        try:
            read_whole(path)
        except (ValueError, SafetensorError, yaml.YAMLError) as error:
            problems.append(f"{name} is torn: {str(error)[:200]}")
    for place in folder.rglob("checkpoints/step-*"):
        problems += find_torn_checkpoint(place, str(place.relative_to(folder)))
    for config in folder.rglob("config.yaml"):
        try:
            RunFolder(config.parent).read_config()
        except ConfigError as error:
            problems.append(f"{config.relative_to(folder)}: {error}")
    return problems + find_lost_figures(folder)


def read_whole(path: Path) -> None:
    """Read a file to its end, as what its name says it is."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                file.get_tensor(name)
    elif path.suffix == ".png":
        if not path.read_bytes().endswith(b"IEND\xaeB`\x82"):
            raise ValueError("no end of the picture")
    elif path.suffix == ".json":
        json.loads(path.read_text(encoding="utf-8"))
    elif path.suffix == ".yaml":
        yaml.safe_load(path.read_text(encoding="utf-8"))
    elif path.suffix == ".jsonl":
        whole = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]  # only the last line may be torn
        for line in whole:
            json.loads(line)
    elif path.suffix in ENDS and not path.read_text(encoding="utf-8").rstrip().endswith(ENDS[path.suffix]):
        raise ValueError(f"no {ENDS[path.suffix]} at its end")
    elif path.suffix == ".md" and not path.read_text(encoding="utf-8").endswith("\n"):
        raise ValueError("its last line has no end")


def find_torn_checkpoint(place: Path, name: str) -> list[str]:
    held = {path.name for path in place.iterdir()}
    if held != CHECKPOINT:
        return [f"{name} holds {', '.join(sorted(held)) or 'nothing'}"]
    state = json.loads((place / "state.json").read_text())
    return [
        f"{name}/{file} is not what its state.json vouches for"
        for file, digest in state["hashes"].items()
        if hashlib.sha256((place / file).read_bytes()).hexdigest() != digest
    ]


def find_lost_figures(folder: Path) -> list[str]:
    """Figures that an analysis names and that are not there."""
    problems = []
    for file in folder.rglob("analysis/analysis.json"):
        for figure in json.loads(file.read_text()).get("figures", []):
            lost = [figure[kind] for kind in ("png", "svg") if not (file.parent / figure[kind]).is_file()]
            problems += [f"{file.relative_to(folder)} names {name}, which is gone" for name in lost]
    return problems


# --- at the end -------------------------------------------------------------------------------------------------


def find_differences(folder: Path, undisturbed: Path) -> list[str]:
    """In what a folder differs from one that nobody disturbed, times apart, and what was left lying there."""
    here, there = list_visible(folder), list_visible(undisturbed)
    problems = [f"{name} is missing" for name in there.keys() - here.keys()]
    more = (name for name in here.keys() - there.keys() if not name.startswith("cache/"))  # it may hold more data
    problems += [f"{name} is there, and should not be" for name in more]
    for name in sorted(here.keys() & there.keys()):
        if is_compared(name) and describe(here[name]) != describe(there[name]):
            problems.append(f"{name} differs{explain(here[name], there[name])}")
    left = [path for path in folder.rglob(".*") if path.name not in LOCKS]
    return problems + [f"{path.relative_to(folder)} was left behind" for path in left]


def is_compared(name: str) -> bool:
    """What a run printed, and the command and the machine that env.json tells of, may differ."""
    return not (name.startswith("logs/") or "/logs/" in name or name.endswith("env.json"))


def describe(path: Path) -> Any:
    """A file's contents without the times in it."""
    if path.suffix == ".json":
        return drop_times(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".jsonl":
        return [drop_times(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.suffix in (".html", ".md"):
        return mask_times(path.read_text(encoding="utf-8"))
    if path.suffix == ".safetensors":  # its metadata come in any order, within a header of the same length
        header = int.from_bytes(path.read_bytes()[:8], "little")
        return json.loads(path.read_bytes()[8 : 8 + header]), path.read_bytes()[8 + header :]
    return path.read_bytes()


def drop_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: drop_times(inner) for name, inner in value.items() if name not in TIMES}
    return [drop_times(inner) for inner in value] if isinstance(value, list) else value


def mask_times(text: str) -> str:
    """A page without what it tells of times, speeds and dates; figures within it are compared as files."""
    text = re.sub(r"data:image/[^\"')]+", "PICTURE", text)
    text = re.sub(r"sha256-[A-Za-z0-9+/=]+", "HASH", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?\S*", "DATE", text)
    return re.sub(r"[\d,.]+( |&nbsp;|\u202f|\u00a0)?(ms|s|seconds|tokens/s|tokens per second|steps/s)\b", "TIME", text)


def explain(here: Path, there: Path) -> str:
    """The first place in which two files differ, where they are text."""
    if here.suffix not in (".json", ".jsonl", ".html", ".md", ".yaml"):
        return ""
    left, right = (json.dumps(describe(path), ensure_ascii=False, default=str) for path in (here, there))
    at = next((n for n, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), 0)
    return f": {left[max(0, at - 40) : at + 60]!r} instead of {right[max(0, at - 40) : at + 60]!r}"

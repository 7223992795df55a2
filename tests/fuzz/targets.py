"""What is read by what: each target is a kind of file, how it is mutated, and the commands that read it."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import material
from tests.fuzz.mutators import (
    AS_JSON,
    AS_JSONL,
    AS_TENSORS,
    AS_TEXT,
    AS_TOKENIZER,
    AS_YAML,
    NUMBERS,
    SCALARS,
    TEXTS,
    Mutator,
    mutate_bytes,
    show,
)

MARKER = "zqcanaryqz"  # stands in files outside of the case; it may be in nothing that a command says or writes
ANYWHERE = ("",)  # a command that may write wherever it was told to
ONE_STEP = ["--train.max-steps", "1", "--train.epochs", "1"]


Damage = Callable[[Path, Random, list[str]], str]
"""Changes the case's folder, and may add words to the command; tells what it did."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line, how often it is run beside others, and what it may write."""

    words: tuple[str, ...]
    share: float = 1.0
    part: str = "finished"  # whose folder `run` is
    writes: tuple[str, ...] = ()  # beginnings of paths


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of input."""

    name: str
    weight: float
    damage: Damage
    commands: Sequence[Command]
    parts: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # libraries without which it is left out
    is_light: bool = True  # whether it does without a run that was analysed, which takes seconds to make
    patience: float = 10.0  # seconds
    is_own: bool = False  # the reader's own files: a link among them may lead anywhere


def command(text: str, share: float = 1.0, part: str = "finished", writes: str = "") -> Command:
    return Command(words=tuple(text.split()), share=share, part=part, writes=tuple(writes.split()))


EVAL = [command("eval run", 3), command("eval run --json --checkpoint last"), command("eval run --seq-lens 8,24", 0.5),
        command("eval run --adapt", 0.5), command("adapt run --stream source.txt --chunk-tokens 400", 0.3),
        command("eval run --trigram --split valid", 0.5)]  # fmt: skip
GENERATE = [
    command("generate run --max-tokens 3", 2),
    command("generate run --max-tokens 2 --prompt Once --temperature 0"),
]
TRACE = [command("trace run cat", 1, writes="run/trace.html"), command("trace run cat --json", 0.5)]
RESUME = [command("train --resume run", 3, "half", "run/")]
GO_BACK = [command("train --resume run/checkpoints/step-5", 0.5, writes="run/")]
FINISHED = [command("train --resume run", 0.5, writes="run/")]
PAGES = "run/report.html run/report.md run/report-figures"
REPORT = [command("report run --no-analyze", 3, writes=PAGES)]
DRAWN = [command("report run --no-analyze", 0.3, "half", PAGES)]  # without an analysis the report draws its own curve
COLLECT = [command("analyze run --collect-only --max-tokens 60", 0.7, writes="run/analysis")]
DRAW = [command("analyze run --draw-only --no-guilds", 1, writes="run/analysis"),
        command("analyze run --no-guilds --max-tokens 60", 1, writes="run/analysis")]  # fmt: skip
INIT = [Command(words=("train", "--config", "run/config.yaml", "--init-from", "run", "--out", "new", *ONE_STEP),
                share=0.5, writes=("new/",))]  # fmt: skip
AFRESH = [Command(words=("train", "--config", "run/config.yaml", "--out", "new", *ONE_STEP), writes=("new/",))]
MODEL = EVAL + GENERATE + TRACE
GROWN = [command("eval branch", 1, "grown"), command("generate branch --max-tokens 2", 1, "grown"),
         command("merge branch --out both", 1, "grown", "both"),
         command("train --resume branch", 0.5, "grown", "branch/"),
         command("eval branch --data source.txt --favour 1", 1, "grown"),
         command("report branch --no-analyze", 1, "grown", PAGES.replace("run/", "branch/"))]  # fmt: skip
COMPARE = [command("experiments compare"), command("experiments compare --json"), command("experiments compare A1")]
QUEUE = [
    Command(words=("experiments", "run", *material.QUEUE, "--dry-run", *more), part="queue")
    for more in ((), ("--json",))
]
JOIN = [
    Command(words=("experiments", "run", "--join", "--out", "out", "--dry-run", *more), part="queue")
    for more in ((), ("--json",))
]


# --- damage -------------------------------------------------------------------------------------------------


def in_file(
    pattern: str, mutator: Mutator, *, links: float = 0.06, forge: bool = False, is_text: bool = False
) -> Damage:
    """Mutate one file that fits `pattern`, once or a few times; or put something else in its place.

    forge: renew the digests that a forger would renew. is_text: of which the reader may have gigabytes.
    """

    def damage(case: Path, rng: Random, words: list[str]) -> str:  # noqa: ARG001
        path = rng.choice(sorted(case.glob(pattern)))
        name = path.relative_to(case).as_posix()
        if rng.random() < links:
            return f"{name}: {replace(path, case.parent / 'canary', rng, is_text=is_text)}"
        data, told = path.read_bytes(), []
        for _ in range(1 if rng.random() < 0.8 else rng.randrange(2, 5)):
            data, what = mutator(data, rng)
            told.append(what)
        path.write_bytes(data)
        if forge and rng.random() < 0.75:
            renew_digests(path.parent)
            told.append("digest renewed")
        return f"{name}: {', '.join(told)}"

    return damage


def renew_digests(checkpoint: Path) -> None:
    """Make state.json vouch for the files as they are now, as whoever forges a checkpoint does."""
    file = checkpoint / "state.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    for name in state["hashes"]:
        state["hashes"][name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    file.write_text(json.dumps(state, indent=1), encoding="utf-8")


def replace(path: Path, canary: Path, rng: Random, *, is_text: bool = False) -> str:
    """Put a link, a pipe, a folder, nothing or too much in the place of a file or folder."""
    kind = rng.choice([*REPLACED, *(["unreadable"] if os.geteuid() else []), *([] if is_text else [LONG])])
    data = path.read_bytes() if path.is_file() else b""
    if kind == "unreadable":
        path.chmod(0)
        return kind
    if kind == "a link to a good file outside" and path.is_dir():
        shutil.copytree(path, canary / path.name)
    elif kind == "a link to a good file outside":
        (canary / path.name).write_bytes(tell_secret(path.name, data))
    _remove(path)
    if kind == LONG:
        with path.open("wb") as file:
            file.write(data)
            file.truncate(3 * 2**30)
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif link := REPLACED[kind]:
        devices = find_devices(canary.parent)
        path.symlink_to(link.replace("CANARY", str(canary)).replace("NAME", path.name).replace("/dev", str(devices)))
    return kind


def find_devices(place: Path) -> Path:
    """A folder with devices like those in /dev, which a program that replaces them may replace."""
    return (place.parents[1] / "devices").resolve()


LONG = "3 GiB long, with holes"
REPLACED = {
    "a link to a good file outside": "CANARY/NAME", "a link to a text outside": "CANARY/secret.txt",
    "a link to itself": "NAME", "a link to nowhere": "nowhere/at/all", "a link to /dev/zero": "/dev/zero",
    "a link to /dev/null": "/dev/null", "a pipe": "", "a folder": "", "gone": "",
}  # fmt: skip
"""What can stand in the place of a file, and for links where they lead."""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def tell_secret(name: str, data: bytes) -> bytes:
    """The same file with the marker in each of its words, so that whoever shows any of it is found out."""
    if name.endswith(".html"):
        return data.replace(b"<h1>", f"<h1>{MARKER}".encode())
    if name.endswith((".json", ".jsonl")) and name != "tokenizer.json":
        with contextlib.suppress(ValueError):
            lines = [data] if name.endswith(".json") else data.splitlines()
            return b"\n".join(json.dumps(_tell(json.loads(line))).encode() for line in lines)
    if name.endswith(".yaml"):
        return data.replace(b"name: smoke", f"name: {MARKER}".encode())
    return data


def _tell(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tell(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_tell(inner) for inner in value]
    return f"{value}{MARKER}" if isinstance(value, str) and " " in value else value


LURES = ["../canary/secret.txt", "../canary", "/dev/stdin", "DEVICES/zero", "run/../../canary/secret.txt", "link.txt",
         "hf:nobody/nothing", "/proc/self/environ", "/"]  # fmt: skip


def lure(case: Path, rng: Random, words: list[str]) -> str:  # noqa: ARG001
    """A config whose paths lead out of the folder, as a stranger's may."""
    file = case / "run/config.yaml"
    text = file.read_text(encoding="utf-8")
    place = rng.choice([*LURES, str(case.parent / "canary/secret.txt")])
    place = place.replace("DEVICES", str(find_devices(case.parent)))
    if place == "link.txt":
        (case / place).symlink_to(case.parent / "canary/secret.txt")
    field, old = rng.choice(
        [("source", "source: source.txt"), ("tokenizer", "tokenizer: null"), ("name", "name: smoke")]
    )
    file.write_text(text.replace(old, f"{field}: {place}", 1), encoding="utf-8")
    if rng.random() < 0.5:
        shutil.rmtree(case / "cache")
    return f"run/config.yaml: {field} → {place.replace(str(case.parent), '…')}"


OUTPUTS = ["trace.html", ".trace.html.tmp", "report.html", ".report.html.tmp", "report.md", "report-figures",
           "analysis", "result.json", ".result.json.tmp", "metrics.jsonl", "samples.jsonl", ".run.lock",
           "keys/step-6.safetensors", "keys/.step-6.safetensors.tmp", "checkpoints/step-6", "checkpoints/.step-6.tmp",
           "analysis/collected.safetensors", "analysis/figures"]  # fmt: skip


def in_the_way(case: Path, rng: Random, words: list[str]) -> str:  # noqa: ARG001
    """Something where a command will write: a link that leads out, above all."""
    path = case / "run" / rng.choice(OUTPUTS)
    if path.parent.name == "analysis" and not path.parent.is_dir():
        path.parent.mkdir()
    if os.path.lexists(path):
        _remove(path)
    link = rng.choice(["CANARY/secret.txt", "CANARY/new", "CANARY", "DEVICES/null", "DEVICES/full", "folder", "pipe"])
    if link == "folder":
        path.mkdir()
    elif link == "pipe":
        os.mkfifo(path)
    else:
        places = {"CANARY": case.parent / "canary", "DEVICES": find_devices(case.parent)}
        name, _, rest = link.partition("/")
        path.symlink_to(places[name] / rest)
    return f"{path.relative_to(case)}: {link if link in ('folder', 'pipe') else f'a link to {link}'}"


STRANGE = ["step-x", "step-9", "step-007", "step-" + "9" * 30, "step-9.safetensors", "step-zz.0.safetensors", "é",
           "step-²", ".step-9.tmp", "step--1", "selectors.py", "a\nb", os.fsdecode(b"\xff"), ".run.lock"]  # fmt: skip


def in_folder(case: Path, rng: Random, words: list[str]) -> str:  # noqa: ARG001
    """A folder of a run replaced, or with something strange in it."""
    run = case / "run"
    newest = max((run / "checkpoints").iterdir())
    path = rng.choice([run / "checkpoints", newest, run / "keys", run / "analysis", run])
    path = path if path.exists() else newest
    name = path.relative_to(case).as_posix()
    if rng.random() < 0.5 and path != run:
        return f"{name}: {replace(path, case.parent / 'canary', rng)}"
    new = rng.choice(STRANGE)
    target = path / new
    if target.exists():
        _remove(target)
    kind = rng.choice(["folder", "empty", "pipe", "link", "copy"])
    if kind == "folder":
        target.mkdir()
    elif kind == "empty":
        target.write_bytes(b"")
    elif kind == "pipe":
        os.mkfifo(target)
    elif kind == "link":
        target.symlink_to(case.parent / "canary")
    elif kind == "copy":
        shutil.copytree(newest, target)
    return f"{name}: {new!r} in it, {kind}"


def in_source(suffix: str, mutator: Mutator) -> Damage:
    """A source of text mutated, and named to the command."""

    def damage(case: Path, rng: Random, words: list[str]) -> str:
        told = in_file(f"texts{suffix}" if suffix != "/" else "texts/*", mutator, is_text=True)(case, rng, words)
        path = "texts" if suffix == "/" else f"texts{suffix}"
        words += ["--data", path] if words[0] == "eval" else ["--data.source", path]
        return told

    return damage


def in_own_tokenizer(case: Path, rng: Random, words: list[str]) -> str:
    words += ["--data.tokenizer", "tokenizer.json", "--data.source", "texts.txt"]
    return in_file("tokenizer.json", AS_TOKENIZER)(case, rng, words)


def in_cache(case: Path, rng: Random, words: list[str]) -> str:
    """The cache: a file of it, or the folder."""
    if rng.random() < 0.1:
        return f"cache: {replace(case / 'cache', case.parent / 'canary', rng)}"
    if rng.random() < 0.1:
        (folder,) = rng.sample(sorted((case / "cache").iterdir()), 1)
        return f"{folder.relative_to(case)}: {replace(folder, case.parent / 'canary', rng)}"
    name, mutator = rng.choice([("about.json", AS_JSON), ("*.ids", mutate_bytes), ("*.starts", mutate_bytes)])
    return in_file(f"cache/*/{name}", mutator)(case, rng, words)


def within(pack: str, mutator: Mutator) -> Mutator:
    """What a packed file holds mutated, or its packing."""

    def mutate(data: bytes, rng: Random) -> tuple[bytes, str]:
        packing = import_module(pack)
        try:
            inner = packing.decompress(data)
        except Exception:  # it was mutated before
            return mutate_bytes(data, rng)
        if rng.random() < 0.5:
            return mutate_bytes(data, rng)
        inner, told = mutator(inner, rng)
        return packing.compress(inner), f"within it {told}"

    return mutate


SHOWN = ("name", "samples.jsonl", "analysis/guilds.json", "analysis/analysis.json", "env.json")
"""Where a run's folder has words that a page shows."""


def show_text(case: Path, words: list[str], where: str, text: str) -> str:
    """Put a text where a page shows it: in the words of `trace`, or into the run's folder."""
    if words[0] == "trace":
        words[2] = to_word(text)
        return f"the text {show(text)}"
    file = case / "run" / ("config.yaml" if where == "name" else where)
    if where == "name":
        config = file.read_text(encoding="utf-8")
        file.write_text(config.replace("name: smoke", f"name: {json.dumps(text)}", 1), encoding="utf-8")
    elif where == "samples.jsonl":
        file.write_text(json.dumps({"step": 4, "text": text}) + "\n", encoding="utf-8")
    else:
        kept = ("png", "svg", "verdict", "name" if where == "analysis/analysis.json" else "")

        def fill(value: Any, key: str = "") -> Any:
            if isinstance(value, dict):
                return {name: fill(inner, name) for name, inner in value.items()}
            if isinstance(value, list):
                return [fill(inner, key) for inner in value]
            return text if isinstance(value, str) and key not in kept else value

        file.write_text(json.dumps(fill(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")
    return f"{where}: the text {show(text)}"


def hostile_text(case: Path, rng: Random, words: list[str]) -> str:
    """Hostile text wherever a page shows some."""
    text = (rng.choice(TEXTS) + rng.choice(["", "cat ", *TEXTS])).replace("\0", "")
    return show_text(case, words, rng.choice(SHOWN), text)


# --- command lines ------------------------------------------------------------------------------------------

TYPED = {
    "train": ["--config", "run/config.yaml", "--out", "new", *ONE_STEP],
    "eval": ["run"],
    "generate": ["run", "--max-tokens", "2"],
    "analyze": ["run", "--collect-only", "--max-tokens", "40"],
    "trace": ["run", "cat"],
    "report": ["run", "--no-analyze"],
    "experiments list": [],
    "experiments show": ["A1"],
    "experiments run": [*material.QUEUE, "--dry-run"],
    "experiments compare": [],
    "bench layer": ["--shapes", "smoke", "--tokens", "8", "--variants", "nothing"],
    "bench step": ["--shape", "smoke", "--batch", "0"],
    "adapt": ["run", "--stream", "source.txt", "--chunk-tokens", "400"],
}
WORDS = ["auto", "run", "run/config.yaml", "source.txt", "texts", "best", "last", "0,1", "1,1", ",", "A1", "smoke",
         "cpu", "cuda", "out.html", "run/checkpoints/step-6", "canary"]  # fmt: skip
# Typed, a path may be written to: these lead out of the case, where a program that runs as root could do harm.
VALUES = [
    word for word in (*TEXTS, *SCALARS, *map(str, NUMBERS), *WORDS) if ".." not in word and not word.startswith("/")
]
VALUES += ["DEVICES/null", "DEVICES/zero", "DEVICES/full"]


def to_word(text: str) -> str:
    """The text as a command line can hold it: without NUL, and half characters only where a byte is no UTF-8."""
    return re.sub("[\ud800-\udc7f\udd00-\udfff]", "\udcff", text.replace("\0", ""))


def type_words(case: Path, rng: Random, words: list[str]) -> str:
    """A command line of real options with hostile values."""
    about = json.loads((case.parents[2] / "about.json").read_text(encoding="utf-8"))
    shares = [4, 4, 4, 1, 4, 2, 1, 1, 1, 1, 1, 1, 1]
    name = rng.choices(list(TYPED), shares)[0]
    typed = list(TYPED[name])
    options = about["options"][name] + (about["settings"] if name == "train" else [])
    options = [option for option in options if option not in ("--draw-only", "--compile", "--settings")]
    new: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = to_word(rng.choice(VALUES)).replace("DEVICES", str(find_devices(case.parent)))
        kind = rng.randrange(8)
        if kind == 0 and typed:
            new.append(value)
            typed[rng.randrange(len(typed))] = value
        elif kind == 1:
            new.append(value)
            typed.insert(rng.randrange(len(typed) + 1), value)
        else:
            new += (
                [f"{rng.choice(options)}={value}"] if options and kind == 2 else [rng.choice(options or ["--x"]), value]
            )
            typed += new[-2:] if kind != 2 else new[-1:]
    if name == "experiments run":
        typed.append("--dry-run")
    if name == "train" and not any(word.startswith(("--train.max-steps", "--train.epochs")) for word in new):
        typed += ONE_STEP
    words[:] = [*name.split(), *typed]
    return f"{name}: {' '.join(map(show, new))}"


# --- all of them --------------------------------------------------------------------------------------------

ON_RUN = EVAL + GENERATE + TRACE + RESUME + GO_BACK + REPORT + COLLECT + INIT
ON_TEXT = EVAL[:1] + AFRESH


def of_run(
    name: str, weight: float, pattern: str, mutator: Mutator, commands: Sequence[Command], **more: Any
) -> Target:
    """A file of a run folder, which may be a stranger's."""
    options = {option: more.pop(option) for option in ("links", "forge") if option in more}
    return Target(
        name=name, weight=weight, damage=in_file(f"run/{pattern}", mutator, **options), commands=commands, **more
    )


def of_analysis(name: str, weight: float, pattern: str, mutator: Mutator, **more: Any) -> Target:
    return of_run(name, weight, f"analysis/{pattern}", mutator, REPORT, needs=ANALYSIS, **more)


def of_mine(name: str, weight: float, damage: Damage, commands: Sequence[Command], *parts: str, **more: Any) -> Target:
    """The reader's own file."""
    return Target(name=name, weight=weight, damage=damage, commands=commands, parts=parts, is_own=True, **more)


ANALYSIS = ("matplotlib", "sklearn", "umap")
PACKED_LINES = within("zstandard", AS_JSONL)
TARGETS = [
    of_run("config", 16, "config.yaml", AS_YAML, ON_RUN + AFRESH + FINISHED),
    of_run("state", 10, "checkpoints/*/state.json", AS_JSON, MODEL + RESUME * 2 + GO_BACK + INIT + COLLECT),
    of_run(
        "model",
        11,
        "checkpoints/*/model.safetensors",
        AS_TENSORS,
        MODEL + RESUME + GO_BACK + COLLECT + INIT,
        forge=True,
    ),
    of_run("optimizer", 6, "checkpoints/*/optimizer.safetensors", AS_TENSORS, RESUME + GO_BACK + EVAL[:1], forge=True),
    of_run("metrics", 7, "metrics.jsonl", AS_JSONL, RESUME + REPORT + DRAWN + GO_BACK * 2),
    of_run("samples", 3, "samples.jsonl", AS_JSONL, RESUME + REPORT + GO_BACK),
    of_run("result", 7, "result.json", AS_JSON, FINISHED * 3 + REPORT + GO_BACK),
    of_run("env", 2, "env.json", AS_JSON, REPORT),
    Target(name="grown", weight=4, damage=in_file("branch/grown.json", AS_JSON), commands=GROWN),
    Target(
        name="branch",
        weight=4,
        damage=in_file("branch/checkpoints/*/model.safetensors", AS_TENSORS, forge=True),
        commands=GROWN,
    ),
    of_run("tokenizer", 7, "tokenizer.json", AS_TOKENIZER, MODEL + RESUME + GO_BACK + REPORT + COLLECT),
    of_run("keys", 3, "keys/*", AS_TENSORS, REPORT + RESUME + GO_BACK),
    of_run("drawing", 0.1, "**/*.safetensors", AS_TENSORS, DRAW, needs=ANALYSIS, is_light=False, patience=60),
    of_analysis("analysis", 4, "analysis.json", AS_JSON, is_light=False),
    of_analysis("guilds", 4, "guilds.json", AS_JSON),
    of_analysis("collected", 3, "collected.safetensors", AS_TENSORS),
    of_analysis("movement", 3, "movement.json", AS_JSON, is_light=False),
    of_analysis("movement-page", 1, "movement.html", AS_TEXT, is_light=False),
    of_analysis("figure", 1, "figures/*.png", mutate_bytes, links=0.3),
    Target(name="folder", weight=3, damage=in_folder, commands=ON_RUN),
    Target(name="outputs", weight=3, damage=in_the_way, commands=TRACE + REPORT + DRAWN * 3 + COLLECT + RESUME),
    Target(name="lure", weight=2, damage=lure, commands=ON_RUN + AFRESH),
    Target(name="pages", weight=3, damage=hostile_text, commands=REPORT + TRACE * 3, needs=("matplotlib",)),
    Target(name="cache", weight=4, damage=in_cache, commands=EVAL + AFRESH + COLLECT),
    of_mine("results", 4, in_file("results/*.json", AS_JSON), COMPARE, "results"),
    of_mine("queue", 2, in_file("out/queue.json", AS_JSON), QUEUE),
    of_mine("plan", 2, in_file("out/joined.json", AS_JSON), JOIN),
    of_mine("record", 2, in_file("results/*.json", AS_JSON), QUEUE),
    of_mine("job", 2, in_file("out/*/*.*", AS_JSON), QUEUE),
    of_mine("txt", 2, in_source(".txt", AS_TEXT), ON_TEXT, "sources"),
    of_mine("jsonl", 3, in_source(".jsonl", AS_JSONL), ON_TEXT, "sources"),
    of_mine("json", 2, in_source(".json", AS_JSON), ON_TEXT, "sources"),
    of_mine("gz", 2, in_source(".txt.gz", within("gzip", AS_TEXT)), ON_TEXT, "sources", patience=30),
    of_mine("zst", 3, in_source(".jsonl.zst", PACKED_LINES), ON_TEXT, "sources", needs=("zstandard",), patience=30),
    of_mine("parquet", 2, in_source(".parquet", mutate_bytes), ON_TEXT, "sources", needs=("pyarrow",)),
    of_mine("texts", 2, in_source("/", AS_TEXT), ON_TEXT, "sources"),
    of_mine("own-tokenizer", 2, in_own_tokenizer, AFRESH, "sources"),
    # `--tasks` with a name that is not ours reads all of lm-eval's, more than ten thousand files.
    of_mine("words", 10, type_words, [Command(words=(), writes=ANYWHERE)], "results", "sources", patience=40),
]
BY_NAME = {target.name: target for target in TARGETS}

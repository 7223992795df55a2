"""What is mutated: small good files of every kind that the program reads, made once by the program itself.

A folder of material has one folder a part; a case is some parts laid over each other, with the case's folder as the
current one. All paths in the files are relative, and what differs from run to run (seconds) is set to constants.
"""

import contextlib
import gzip
import io
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.pages import list_programs

TINY = {
    "model.d_model": 8, "model.num_layers": 2, "model.num_heads": 2, "model.vocab_size": 280, "model.num_experts": 4,
    "model.d_ffn": 8, "model.top_k": 2, "data.source": "source.txt", "data.seq_len": 16, "data.batch_size": 8,
    "data.train_subset_size": 24, "data.val_subset_size": 4, "train.epochs": 2, "train.max_steps": 6,
    "train.save_every": 1, "train.keep_last": 2, "train.snapshot_every": 2, "train.log_every": 1,
    "train.sample_tokens": 2, "train.device": "cpu",
}  # fmt: skip
QUEUE = ["A1", "--data", "source.txt", "--out", "out", "--results", "results"]
QUEUE += [
    f"--{name.replace('_', '-')}={value}"
    for name, value in TINY.items()
    if name not in ("data.source", "train.epochs", "train.max_steps")
]
QUEUE += ["--train.max-steps=2", "--train.global-batch-tokens=null"]
COMMANDS = ("train", "eval", "generate", "analyze", "trace", "report", "experiments list", "experiments show",
            "experiments run", "experiments compare", "bench layer", "bench step", "grow", "merge",
            "prune", "adapt")  # fmt: skip
CLOCKED = re.compile(r'"((?:compile_|tokens_per_)?seconds?)": [-+0-9.e]+')
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe"
    "0def46b80000000049454e44ae426082"
)
HAS_PARQUET, HAS_FIGURES = find_spec("pyarrow") is not None, find_spec("matplotlib") is not None
HAS_ZSTD = find_spec("zstandard") is not None


def say(*words: str) -> str:
    """Run a command that must succeed; return what it prints."""
    from some_moe.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    if code:
        raise RuntimeError(f"some {' '.join(words)}: {err.getvalue()}")
    return out.getvalue()


def tell_stories(number: int) -> list[str]:
    return [f"Once there was cat number {i}. It sat on mat {7 * i % 13} and slept." for i in range(number)]


def make_material(folder: Path, *, analyse: bool = True) -> None:
    """Make every part below `folder`, which must be the current one and $SOME_CACHE its cache.

    analyse: whether the run is, which takes seconds; without it a few lines stand for what `some analyze` writes.
    """
    Path("source.txt").write_text("\n\n".join(tell_stories(60)), encoding="utf-8")
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    say("train", "--preset", "smoke", "--out", "run", *settings)
    _make_queue()
    programs = _make_pages(analyse)
    say("grow", "run", "--data", "source.txt", "--out", "branch", "--experts", "2", "--steps", "2")
    for file in Path().rglob("*.json*"):
        file.write_text(CLOCKED.sub(r'"\1": 0.25', file.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "run/env.json").write_text(json.dumps(ENVIRONMENT, indent=1), encoding="utf-8")
    _lay_out(folder)
    options = {command: _list_options(say(*command.split(), "--help")) for command in COMMANDS}
    about = {"programs": programs, "options": options, "settings": _list_settings()}
    Path("about.json").write_text(json.dumps(about), encoding="utf-8")


ENVIRONMENT = {
    "some_moe": "0.1.0", "commit": "0" * 40, "python": "3.11.7", "torch": "2.11.0", "platform": "Linux",
    "device": "x86_64 CPU, 2 cores", "cpu_threads": 1, "command": "some train",
}  # fmt: skip


def _make_queue() -> None:
    """A queue of one job that is done, as `some experiments run` leaves it, without its process."""
    from some_moe.commands.training import take_settings
    from some_moe.lab.jobs import make_jobs
    from some_moe.lab.joined import PLAN, Plan
    from some_moe.lab.measured import write_record
    from some_moe.lab.registry.selection import select_experiments
    from some_moe.training.run_folder import RunFolder

    overrides, _ = take_settings(QUEUE, "some")
    (job,) = make_jobs(select_experiments(["A1"]), [0], {**overrides, "data.source": "source.txt"})
    folder = RunFolder(Path("out") / job.name)
    say(*job.training_words, "--out", str(folder))
    write_record(Path("results") / f"{job.name}.json", job, folder, at_once=1)
    line = {
        "name": job.name,
        "experiment": "A1",
        "seed": 0,
        "state": "done",
        "reason": "",
        "seconds": 1.0,
        "at_once": 1,
    }
    (Path("out") / PLAN).write_text(
        json.dumps(vars(Plan.make([job], overrides | {"data.source": "source.txt"}, Path("out"), Path("results")))),
        encoding="utf-8",
    )
    Path("out/queue.json").write_text(json.dumps({"format_version": 1, "jobs": [line]}, indent=1), encoding="utf-8")


def _make_pages(analyse: bool) -> list[str]:
    """The analysis of the run, and pages: what they run are our own programs."""
    with Path("run/samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 4, "text": "Once upon a time.\nThe end."}) + "\n")
    say("trace", "run", "Once there was")
    programs = list_programs(Path("run/trace.html").read_text(encoding="utf-8"))
    figures = Path("run/analysis/figures")
    if analyse:
        say("analyze", "run", "--no-guilds", "--max-tokens", "100")
    else:
        say("analyze", "run", "--collect-only", "--max-tokens", "100")
        figures.mkdir()
        (figures / "loss.png").touch()
        Path("run/analysis/analysis.json").write_text(json.dumps(SLIGHT), encoding="utf-8")
    for figure in figures.iterdir():
        figure.write_bytes(PIXEL if figure.suffix == ".png" else b"<svg/>")
    Path("run/analysis/guilds.json").write_text(json.dumps(GUILDS, indent=1), encoding="utf-8")
    if HAS_FIGURES:
        say("report", "run", "--no-analyze")
        programs += list_programs(Path("run/report.html").read_text(encoding="utf-8"))
        told = Path("run/report.md").read_text(encoding="utf-8")
        if unfit := re.search(r"analysis/\w+\.json .*", told):
            raise RuntimeError(f"the material is no good: {unfit[0]}")
    for page in ("report.html", "report.md", "trace.html"):
        Path("run", page).unlink(missing_ok=True)
    return sorted(set(programs))


def _lay_out(folder: Path) -> None:
    """Part what was made: finished, half (killed before its last checkpoint), queue, results, sources."""
    shutil.rmtree("run/report-figures", ignore_errors=True)
    for part in ("common", "finished", "half", "queue", "results/results", "sources/texts"):
        Path("parts", part).mkdir(parents=True)
    shutil.copytree("run", "parts/half/run", ignore=shutil.ignore_patterns("analysis", "result.json", "step-6"))
    shutil.copytree("run", "parts/grown/run", ignore=shutil.ignore_patterns("analysis"))
    shutil.move("branch", "parts/grown/branch")
    shutil.move("run", "parts/finished/run")
    for name in ("out", "results"):
        shutil.copytree(name, f"parts/queue/{name}")
    for name in ("source.txt", "cache"):
        shutil.move(name, f"parts/common/{name}")
    published = Path(__file__).parents[2] / "results"
    for file in sorted(published.glob("*.json"), key=lambda file: file.stat().st_size)[:2]:
        shutil.copy(file, "parts/results/results")
    shutil.move("results/A1-seed0.json", "parts/results/results")
    shutil.rmtree("results")
    shutil.rmtree("out")
    stories, sources = tell_stories(40), folder / "parts/sources"
    lines = "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(stories))
    (sources / "texts.jsonl").write_text(lines, encoding="utf-8")
    (sources / "texts.txt").write_text("<|endoftext|>".join(stories), encoding="utf-8")
    (sources / "texts.json").write_text(json.dumps([json.loads(line) for line in lines.splitlines()], indent=1))
    (sources / "texts.txt.gz").write_bytes(gzip.compress("\n\n".join(stories).encode(), mtime=0))
    if HAS_ZSTD:
        import zstandard

        (sources / "texts.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    shutil.copy("parts/finished/run/tokenizer.json", sources)
    (sources / "texts/train.txt").write_text("\n\n".join(stories), encoding="utf-8")
    (sources / "texts/valid.jsonl").write_text(lines[:600].rpartition("\n")[0], encoding="utf-8")
    if HAS_PARQUET:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": stories, "id": list(range(len(stories)))})
        pyarrow.parquet.write_table(table, sources / "texts.parquet", compression="none")


def _list_options(help_text: str) -> list[str]:
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", help_text)) - {"--help"})


def _list_settings() -> list[str]:
    def walk(room: dict[str, Any], before: str) -> list[str]:
        return [
            name
            for key, value in room.items()
            for name in (walk(value, f"{before}{key}.") if isinstance(value, dict) else [f"{before}{key}"])
        ]

    config = yaml.safe_load(Path("parts/finished/run/config.yaml").read_text(encoding="utf-8"))
    return [f"--{name.replace('_', '-')}" for name in walk(config, "") if "." in name]


SLIGHT: dict[str, Any] = {
    "format_version": 1, "missing": [], "layers": [], "movement": [],
    "rules": {"generalists": "Many.", "under_used": "Few.", "hash_gini": "By hash."},
    "figures": [{"name": "loss", "title": "Loss", "caption": "It falls."}],
}  # fmt: skip
"""As little as an analysis can hold: a curve, so that reports need draw none."""
GUILDS: dict[str, Any] = {
    "level": 0.01, "split": "valid", "num_tokens": 100,
    "families": [{
        "family": "part of speech", "classes": ["noun", "verb"],
        "layers": [{
            "layer": 0, "mi_bits": 0.2, "mi_corrected_bits": 0.15, "nmi": 0.125, "p_value": 0.002,
            "null_mean_bits": 0.05, "null_high_bits": 0.07, "random_keys_nmi": [0.08, 0.1], "interval": [0.106, 0.132],
        }],
    }],
    "communities": [
        {"layer": 0, "modularity": 0.7, "null_mean": 0.01, "null_sd": 0.005, "p_value": 0.1, "groups": [[0, 1], [2]]},
    ],
    "depth": {"statement": "Fewer than three layers.", "slopes": []},
    "swap": [{"layer": 0, "loss_change": 0.1177, "interval": [0.1012, 0.1352]}],
    "guilds": [
        {
            "name": "noun (part of speech), layer 0", "layer": 0, "family": "part of speech", "class": "noun",
            "experts": [1, 3], "npmi": 0.39, "q_value": 0.006, "p_association": 0.0005,
            "random_keys": {"p_adjusted": 0.002, "own_bits": 0.1294, "random_bits": [0.01, 0.03]},
            "words": [{"text": "cat", "count": 12}], "contexts": [{"before": "the ", "word": "cat", "after": " & co"}],
            "knockout": {
                "class_change": 0.2047, "other_change": 0.005, "random_class_change": 0.0061,
                "random_other_change": 0.0337, "effect": 0.2274, "p_value": 0.001, "p_adjusted": 0.002,
                "interval": [0.2, 0.25],
            },
            "verdict": "supported", "reason": "Its experts stand out.",
        },
        {
            "name": "verb (part of speech), layer 0", "layer": 0, "family": "part of speech", "class": "verb",
            "experts": [2], "npmi": 0.2, "q_value": 0.008, "words": [], "contexts": [], "knockout": None,
            "verdict": "not supported", "reason": "Random keys do about as well.",
        },
    ],
    "passed": {"enrichment": 2, "association": 2, "random_keys": 1, "knockout": 1},
    "control": None, "notes": ["Information is counted by selection."],
}  # fmt: skip
"""The guilds that the report shows: judging real ones takes longest of all, and finds none in a model so small."""

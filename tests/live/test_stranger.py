"""A stranger's run folder can do no harm: mutated files of every kind, and everything that the page can ask of them."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from some_moe.live import watched
from tests.fuzz.mutators import AS_JSON, AS_JSONL, AS_TENSORS, AS_TOKENIZER, AS_YAML, Mutator
from tests.live.folders import Served, make_run, watching

pytest.importorskip("starlette", reason="needs the extra live")
FILES: dict[str, Mutator] = {
    "config.yaml": AS_YAML, "metrics.jsonl": AS_JSONL, "samples.jsonl": AS_JSONL, "result.json": AS_JSON,
    "env.json": AS_JSON, "grown.json": AS_JSON, "../queue.json": AS_JSON, "../sweep/space.json": AS_JSON,
    "../sweep/sweep.json": AS_JSON, "../sweep/.claims/trial-0000.1.json": AS_JSON,
    "keys/step-20.safetensors": AS_TENSORS,
    "analysis/collected.safetensors": AS_TENSORS, "tokenizer.json": AS_TOKENIZER,
}  # fmt: skip
GROWN = {"base": "../base", "base_step": 4, "base_digest": "x", "branches": [
    {"name": "law", "experts": 2, "trainability": "full"}]}  # fmt: skip
SWEEP = {"space.json": {"sweep": {"trials": 4}}, "sweep.json": {"metric": "val_loss"},
         ".claims/trial-0000.1.json": {"state": "done", "process": 1, "dead_after": 9}}  # fmt: skip
ASKED = ("/runs", "/runs/0/curve", "/runs/0/settings?against=0", "/runs/0/keys", "/runs/0/keys?step=20&fit=0",
         "/runs/0/expert?layer=1&expert=3", "/runs/0/insight", "/runs/0/branches")  # fmt: skip
PATIENCE_SECONDS = 10


@pytest.fixture(scope="module")
def folder(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all that a page reads."""
    from some_moe.glass.inspect.collect import collect_run

    patch = pytest.MonkeyPatch()
    patch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "live-cache"))
    path = tmp_path_factory.mktemp("strange") / "run"
    shutil.copytree(trained, path)
    collect_run(trained, max_tokens=200).save(path / "analysis" / "collected.safetensors")
    made = make_run(path.parent / "made", layers=2, experts=6, width=32)
    shutil.copytree(made / "keys", path / "keys", dirs_exist_ok=True)
    shutil.rmtree(made)
    (path / "grown.json").write_text(json.dumps(GROWN), encoding="utf-8")
    (path.parent / "queue.json").write_text(
        json.dumps({"jobs": [{"name": "run", "state": "failed"}]}), encoding="utf-8"
    )
    make_run(path.parent / "sweep" / "trial-0000")
    (path.parent / "sweep" / ".claims").mkdir()
    trial = {"name": "trial-0000", "state": "done", "value": 2.0, "settings": {"model.top_k": 2}, "reason": ""}
    for name, told in SWEEP.items():
        text = json.dumps(told | ({"trials": [trial], "best": trial} if name == "sweep.json" else {}))
        (path.parent / "sweep" / name).write_text(text, encoding="utf-8")
    patch.undo()
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    patch = pytest.MonkeyPatch()
    patch.setattr(watched, "FRESH_SECONDS", 0.0)  # every question looks anew
    with watching(folder, folder.parent / "sweep") as found:
        yield found
    patch.undo()


def ask_all(served: Served, what: str) -> None:
    for path in ASKED:
        begin = time.monotonic()
        status, found = served.ask(path)
        assert status in (200, 400, 404), (path, status, found, what)
        assert time.monotonic() - begin < PATIENCE_SECONDS, (path, what)
    events = served.events("/events?run=0")
    assert next(events)[0] == "hello"
    assert next(events)[0] == "runs"
    events.close()


def try_cases(served: Served, folder: Path, name: str, count: int) -> None:
    file, mutate = folder / name, FILES[name]
    whole = file.read_bytes()
    for case in range(count):
        random = Random(f"{name} {case}")
        data, what = mutate(whole, random)
        try:
            file.write_bytes(data)
            ask_all(served, f"{name}, case {case}: {what}")
        finally:
            file.write_bytes(whole)


def test_the_folder_is_shown_as_it_is(served: Served) -> None:
    for path in ASKED:
        assert served.ask(path)[0] == 200, path
    assert served.ask("/runs/0/insight")[1]["kinds"]
    assert [plan["kind"] for plan in served.ask("/runs")[1]["queues"]] == ["queue", "sweep"]


@pytest.mark.parametrize("name", FILES)
def test_a_few_mutated_files_do_no_harm(served: Served, folder: Path, name: str) -> None:
    try_cases(served, folder, name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_many_mutated_files_do_no_harm(served: Served, folder: Path, name: str) -> None:
    try_cases(served, folder, name, 80)

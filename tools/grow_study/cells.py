"""One cell, from its name to its JSON; and all of them, side by side."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from some_moe.errors import FailureError
from some_moe.system.files import write_whole
from some_moe.system.processes import take_lock
from tools.grow_study.cost import Clock
from tools.grow_study.plan import METHODS, Cell, Study, choose_rate, choose_rates, list_cells, read_cells

FLOAT_BYTES = 4
# Children are forked from a process that has imported everything and touched no GPU: a start takes no seconds.
CHILDREN = get_context("forkserver")
IMPORTED = ["tools.grow_study.dense", "tools.grow_study.library", "some_moe.growth", "some_moe.training.loop"]


def run_cell(study: Study, cell: Cell) -> None:
    """Do a cell and write its result."""
    from some_moe.environment import describe_program
    from tools.grow_study import dense, library
    from tools.grow_study.bench import Bench, make_base, row_of

    began = time.perf_counter()
    result = make_base(study, cell.family, cell.seed) if cell.method == "base" else None
    bench = Bench(study, cell.family, cell.seed)
    if result is not None:
        found: dict[str, Any] = {
            "rows": [row_of(0.0, bench.score(bench.base))],
            "trained": result["trainable_parameters"],
        }
        found |= {"stored": found["trained"], "seconds": result["seconds"], "steps": result["steps"]}
    elif cell.method in ("joint", "joint-dense"):
        found = dense.learn_jointly(bench, cell.family, cell.rate)
    elif cell.family != "dense":
        grown = choose_rate("grow", read_cells(study.out), study.seeds[0]) if cell.method == "gate" else cell.rate
        assert grown is not None
        found = library.run(bench, cell.method, cell.rate, grown)
    elif cell.method == "arithmetic":
        found = dense.learn_apart(bench, cell.rate)
    elif cell.method == "adapters":
        found = dense.learn_adapters(bench, cell.rate)
    else:
        found = dense.learn_in_turn(bench, cell.method, cell.rate)
    sizes = {
        f"{name}_bytes": FLOAT_BYTES * found.pop(name) for name in ("trained", "stored", "told_stored") if name in found
    }
    record = {
        "cell": cell.name,
        "method": cell.method,
        "family": cell.family,
        "seed": cell.seed,
        "rate": cell.rate,
        **sizes,
        "steps": bench.steps,
        "seconds": round(bench.seconds, 2),  # of learning
        "cell_seconds": round(time.perf_counter() - began, 2),
        **found,
        "size": {"name": study.size, **asdict(study.sizes)},
        "data": dict(study.digests),
        "texts": {"base": study.base, "domains": study.domains, "unseen": study.unseen},
        "machine": bench.machine.describe(),
        "processes": study.processes,
        "command": study.command,
        **describe_program(),
    }
    write_whole(study.out / f"{cell.name}.json", json.dumps(record, indent=1))


def find_ready(study: Study, running: set[Cell]) -> tuple[list[Cell], int]:
    """Cells that can begin now, and how many are known that are not done.

    Bases come first, then methods in the order in which they were named, of each the longest first.
    """
    results = read_cells(study.out)
    wanted = {cell: needed for cell, needed in list_cells(study, results) if not study.is_done(cell)}
    for name in study.methods:
        is_tuned = bool(choose_rates(name, results, study.seeds[0]))
        for seed in study.seeds:
            # A base is needed as a run, and its figures too, without which no rate can be chosen.
            base = Cell("base", seed, family=METHODS[name].family)
            is_left = not is_tuned or any((cell.method, cell.seed) == (name, seed) for cell in wanted)
            if is_left and not is_made(study, base):
                wanted[base] = []
    ready = [
        cell for cell, needed in wanted.items() if cell not in running and all(is_made(study, one) for one in needed)
    ]
    clock, place = make_clock(study), {name: at for at, name in enumerate(("base", *study.methods))}
    return sorted(ready, key=lambda cell: (place[cell.method], -clock.expect(cell))), len(wanted)


def make_clock(study: Study) -> Clock:
    num_texts = len(study.base) + len(study.domains) + len(study.unseen) + 1
    return Clock(read_cells(study.out), study.sizes, len(study.domains), num_texts)


def is_made(study: Study, cell: Cell) -> bool:
    return study.is_done(cell) and (cell.method != "base" or study.has_base(cell.family, cell.seed))


def run_all(study: Study, say: Callable[[str], None], *, minutes: float | None = None) -> None:
    """Do every cell that is not done, each in a process of its own, as many side by side as the study says.

    minutes: begin none that would not end by then, as far as others tell; what was not begun is for the next time.
    """
    lock = take_lock(study.work / "lock", f"the study in {str(study.work)!r} is running already; wait until it ends")
    began = time.monotonic()
    children: dict[Cell, BaseProcess] = {}
    failed: set[Cell] = set()
    CHILDREN.set_forkserver_preload(IMPORTED)
    try:
        while True:
            ready, left = find_ready(study, set(children) | failed)
            if minutes is not None:
                rest, clock = 60 * minutes - (time.monotonic() - began), make_clock(study)
                ready = [cell for cell in ready if clock.expect(cell) <= rest]
            for cell in ready[: study.processes - len(children)]:
                children[cell] = start(study, cell)
            if not children:
                break
            connection.wait([child.sentinel for child in children.values()])
            for cell in [cell for cell, child in children.items() if not child.is_alive()]:
                code = children.pop(cell).exitcode
                done = code == 0 and study.is_done(cell)
                failed |= set() if done else {cell}
                say(f"{time.monotonic() - began:6.0f} s  {cell.name}: {'done' if done else f'failed ({code})'}")
    finally:
        for child in children.values():
            child.kill()
            child.join()
        lock.release()
    if failed:
        logs = study.work / "logs"
        raise FailureError(
            f"{len(failed)} cells failed ({sorted(failed, key=str)[0].name} …); see {logs}, and run it again"
        )
    say(f"{left} known cells are left; run it again" if left else f"every cell is done, in {study.out}")


def start(study: Study, cell: Cell) -> BaseProcess:
    (study.work / "logs").mkdir(exist_ok=True)
    child = CHILDREN.Process(target=run_logged, args=(study.work, cell), name=cell.name)
    child.start()
    return child


def run_logged(work: Path, cell: Cell) -> None:
    """Do a cell in this process, with all that it says in a file."""
    import torch

    log = os.open(work / "logs" / f"{cell.name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    study = Study.load(work)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // study.processes))
    try:
        run_cell(study, cell)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None

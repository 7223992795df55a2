"""How a base and its branches share a text: losses, who serves what, and how the favour moves both."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from some_moe.config import RunConfig
from some_moe.data.batches import Rows, encode_rows
from some_moe.data.sources import read_texts
from some_moe.growth.keys import write_rows
from some_moe.growth.library import BranchedLibrary
from some_moe.growth.opening import GROWN, open_base, read_grown, set_favour
from some_moe.model.transformer import SomeLM
from some_moe.system.files import inside, write_whole
from some_moe.training.evaluate import evaluate, evaluation_batches, forward
from some_moe.training.machine import choose_machine
from some_moe.training.run_folder import RunFolder
from some_moe.training.runs import Run

FAVOURS = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0)
CURVE_ROWS = 64


def keep_rows(base: Run, keep: str | Path | None) -> tuple[Rows, str]:
    """Text of the kind that must not be lost, and a word on it."""
    data = base.config.data
    if keep is None:
        length = min(data.seq_len, 256)
        rows = write_rows(base.model, length, base.config.train.seed, base.tokenizer.vocab_size)
        return rows, f"text that {base.path.name} writes itself"
    return read_rows(keep, base), str(keep)


def measure_curve(run: Run, keep: str | Path | None) -> None:
    """Losses and shares at several favours, into grown.json: what the page shows."""
    grown = read_grown(run.path)
    machine = choose_machine(run.config.train)
    base = open_base(run.path, grown)
    kept = first_rows(keep_rows(base, keep)[0])
    new = first_rows(run.read_data().valid)
    model, sizes = machine.adopt(run.model), run.tokenizer.token_bytes()
    set_favour(model, -grown.favour)
    curve, before = [], 0.0
    for favour in FAVOURS:
        set_favour(model, favour - before)
        before = favour
        point: dict[str, float] = {"favour": favour}
        for name, rows in (("new", new), ("kept", kept)):
            found = evaluate(model, rows, run.config, sizes, machine.device)
            point |= {f"{name}_loss": found.loss, f"{name}_share": served(model, rows, run.config)[-1]}
        curve.append(point)
    record = RunFolder(run.path).read_object(GROWN) or {}
    write_whole(inside(run.path, GROWN), json.dumps(record | {"curve": curve}, indent=1))


def first_rows(rows: Rows) -> Rows:
    count = min(CURVE_ROWS, len(rows))
    return Rows(rows.ids[: rows.starts[count]], rows.starts[: count + 1])


@torch.no_grad()
def served(model: SomeLM, rows: Rows, config: RunConfig) -> list[float]:
    """How much of a text, over all layers, is the base's and each branch's, in order: by gates."""
    library = model.layers[0].library
    sizes = [library.up.shape[0]]
    if isinstance(library, BranchedLibrary):
        sizes += [len(branch.near) for branch in library.branches]  # type: ignore[arg-type]
    given, tokens = torch.zeros(sum(sizes), dtype=torch.float64), 0
    for batch in evaluation_batches(rows, config).epoch(0, shuffle=False):
        batch = batch.to(model.embedding.weight.device)
        for routing in forward(model, batch, config, sums=False).routings:
            assert routing.experts is not None
            assert routing.gates is not None
            experts, gates = (part[batch.real].cpu() for part in (routing.experts, routing.gates))
            given += torch.bincount(experts.flatten(), gates.double().flatten(), minlength=len(given))
            tokens += len(gates)
    _, *branches = (float(part.sum() / tokens) for part in torch.split(given, sizes))
    return [1 - sum(branches), *branches]


def score_texts(run: Run, texts: Sequence[str | Path], *, device: str = "auto") -> list[dict[str, Any]]:
    """A record a text, as `Run.evaluate` gives it, with the share of it that each part serves."""
    has_branches = (run.path / GROWN).exists()
    names = ["base", *(branch.name for branch in read_grown(run.path).branches)] if has_branches else []
    records = []
    for text in texts:
        record = run.evaluate(data=text, device=device)
        if names:
            rows = read_rows(text, run)
            record["shares"] = dict(zip(names, served(run.model, rows, run.config), strict=True))
        records.append(record)
    return records


def read_rows(text: str | Path, run: Run) -> Rows:
    """All of a text, in rows as long as the run's."""
    data = run.config.data
    return encode_rows(read_texts(text, data), run.tokenizer, data.seq_len, split=True)

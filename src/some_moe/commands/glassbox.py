"""`some analyze`: replay a run, measure, draw, and judge its guilds."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from some_moe.cli import Parser, UsageError, on_terminal, terminal_width, write, write_json
from some_moe.config import ConfigError

if TYPE_CHECKING:  # for their names alone: a wrong option must be answered before anything heavy is loaded
    from some_moe.glass.figures.canvas import Drawing
    from some_moe.glass.inspect.collection import Collection
    from some_moe.glass.inspect.findings import Findings
    from some_moe.glass.inspect.runs import RunRecord

MAX_TOKENS = 20_000
DRAWING_LIBRARIES = ("matplotlib", "sklearn", "umap")


def analyze_run(arguments: list[str]) -> int:
    """Look inside a run."""
    options = _parse(arguments)

    from some_moe.glass.inspect.runs import read_run

    run = read_run(options.run)
    if options.control is not None:
        read_run(options.control)  # a wrong one is refused now, not after minutes of work
    folder = run.path / "analysis"
    _refuse_unwritable(folder)
    if options.collect_only:
        collection = _collect(run, options)
        return _report_collection(folder, collection, wants_json=options.json)
    record, paths = _analyze(run, folder, options)
    if options.json:
        return write_json(record)

    from some_moe.glass.page.findings_table import format_findings
    from some_moe.layout import Style

    return write(format_findings(record, paths, width=terminal_width(), style=Style(on_terminal())))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "some analyze",
        "Look inside a run: replay it on its own text, measure how its experts share the work, map its keys and their "
        "movement, and test its guilds. Works on runs that are still training, too. Writes RUN/analysis/.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--collect-only", action="store_true", help="replay the model, keep what was seen, draw later")
    parser.add_argument("--draw-only", action="store_true", help="draw what was collected before; needs no model")
    parser.add_argument("--no-guilds", action="store_true", help="leave out the guilds, which take longest")
    parser.add_argument("--control", metavar="RUN", help="judge another run's guilds too, such as one with still keys")
    parser.add_argument("--split", default="valid", choices=("train", "valid", "test"), help="what is replayed")
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"tokens to replay (default {MAX_TOKENS:,})"
    )
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best (default), last, or step-N")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse(arguments)
    if options.collect_only and options.draw_only:
        raise UsageError("--collect-only and --draw-only exclude each other; give one of them, or neither for both")
    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens {options.max_tokens} is out of range; use 1 or more")
    if not options.collect_only:
        absent = [name for name in DRAWING_LIBRARIES if find_spec(name) is None]
        if absent:
            raise UsageError(
                f"drawing needs {', '.join(absent)}, which is not installed; run pip install 'some-moe[analysis]', "
                "or use --collect-only"
            )
    return options


def _refuse_unwritable(folder: Path) -> None:
    """Say so before any work is done; nothing is made here, so that a refused command leaves no trace."""
    place = folder if folder.exists() else folder.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"{str(folder)!r} cannot be written; make room for it, or analyze a copy of the run")


def _collect(run: "RunRecord", options: argparse.Namespace) -> "Collection":
    """Replay the run's model."""
    from some_moe.glass.inspect.collect import collect_run
    from some_moe.training.runs import default_device

    return collect_run(
        run.path,
        split=options.split,
        max_tokens=options.max_tokens,
        checkpoint=options.checkpoint,
        device=default_device(),
    )


def _report_collection(folder: Path, collection: "Collection", *, wants_json: bool) -> int:
    meta, path = collection.meta, folder / "collected.safetensors"
    if wants_json:
        return write_json(meta | {"file": str(path)})
    lines = [f"step {meta['step']:,} on {meta['num_tokens']:,} tokens of {meta['split']}: loss {meta['loss']:.4f}"]
    return write("\n".join([*lines, *meta["notes"], str(path)]) + "\n")


def _analyze(run: "RunRecord", folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[Path]]:
    """Everything in turn. Returns what analysis.json holds, with the guilds in short, and the paths written."""
    from some_moe.files import write_whole
    from some_moe.glass.inspect.findings import look_inside
    from some_moe.glass.inspect.projections import FEWEST_KEYS, umap_in_background

    with ExitStack() as stack:
        start_umap = None
        if run.has_keys and run.config.model.num_experts >= FEWEST_KEYS:
            start_umap = stack.enter_context(umap_in_background())
        collection = _find_collection(run, folder, options)
        folder.mkdir(exist_ok=True)
        findings = look_inside(run, collection)
        wait_for_umap = _map_keys(findings, start_umap)
        figures = _save_figures(_draw(findings, wait_for_umap), folder / "figures")
    record = findings.to_dict() | {"figures": figures}
    paths = [folder / "analysis.json", folder / "figures"]
    movement = folder / "movement.html"
    movement.unlink(missing_ok=True)
    if findings.movements:
        from some_moe.glass.figures import choose_colours
        from some_moe.glass.page.animation import render_movement

        write_whole(movement, render_movement(run.name, findings.movements, choose_colours(findings)))
        paths.append(movement)
    write_whole(folder / "analysis.json", json.dumps(record, indent=1, allow_nan=False))
    if collection is not None:
        paths.append(folder / "collected.safetensors")
        if not options.no_guilds and findings.layers:
            _say("testing the guilds")
            record["guilds"] = _judge_guilds(run, collection, options.control)
            paths.append(folder / "guilds.json")
    return record, paths


def _find_collection(run: "RunRecord", folder: Path, options: argparse.Namespace) -> "Collection | None":
    """What was collected before, or is collected now; None where the run has no model to replay."""
    if options.draw_only:
        from some_moe.glass.inspect.collection import Collection

        return Collection.load(folder / "collected.safetensors")
    if not run.checkpoints or not (run.path / "tokenizer.json").is_file():
        return None
    _say("replaying the model")
    with _leave_a_core_free():
        return _collect(run, options)


@contextmanager
def _leave_a_core_free() -> Iterator[None]:
    """Let torch use one thread less, for UMAP's process needs a core: threads without one wait for each other."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_threads - 1))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


Maps = Callable[[], "list[Any]"]


def _map_keys(findings: "Findings", start_umap: Callable[[Sequence[Any]], Maps] | None) -> Maps | None:
    """Map the keys by PCA and t-SNE, while UMAP works elsewhere. Returns what waits for UMAP's maps."""
    from some_moe.glass.inspect.projections import map_keys

    if not findings.has_keys:
        return None
    assert findings.collection is not None
    keys = list(findings.collection.keys)
    wait = (lambda: map_keys(keys, "umap")) if start_umap is None else start_umap(keys)
    _say("mapping the keys")
    for method in ("pca", "tsne"):
        findings.maps[method] = map_keys(keys, method)
    return wait


def _draw(findings: "Findings", wait_for_umap: Maps | None) -> "Iterator[Drawing]":
    """Every figure; the one that waits for UMAP comes last."""
    from some_moe.glass.figures import draw_figures, draw_key_maps

    _say("drawing")
    yield from draw_figures(findings)
    if wait_for_umap is not None:
        for method in ("pca", "tsne"):
            yield draw_key_maps(findings, method)
        findings.maps["umap"] = wait_for_umap()
        yield draw_key_maps(findings, "umap")


def _save_figures(drawings: "Iterator[Drawing]", folder: Path) -> list[dict[str, str]]:
    """Save each figure and list them; figures of an earlier analysis that are no longer drawn are removed."""
    listed, kept = [], set()
    for drawing in drawings:
        png, svg = drawing.save(folder)
        kept |= {png, svg}
        listed.append(
            {
                "name": drawing.name,
                "title": drawing.title,
                "caption": drawing.caption,
                "png": f"figures/{png.name}",
                "svg": f"figures/{svg.name}",
            }
        )
    for old in [*folder.glob("*.png"), *folder.glob("*.svg")]:
        if old not in kept:
            old.unlink()
    return listed


def _judge_guilds(run: "RunRecord", collection: "Collection", control: str | None) -> dict[str, Any]:
    """Write RUN/analysis/guilds.json, and return it in a few numbers."""
    from some_moe.glass.inspect.guilds import analyze_guilds

    found = analyze_guilds(run.path, collection, control=None if control is None else Path(control))
    supported = [guild["name"] for guild in found["guilds"] if guild["verdict"] == "supported"]
    return {"candidates": len(found["guilds"]), "supported": supported, "level": found["level"]}


def _say(what: str) -> None:
    """Tell who waits at a terminal what is going on."""
    if sys.stderr.isatty():
        print(f"{what} …", file=sys.stderr)

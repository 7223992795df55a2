"""Look inside a run from Python: `some_moe.analyze`, `some_moe.trace` and `some_moe.report`.

The commands of the same names parse their options, call these functions, and print what they return.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from some_moe.config import ConfigError, TrainConfig
from some_moe.glass import MAX_TOKENS
from some_moe.glass.inspect import traces
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.forms import ANALYSIS, read_part
from some_moe.glass.inspect.projections import FEWEST_KEYS, METHODS, map_keys, umap_in_background
from some_moe.glass.inspect.runs import RunRecord, read_run
from some_moe.glass.page.blocks import Block, Figure, Fold, Gallery, Notice, Page, Text, TraceView
from some_moe.glass.page.comparison import compare, make_comparison
from some_moe.glass.page.inside import Analysis, describe_analysis, find_age, list_missing, read_analysis
from some_moe.glass.page.markdown import render_markdown
from some_moe.glass.page.pages import final_figures, make_page
from some_moe.glass.page.render import describe_movement, render_movement, render_page, render_trace
from some_moe.glass.results import Result
from some_moe.system.files import clear_scratch, inside, write_whole
from some_moe.system.progress import Say, say_nothing
from some_moe.system.staging import own_place, publish, stage, writing
from some_moe.training.run_folder import RunFolder

if TYPE_CHECKING:  # torch and matplotlib are loaded when they are needed, and bad input is refused before
    from some_moe.glass.figures.canvas import Drawing
    from some_moe.glass.inspect.findings import Findings
    from some_moe.training.runs import Run

    AnyRun = str | Path | Run

OUTDATED = ("figures/*.png", "figures/*.svg", "movement.*")  # what an analysis may have, and the next one not
DRAWING_LIBRARIES = ("matplotlib", "sklearn", "umap")
PACKAGES = {"sklearn": "scikit-learn", "umap": "umap-learn"}  # what others are called where they are installed from


def _find_place(run: "AnyRun") -> Path:
    return Path(run) if isinstance(run, str | Path) else run.path


def _find_branches(run: "AnyRun", base: str | Path | None, favour: float | None) -> dict[str, Any]:
    """How the branches of a run, where it has any, are opened: as is asked for, or as `load` was told."""
    told = {} if isinstance(run, str | Path) else run.opens_branches
    asked = {
        "base": told.get("base") if base is None else base,
        "favour": told.get("favour") if favour is None else favour,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _refuse_absent(libraries: Sequence[str], task: str, cure: str = "") -> None:
    absent = [name for name in libraries if find_spec(name) is None]
    if absent:
        packages = [PACKAGES.get(name, name) for name in absent]
        cure = f"run pip install {' '.join(packages)}{cure}"
        raise ConfigError(f"{task} needs {', '.join(absent)}, which is not installed; {cure}")


# --- analyze ------------------------------------------------------------------------------------------------


def analyze(
    run: "AnyRun",
    *,
    collect_only: bool = False,
    draw_only: bool = False,
    guilds: bool = True,
    control: "AnyRun | None" = None,
    split: str = "valid",
    data: str | Path | None = None,
    max_tokens: int = MAX_TOKENS,
    checkpoint: str = "best",
    device: str = "auto",
    out: str | Path | None = None,
    base: str | Path | None = None,
    favour: float | None = None,
    say: Say = say_nothing,
) -> Result:
    """Replay a run on text, measure its experts, map its keys, judge its guilds; write RUN/analysis/.

    run: a run folder, or what `load` gave; finished, killed or still training. collect_only: replay, and draw later;
    draw_only: draw what was collected before, without a model. guilds: whether to judge them, which takes longest;
    control: another run whose guilds are judged too. split, max_tokens, checkpoint: what is replayed, up to how many
    tokens, and with which of best, last and step-N. data: other text instead of a split: a file, a folder, or
    hf:OWNER/NAME. device: where it is replayed (auto, cpu, cuda, cuda:N). out:
    another folder than RUN/analysis/, in which reports do not look. base, favour: of a run with branches, as `load`
    takes them. say: is told what is going on.

    Returns what analysis.json holds as `findings`, with the guilds in a few numbers, and what was written as `paths`;
    with collect_only the findings are what is known of the pass: step, split, loss and the like.
    """
    if collect_only and draw_only:
        raise ConfigError("collect_only and draw_only exclude each other; give one of them, or neither for both")
    if not collect_only:
        _refuse_absent(DRAWING_LIBRARIES, "drawing", ", or use --collect-only")
    record, twin = read_run(_find_place(run)), None if control is None else _find_place(control)
    if twin is not None:
        read_run(twin)  # a wrong one is refused now, not after minutes of work
    branches = _find_branches(run, base, favour)
    folder = inside(record.path, "analysis") if out is None else Path(out)
    cure = "name a folder of your own with --out"
    place = folder if folder.exists() else folder.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"{str(folder)!r} cannot be written; {cure}")
    can_replay = bool(record.checkpoints) and (record.path / "tokenizer.json").is_file() and not draw_only
    if can_replay or collect_only:
        RunFolder(record.path).choose_checkpoint(checkpoint)  # one that is not there is refused now
    inside(folder, "figures")
    collected = folder / "collected.safetensors"
    collection = Collection.load(inside(folder, collected.name)) if draw_only else None
    if collection is not None:
        collection.refuse_other_model(record.config.model)

    import torch

    from some_moe.glass.inspect.collect import collect_run
    from some_moe.training.machine import choose_machine

    where = choose_machine(TrainConfig(device=device)).device
    chosen: dict[str, Any] = {"split": split, "data": data, "max_tokens": max_tokens, "checkpoint": checkpoint}
    chosen["device"] = where
    replay = partial(collect_run, record.path, **chosen, **branches)
    if collect_only:  # nothing is drawn, so that nothing that draws is needed
        say("replaying the model …")
        seen = replay()
        with stage(folder, cure) as scratch:
            seen.save(scratch / collected.name)
            publish(scratch, folder)
        meta = seen.meta
        title = f"step {meta['step']:,} on {meta['num_tokens']:,} tokens of {meta['split']}: loss {meta['loss']:.4f}"
        notes, findings = list(map(Notice, meta["notes"])), meta | {"file": str(collected)}
        return Result(title=title, findings=findings, paths=(collected,), blocks=notes)

    from some_moe.glass.figures import choose_colours
    from some_moe.glass.inspect.findings import look_inside
    from some_moe.glass.inspect.guilds import analyze_guilds

    wants_umap = record.has_keys and record.config.model.num_experts >= FEWEST_KEYS
    with umap_in_background() if wants_umap else nullcontext() as start_umap:
        if can_replay:
            say("replaying the model …")
            # UMAP's process needs a core: threads without one wait for each other.
            num_threads = torch.get_num_threads()
            torch.set_num_threads(max(1, num_threads - 1))
            try:
                collection = replay()
            finally:
                torch.set_num_threads(num_threads)
        insight = look_inside(record, collection)
        with stage(folder, cure) as scratch:
            if collection is not None and can_replay:
                collection.save(scratch / collected.name)
            figures = [drawing.file(scratch / "figures") for drawing in _draw(insight, start_umap, say)]
            found = insight.to_dict() | {"figures": figures}
            if insight.movements:
                moved = describe_movement(insight.movements, choose_colours(insight))
                write_whole(scratch / "movement.json", json.dumps(moved, separators=(",", ":"), allow_nan=False))
                write_whole(scratch / "movement.html", render_movement(record.name, moved))
            write_whole(scratch / "analysis.json", json.dumps(found, indent=1, allow_nan=False))
            publish(scratch, folder, last="analysis.json", outdated=OUTDATED)
    paths = [folder / "analysis.json", folder / "figures"]
    paths += [folder / "movement.html"] if insight.movements else []
    if collection is not None:
        paths.append(collected)
        if guilds and insight.layers:
            say("testing the guilds …")
            judged = analyze_guilds(record.path, collection, control=twin, **branches)
            place = own_place(folder, "guilds.json")
            with writing(place):
                write_whole(place, json.dumps(judged, indent=1, allow_nan=False))
            supported = [guild["name"] for guild in judged["guilds"] if guild["verdict"] == "supported"]
            found["guilds"] = {"candidates": len(judged["guilds"]), "supported": supported, "level": judged["level"]}
            paths.append(place)
    drawn = Analysis(folder=folder, record=found).figures()
    fold = [Fold(f"{len(drawn)} figures", [Gallery(drawn)])] if drawn else []
    title, blocks = describe_analysis(found)
    return Result(title=title, findings=found, paths=tuple(paths), blocks=blocks, notebook=fold)


def _draw(findings: "Findings", start_umap: Callable[..., Any] | None, say: Say) -> "Iterator[Drawing]":
    """Every figure. The map by UMAP comes last, for UMAP works elsewhere while the others are made."""
    from some_moe.glass.figures import choose_colours, draw_figures
    from some_moe.glass.figures.keys import draw_key_map

    keys = [] if findings.collection is None or not findings.has_keys else list(findings.collection.keys)
    wait = start_umap(keys) if keys and start_umap is not None else lambda: map_keys(keys, "umap")
    if keys:
        say("mapping the keys …")
        findings.maps.update({method: map_keys(keys, method) for method in ("pca", "tsne")})
    say("drawing …")
    yield from draw_figures(findings)
    for method in METHODS if keys else ():
        if method == "umap":
            findings.maps[method] = wait()
        yield draw_key_map(findings.maps[method], findings.layers, choose_colours(findings))


# --- trace --------------------------------------------------------------------------------------------------


def trace(
    run: "AnyRun",
    text: str,
    *,
    layers: Sequence[int] | None = None,
    checkpoint: str = "best",
    device: str = "auto",
    html: str | Path | bool = False,
    base: str | Path | None = None,
    favour: float | None = None,
) -> Result:
    """Let a run read `text` once, and record which experts each token uses. Keys stay still.

    run: a run folder, of which `checkpoint` (best, last or step-N) is opened on `device` (auto, cpu, cuda, cuda:N), or
    what `load` gave. layers: these SoME layers only. html: where a page goes that can be explored; True: to
    RUN/trace.html, where that may be written. base, favour: of a run with branches, as `load` takes them.
    """
    place = own_place(_find_place(run), "trace.html") if html is True else Path(html) if html else None
    from some_moe.training.runs import load

    loaded = load(run, checkpoint=checkpoint, base=base, favour=favour) if isinstance(run, str | Path) else run
    if loaded is not run:  # and it was not refused: torch is loaded now
        from some_moe.training.machine import choose_machine

        loaded.model.to(choose_machine(TrainConfig(device=device)).device)
    found = traces.trace(loaded, text, layers)
    blocks: list[Block] = [TraceView(found)]
    if html is True and place is not None and not os.access(place.parent, os.W_OK):
        blocks.append(Notice(f"No page was written, for {str(place)!r} may not be; name another place with --html."))
        place = None
    if place is not None:
        with writing(place):
            write_whole(place, render_trace(found))
    loss = "" if found.loss is None else f", loss {found.loss:.4f} nats per token"
    title = f"{found.run}, step {found.step:,}: {len(found.tokens)} tokens{loss}"
    return Result(title=title, findings=found.to_dict(), paths=(place,) if place else (), blocks=blocks)


# --- report -------------------------------------------------------------------------------------------------


def report(
    runs: "AnyRun | Sequence[AnyRun]",
    *,
    out: str | Path | None = None,
    analyze: bool = True,
    base: str | Path | None = None,
    favour: float | None = None,
    say: Say = say_nothing,
) -> Result:
    """Write a run as one page (RUN/report.html and report.md), or several as a comparison (./report.html).

    runs: one or several, each a run folder or what `load` gave. out: another place for the page, a name that ends in
    .html; the Markdown lies beside it. analyze: whether a run that was not analysed since its last checkpoint is
    analysed first; base, favour: of one run with branches, as `load` takes them. say: is told what is going on.

    Returns every run's final figures, and what is missing, as `findings`, and the two files as `paths`.
    """
    if out is not None and not str(out).endswith(".html"):
        raise ConfigError(f"{str(out)!r} is not a page; give a name that ends in .html")
    _refuse_absent(["matplotlib"], "a report")
    several = runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    if len(several) > 1 and (base is not None or favour is not None):
        raise ConfigError("--base and --favour go with one run; report on each run with branches by itself")
    places = [_find_place(run) for run in several]
    if not places:
        raise ConfigError("no run is given; name at least one to report on")
    resolved = [place.resolve() for place in places]
    for place in places:
        if resolved.count(place.resolve()) > 1:
            raise ConfigError(f"{str(place)!r} is given twice; name each run once")
    records = [read_run(place) for place in places]
    page = _find_own_page(Path() if len(records) > 1 else records[0].path) if out is None else Path(out)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in letters that the figures' font lacks
        if len(records) > 1:
            return _report_several(records, page)
        failure = _renew_analysis(records[0], say, _find_branches(several[0], base, favour)) if analyze else []
        return _report_one(records[0], page, failure)


def _find_own_page(folder: Path) -> Path:
    """report.html in a folder, where neither it nor its figures are links that lead out, or pipes."""
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{str(folder)!r} may not be written; name a page of your own with --out")
    clear_scratch(folder)
    figures = [f"report-figures/{file.name}" for file in inside(folder, "report-figures").glob("*")]
    for name in ("report.md", *figures):
        own_place(folder, name)
    return own_place(folder, "report.html")


def _renew_analysis(run: RunRecord, say: Say, branches: dict[str, Any]) -> list[str]:
    """Analyse the run if that was not done since its newest checkpoint, or at another favour than is asked for; return
    why it was not possible, if so."""
    if not run.checkpoints:  # there is nothing to replay
        return []
    found = read_part(run.path, "analysis.json", ANALYSIS, [])
    favour = (found.get("collected") or {}).get("favour") if found else None
    if found is not None and not find_age(run, found) and branches.get("favour") in (None, favour):
        return []
    say(f"analysing {run.path} first")
    _refuse_absent(DRAWING_LIBRARIES, "drawing", ", or use --no-analyze")
    try:
        analyze(run.path, say=say, **branches)
    except ConfigError as error:  # its data may have gone: the report then shows what the folder itself holds
        return [f"The analysis could not be made: {error}."]
    return []


def _report_one(run: RunRecord, out: Path, failure: list[str]) -> Result:
    from some_moe.glass.figures.curves import draw_loss

    analysis = read_analysis(run)
    missing = list_missing(run, analysis) + failure
    curves = analysis.figures("loss")
    if not curves and (run.steps or run.evaluations):
        curves = [_save_drawing(draw_loss(run), out)]
    return _write_both(make_page(run, analysis, curves, missing), out, {run.name: final_figures(run)}, missing)


def _report_several(runs: Sequence[RunRecord], out: Path) -> Result:
    from some_moe.glass.figures.curves import draw_losses, draw_sizes

    compared = compare(runs)
    drawings = [draw_losses(compared), draw_sizes(compared)]
    figures = [_save_drawing(drawing, out) for drawing in drawings if drawing is not None]
    missing = [f"{one.label}: {sentence}" for one in compared for sentence in one.run.missing]
    return _write_both(make_comparison(compared, figures), out, {one.label: one.figures for one in compared}, missing)


def _save_drawing(drawing: "Drawing", out: Path) -> Figure:
    """Save a figure beside the page, in PAGE-figures/, and return it as a part of the page."""
    with writing(out):
        return Figure(drawing.save(out.with_name(f"{out.stem}-figures"))[0], drawing.title, drawing.caption)


def _write_both(page: Page, out: Path, figures: dict[str, Any], missing: list[str]) -> Result:
    """Write the page and its Markdown twin."""
    paths = (out, out.with_suffix(".md"))
    with writing(out):
        write_whole(paths[0], render_page(page))
        write_whole(paths[1], render_markdown(page, out.parent))
    return Result(
        title=f"{page.kicker}: {page.title}",
        findings={"runs": figures, "missing": missing},
        paths=paths,
        blocks=[Text(page.summary)],
        notebook=page.sections[0].blocks,
    )

"""`some report`: a run as a page, or several beside each other."""

import contextlib
import io
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from some_moe.cli import Parser, UsageError, write
from some_moe.commands.tracing import write_page
from some_moe.config import ConfigError

if TYPE_CHECKING:  # for their names alone: a wrong option must be answered before anything heavy is loaded
    from some_moe.glass.figures.canvas import Drawing
    from some_moe.glass.inspect.runs import RunRecord
    from some_moe.glass.page.blocks import Figure, Page


def write_report(arguments: list[str]) -> int:
    """Write a run, or a comparison of runs, as HTML and as Markdown."""
    parser = Parser(
        "some report",
        "Write a run as one page (RUN/report.html and report.md), or several runs as a comparison (./report.html). "
        "A run that was not analysed since its last checkpoint is analysed first.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument("--out", metavar="F.html", help="where the page goes; the Markdown lies beside it")
    parser.add_argument("--no-analyze", action="store_true", help="show what there is, and analyse nothing")
    options = parser.parse(arguments)
    if options.out is not None and not options.out.endswith(".html"):
        raise UsageError(f"--out {options.out} is not a page; give a name that ends in .html")
    if options.out is not None and not Path(options.out).absolute().parent.is_dir():
        raise UsageError(f"--out {options.out} lies in a folder that does not exist; make the folder first")
    if find_spec("matplotlib") is None:
        raise UsageError("a report needs matplotlib, which is not installed; run pip install 'some-moe[analysis]'")

    from some_moe.glass.inspect.runs import read_run

    refuse_repeated(options.runs)
    runs = [read_run(path) for path in options.runs]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in letters that the figures' font lacks
        if len(runs) == 1:
            return report_one(
                runs[0], Path(options.out or runs[0].path / "report.html"), analyze=not options.no_analyze
            )
        return report_several(runs, Path(options.out or "report.html"))


def refuse_repeated(paths: list[str]) -> None:
    seen: set[Path] = set()
    for path in paths:
        place = Path(path).resolve()
        if place in seen:
            raise UsageError(f"{path!r} is given twice; name each run once")
        seen.add(place)


# --- one run ------------------------------------------------------------------------------------------------


def report_one(run: "RunRecord", out: Path, *, analyze: bool) -> int:
    """Write RUN/report.html and report.md; first the analysis, where it is missing or old."""
    from some_moe.glass.page.inside import list_missing, make_inside, read_analysis
    from some_moe.glass.page.pages import make_page

    failure = run_analysis(run) if analyze and needs_analysis(run) else None
    analysis = read_analysis(run.path)
    missing = list_missing(run, analysis)
    if failure is not None:
        missing.append(f"The analysis could not be made: {failure}.")
    curve = analysis.figure("loss")
    if curve is None and (run.steps or run.evaluations):
        from some_moe.glass.figures.curves import draw_loss

        curve = save_drawing(draw_loss(run), out)
    return write_both(make_page(run, curve, make_inside(run, analysis), missing), out)


def needs_analysis(run: "RunRecord") -> bool:
    """Whether RUN/analysis is missing or older than the newest checkpoint. A run without one has nothing to replay."""
    if not run.checkpoints:
        return False
    found = run.path / "analysis" / "analysis.json"
    newest = run.path / "checkpoints" / f"step-{run.checkpoints[-1]}" / "state.json"
    return not found.is_file() or found.stat().st_mtime < newest.stat().st_mtime


def run_analysis(run: "RunRecord") -> str | None:
    """Analyse the run as `some analyze` does, without its table; return why it was not possible, if so."""
    from some_moe.commands.glassbox import analyze_run

    if sys.stderr.isatty():
        print(f"analysing {run.path} first", file=sys.stderr)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            analyze_run([str(run.path)])
    except ConfigError as error:  # its data may have gone: the report then shows what the folder itself holds
        return str(error)
    return None


# --- several runs -------------------------------------------------------------------------------------------


def report_several(runs: "list[RunRecord]", out: Path) -> int:
    """Write a comparison, as HTML and as Markdown."""
    from some_moe.glass.figures.series import draw_losses, draw_sizes
    from some_moe.glass.page.comparison import compare, make_comparison, make_series

    compared = compare(runs)
    series = make_series(compared)
    drawings = [draw_losses(series), draw_sizes(series)]
    figures = [save_drawing(drawing, out) for drawing in drawings if drawing is not None]
    return write_both(make_comparison(compared, figures), out)


# --- files --------------------------------------------------------------------------------------------------


def save_drawing(drawing: "Drawing", out: Path) -> "Figure":
    """Save a figure beside the page, in PAGE-figures/, and return it as a part of the page."""
    from some_moe.glass.page.blocks import Figure

    try:
        png = drawing.save(out.with_name(f"{out.stem}-figures"))[0]
    except OSError as error:
        raise ConfigError(f"{str(out)!r} cannot be written ({error.strerror}); choose another place") from None
    return Figure(png, drawing.title, drawing.caption)


def write_both(page: "Page", out: Path) -> int:
    """Write the page and its Markdown twin, and say where they are."""
    from some_moe.glass.page.markdown import render_markdown
    from some_moe.glass.page.render import render_page

    html = render_page(page)
    write_page(out, html)
    write_page(out.with_suffix(".md"), render_markdown(page, out.parent))
    return write(f"{out} ({len(html.encode()) / 1e6:.1f} MB), and {out.with_suffix('.md')}\n")

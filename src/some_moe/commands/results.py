"""`some experiments compare`: what was published beside what was measured."""

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from some_moe.cli import Parser, UsageError, on_terminal, terminal_width, write, write_json
from some_moe.config import ConfigError
from some_moe.files import write_whole

FIGURE_KINDS = (".png", ".svg")


def compare_published(arguments: list[str]) -> int:
    """Print published figures beside measured ones."""
    parser = Parser(
        "some experiments compare",
        "Set the published figures beside the measured ones. With names every epoch is printed, without them the ends "
        "of all runs; files and --json always hold every epoch.",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="experiments or series, such as A1 or A")
    parser.add_argument("--results", metavar="DIR", default="results", help="where the results are (results)")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--markdown", metavar="F", help="write the tables to this file")
    parser.add_argument("--figure", metavar="F", help="draw published against measured losses: F.png or F.svg")
    options = parser.parse(arguments)
    markdown, figure = check_file(options.markdown, "--markdown"), _check_figure(options.figure)

    from some_moe.lab.published import compare_results, judge, read_results
    from some_moe.lab.published_tables import format_comparisons, group_comparisons
    from some_moe.layout import Style

    results, left_out = read_results(Path(options.results))
    comparisons = compare_results(results, options.names)
    if figure is not None:
        from some_moe.lab.published_figures import draw_losses

        drawing = draw_losses(group_comparisons(comparisons))
        if drawing is None:
            raise ConfigError("no published loss was measured here, so there is nothing to draw; leave --figure out")
        write_file(figure, drawing.to_bytes(figure.suffix[1:]))
    if markdown is not None:
        from some_moe.lab.published_document import write_document

        write_file(markdown, write_document(comparisons, folder=markdown.parent).encode())
    if options.json:
        verdicts = {verdict: [asdict(one) for one in found] for verdict, found in judge(comparisons).items()}
        runs = [comparison.to_dict() for comparison in comparisons]
        return write_json({"verdicts": verdicts, "runs": runs, "left_out": left_out})
    every, width, style = bool(options.names), terminal_width(), Style(on_terminal())
    return write(format_comparisons(comparisons, every_epoch=every, left_out=left_out, width=width, style=style))


# --- files ----------------------------------------------------------------------------------------------------


def check_file(name: str | None, flag: str) -> Path | None:
    """Refuse a file that cannot be written before anything else is done."""
    if name is None:
        return None
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"{flag} {name} is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{flag} {name} lies in a folder that does not exist; make the folder first")
    return path


def _check_figure(name: str | None) -> Path | None:
    path = check_file(name, "--figure")
    if path is not None:
        if path.suffix not in FIGURE_KINDS:
            raise UsageError(f"--figure {name} is not a figure; give a name that ends in .png or .svg")
        if find_spec("matplotlib") is None:
            raise UsageError("a figure needs matplotlib, which is not installed; run pip install 'some-moe[analysis]'")
    return path


def write_file(path: Path, contents: bytes) -> None:
    """Write a file whole; where that is impossible, say so in one sentence."""
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, contents)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written ({error.strerror}); choose another place") from None

"""`some trace`: the path of every token of a text, in the terminal and as a page."""

from pathlib import Path

from some_moe.cli import Parser, UsageError, on_terminal, terminal_width, write, write_json
from some_moe.config import ConfigError
from some_moe.files import write_whole


def trace_text(arguments: list[str]) -> int:
    """Show which experts each token of a text uses."""
    parser = Parser("some trace", "Show which experts each token of a text uses, layer by layer. Keys stay still.")
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("text", metavar="TEXT", help="what the model reads")
    parser.add_argument("--layers", metavar="0,2", help="these SoME layers only (default: all)")
    parser.add_argument("--html", metavar="F", help="where the page goes (default: RUN/trace.html)")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best (default), last, or step-N")
    parser.add_argument("--json", action="store_true", help="print one object; a page only where --html asks for it")
    options = parser.parse(arguments)
    layers = None if options.layers is None else parse_layers(options.layers)

    from some_moe.glass.inspect.traces import trace
    from some_moe.glass.page.render import render_trace
    from some_moe.glass.page.trace_text import format_trace
    from some_moe.layout import Style
    from some_moe.training.runs import load

    found = trace(load(options.run, checkpoint=options.checkpoint), options.text, layers)
    page = None
    if options.html or not options.json:
        page = Path(options.html or Path(options.run) / "trace.html")
        write_page(page, render_trace(found))
    if options.json:
        return write_json(found.to_dict())
    return write(format_trace(found, width=terminal_width(), style=Style(on_terminal())) + f"\nas a page: {page}\n")


def parse_layers(text: str) -> list[int]:
    """Read "0,2" as [0, 2]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--layers {text} is not a list of numbers; write it as 0,2") from None


def write_page(path: Path, text: str) -> None:
    """Write a page whole; where that is impossible, say so in one sentence."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written ({error.strerror}); choose another place") from None

"""`some trace`: the path of every token of a text, in the terminal and as a page."""

from pathlib import Path

from some_moe.cli import Parser, on_terminal, read_words, terminal_width, write, write_json
from some_moe.errors import UsageError


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

    from some_moe.glass.api import trace
    from some_moe.layout import Style

    page = options.html or (None if options.json else Path(options.run) / "trace.html")
    found = trace(options.run, read_words(options.text), layers=layers, checkpoint=options.checkpoint, html=page)
    if options.json:
        return write_json(found.findings)
    return write(found.format(width=terminal_width(), style=Style(on_terminal())))


def parse_layers(text: str) -> list[int]:
    """Read "0,2" as [0, 2]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--layers {text} is not a list of numbers; write it as 0,2") from None

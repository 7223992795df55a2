"""`some trace`: the path of every token of a text, in the terminal and as a page."""

from some_moe.cli import Parser, look, read_words, write, write_json
from some_moe.commands.training import add_branch_options
from some_moe.errors import UsageError
from some_moe.system.reading import clean


def trace_text(arguments: list[str]) -> int:
    """Show which experts each token of a text uses."""
    parser = Parser("some trace", "Show which experts each token of a text uses, layer by layer. Keys stay still.")
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("text", metavar="TEXT", help="what the model reads")
    parser.add_argument("--layers", metavar="0,2", help="these SoME layers only (default: all)")
    parser.add_argument("--html", metavar="F", help="where the page goes (default: RUN/trace.html)")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best (default), last, or step-N")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--json", action="store_true", help="print one object; a page only where --html asks for it")
    add_branch_options(parser)
    options = parser.parse(arguments)
    layers = None if options.layers is None else parse_layers(options.layers)

    from some_moe.glass.api import trace

    page = options.html or not options.json
    chosen = {name: getattr(options, name) for name in ("checkpoint", "device", "base", "favour")}
    found = trace(options.run, read_words(options.text), layers=layers, **chosen, html=page)
    return write_json(clean(found.findings)) if options.json else write(found.format(**look()))


def parse_layers(text: str) -> list[int]:
    """Read "0,2" as [0, 2]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--layers {text} is not a list of numbers; write it as 0,2") from None

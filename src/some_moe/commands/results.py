"""`some experiments compare`: what was published beside what was measured."""

from pathlib import Path

from some_moe.cli import Parser, on_terminal, terminal_width, write, write_json


def compare_published(arguments: list[str]) -> int:
    """Print published figures beside measured ones."""
    parser = Parser(
        "some experiments compare",
        "Set the published figures beside the measured ones. With names every epoch is printed, without them the ends "
        "of all runs; --json always holds every epoch. Results in DIR/published stand in the place of older ones.",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="experiments or series, such as A1 or A")
    parser.add_argument("--results", metavar="DIR", default="results", help="where the results are (results)")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse(arguments)

    from some_moe.lab.published import compare_results, judge, read_results, take_published_sizes
    from some_moe.lab.published_tables import format_comparisons
    from some_moe.layout import Style

    found, left_out = read_results(Path(options.results))
    results = take_published_sizes(found, Path(options.results))
    comparisons = compare_results(results, options.names)
    if options.json:
        judged = judge(comparisons).items()
        verdicts = {
            verdict: [{"run": run, "epochs": epochs} for run, epochs in runs.items()] for verdict, runs in judged
        }
        described = [comparison.describe() for comparison in comparisons]
        return write_json({"verdicts": verdicts, "runs": described, "left_out": left_out})
    every, width, style = bool(options.names), terminal_width(), Style(on_terminal())
    return write(format_comparisons(comparisons, left_out, every_epoch=every, width=width, style=style))

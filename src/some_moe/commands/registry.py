"""The commands that list the registry: they answer at once, and load no torch."""

from some_moe.cli import Parser, on_terminal, terminal_width, write, write_json
from some_moe.layout import Style


def list_experiments(arguments: list[str]) -> int:
    """Print every registered experiment, by series."""
    parser = Parser("some experiments list", "List every published run, study and baseline, by series.")
    parser.add_argument("--json", action="store_true", help="print an array of short objects")
    wants_json = parser.parse(arguments).json

    from some_moe.lab.listing import describe_all, format_listing

    if wants_json:
        return write_json(describe_all())
    return write(format_listing(width=terminal_width(), style=Style(on_terminal())))


def show_experiment(arguments: list[str]) -> int:
    """Print all about one experiment."""
    parser = Parser(
        "some experiments show",
        "Print one experiment: its config, what is assumed in it, its exact size, and what was published.",
    )
    parser.add_argument("name", metavar="NAME", help="a registered name, such as A1; case does not matter")
    parser.add_argument("--json", action="store_true", help="print one object")
    parsed = parser.parse(arguments)

    from some_moe.lab.card import describe, format_card
    from some_moe.lab.registry import find_experiment

    experiment = find_experiment(parsed.name)
    if parsed.json:
        return write_json(describe(experiment))
    return write(format_card(experiment, width=terminal_width(), style=Style(on_terminal())))

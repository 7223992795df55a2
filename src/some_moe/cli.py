"""The command `some`. Listings answer at once: what is heavy is imported by the command that needs it."""

import argparse
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


class UsageError(ValueError):
    """Bad input on the command line. Its message is one sentence that names the value and the cure."""


def read_numbers(flag: str, text: str, *, what: str, example: str, least: int = 0) -> list[int]:
    """Read "0,1,2", different whole numbers, as a list; what: one of them, in words."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        bound = f" from {least} on" if least else ""
        raise UsageError(f"{flag} {text!r} is not a list of whole numbers{bound}; write it like {example}")
    numbers = [int(word) for word in words]
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{flag} {text!r} names a {what} twice; name each once")
    return numbers


@dataclass(frozen=True)
class Command:
    """One command: a summary for the help, and what runs with the remaining arguments."""

    summary: str
    run: Callable[[list[str]], int]


@dataclass(frozen=True)
class Group:
    """Commands under one word."""

    summary: str
    commands: "dict[str, Command | Group]"


class Parser(argparse.ArgumentParser):
    """Arguments of one command, with errors of one sentence and no abbreviations."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action="help", help="print this help and stop")

    def error(self, message: str) -> NoReturn:
        needed = message.removeprefix("the following arguments are required: ")
        if needed != message:
            raise UsageError(f"`{self.prog}` needs {needed}; see `{self.prog} --help`")
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Parse all of `arguments`; an unknown one is named, with the nearest option."""
        options = self._option_string_actions
        end = arguments.index("--") if "--" in arguments else len(arguments)  # behind it are no options
        words: list[str] = []
        value_follows = False
        for word in arguments[:end]:
            name = word.split("=")[0]
            if value_follows and name not in options:
                words[-1] += f"={word}"  # written so, it is a value to argparse too, whatever it begins with
                value_follows = False
                continue
            is_text = not word.startswith("-") or word[1:2].isdigit() or " " in name  # -1, or "- said he"
            if not is_text and name not in options:
                raise UsageError(f"{word} is not an option of `{self.prog}`{suggest(word, [*options], self.prog)}")
            words.append(word)
            value_follows = word in options and options[word].nargs is None
        parsed, unknown = self.parse_known_args(words + arguments[end:])
        if unknown:
            raise UsageError(f"{unknown[0]!r} is one argument too many for `{self.prog}`; leave it out")
        return parsed


def list_experiments(arguments: list[str]) -> int:
    """Print every registered experiment, by series."""
    parser = Parser("some experiments list", "List every published run, study and baseline, by series.")
    parser.add_argument("--json", action="store_true", help="print an array of short objects")
    wants_json = parser.parse(arguments).json

    from some_moe.lab.listing import describe_all, format_listing
    from some_moe.layout import Style

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
    from some_moe.layout import Style

    experiment = find_experiment(parsed.name)
    if parsed.json:
        return write_json(describe(experiment))
    return write(format_card(experiment, width=terminal_width(), style=Style(on_terminal())))


def run_experiments(arguments: list[str]) -> int:
    from some_moe.commands import experiments

    return experiments.run_experiments(arguments)


def compare_experiments(arguments: list[str]) -> int:
    from some_moe.commands.results import compare_published

    return compare_published(arguments)


def train(arguments: list[str]) -> int:
    from some_moe.commands.training import train_model

    return train_model(arguments)


def evaluate(arguments: list[str]) -> int:
    from some_moe.commands.training import evaluate_run

    return evaluate_run(arguments)


def generate(arguments: list[str]) -> int:
    from some_moe.commands.training import generate_text

    return generate_text(arguments)


def analyze(arguments: list[str]) -> int:
    from some_moe.commands.glassbox import analyze_run

    return analyze_run(arguments)


def bench_layer(arguments: list[str]) -> int:
    from some_moe.commands import benchmarks

    return benchmarks.bench_layer(arguments)


def bench_step(arguments: list[str]) -> int:
    from some_moe.commands import benchmarks

    return benchmarks.bench_step(arguments)


def trace(arguments: list[str]) -> int:
    from some_moe.commands.tracing import trace_text

    return trace_text(arguments)


def report(arguments: list[str]) -> int:
    from some_moe.commands.reporting import write_report

    return write_report(arguments)


COMMANDS = Group(
    "SoME: a laboratory for self-organizing mixtures of experts",
    {
        "train": Command("train a model", train),
        "eval": Command("score a trained model on text", evaluate),
        "generate": Command("let a trained model write", generate),
        "analyze": Command("look inside a run: usage, keys, movement, guilds", analyze),
        "trace": Command("show which experts each token of a text uses", trace),
        "report": Command("write a run, or a comparison of runs, as a page", report),
        "experiments": Group(
            "the registry: published runs, studies and baselines",
            {
                "list": Command("list them all, by series", list_experiments),
                "show": Command("print all about one", show_experiment),
                "run": Command("run some of them, on any data", run_experiments),
                "compare": Command("set measured figures beside the published ones", compare_experiments),
            },
        ),
        "bench": Group(
            "how fast it is, beside what others do",
            {
                "layer": Command("one layer's experts against their peers", bench_layer),
                "step": Command("a whole training step", bench_step),
            },
        ),
    },
)
"""Every command there is. A function named here imports what it needs when it runs, never before."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without "×" gets "?", not a traceback
    try:
        code = dispatch("some", COMMANDS, arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has gone (`| head`). What is still buffered goes nowhere, so that exit cannot fail on it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except ValueError as error:
        if not is_bad_input(error):
            raise
        print(f"some: {error}", file=sys.stderr)
        return BAD_INPUT
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print("some: memory ran out; use a smaller model, fewer rows at a time, or a larger machine", file=sys.stderr)
        return FAILED


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch or Python got no memory. Torch says so in words: it need not be imported to know."""
    words = ("out of memory", "can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def dispatch(prog: str, group: Group, arguments: list[str]) -> int:
    """Run the command that the first words name, with the rest of them."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return write(format_help(prog, group))
    word, *rest = arguments
    if group is COMMANDS and word == "--version":
        from some_moe import __version__

        return write(f"some {__version__}\n")
    if word not in group.commands:
        raise UsageError(_refuse_word(prog, group, word))
    chosen = group.commands[word]
    if isinstance(chosen, Group):
        return dispatch(f"{prog} {word}", chosen, rest)
    try:
        return chosen.run(rest)
    except SystemExit as stop:  # argparse leaves this way after --help
        return stop.code if isinstance(stop.code, int) else 0


def _refuse_word(prog: str, group: Group, word: str) -> str:
    for name, inner in group.commands.items():
        if isinstance(inner, Group) and word in inner.commands:
            return f"{word!r} is not a command of `{prog}`; did you mean `{prog} {name} {word}`?"
    if word.startswith("-"):
        return f"{word} is not an option of `{prog}`{suggest(word, list(_options(group)), prog)}"
    return f"{word!r} is not a command of `{prog}`{suggest(word, list(group.commands), prog)}"


def _options(group: Group) -> dict[str, str]:
    options = {"--help": "print this help and stop"}
    if group is COMMANDS:
        options["--version"] = "print the version and stop"
    return options


def format_help(prog: str, group: Group) -> str:
    """Return the help of one level: its commands, and how to learn more."""
    options = _options(group)
    longest = max(map(len, [*group.commands, *options]))
    lines = [
        f"usage: {prog} COMMAND …",
        "",
        f"{group.summary[0].upper()}{group.summary[1:]}.",
        "",
        "commands:",
    ]
    lines += [f"  {name.ljust(longest)}  {command.summary}" for name, command in group.commands.items()]
    lines += ["", "options:"]
    lines += [f"  {name.ljust(longest)}  {meaning}" for name, meaning in options.items()]
    lines += ["", f"`{prog} COMMAND --help` says more about a command."]
    return "\n".join(lines) + "\n"


def is_bad_input(error: ValueError) -> bool:
    """Whether an error is the user's to cure; any other is a fault of ours and keeps its traceback."""
    if isinstance(error, UsageError):
        return True
    from some_moe.config import ConfigError

    return isinstance(error, ConfigError)


def suggest(word: str, known: list[str], prog: str) -> str:
    from some_moe.config import did_you_mean

    return did_you_mean(word, known) or f"; see `{prog} --help`"


def write(text: str) -> int:
    sys.stdout.write(text)
    return 0


def write_json(value: Any) -> int:
    import json

    return write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def on_terminal() -> bool:
    """Whether emphasis may be used."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def terminal_width() -> int | None:
    """Return the terminal's width, or None where stdout is a file or a pipe and nothing need be wrapped."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


if __name__ == "__main__":
    from some_moe.cli import main as run_main  # the importable copy, so that its errors are the same classes

    raise SystemExit(run_main())

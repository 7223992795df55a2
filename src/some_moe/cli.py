"""The command `some`. Listings answer at once: what is heavy is imported by the command that needs it."""

import argparse
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
from pkgutil import resolve_name
from types import FrameType
from typing import Any, NoReturn, TypeAlias

from some_moe.errors import INTERRUPTED, PIPE_CLOSED, UsageError, explain

PATIENCE_SECONDS = 5.0  # so long after Ctrl-C what does not end by itself is ended


MOST_DIGITS = 18  # of a whole number: what 64 bits hold


def read_numbers(flag: str, text: str, *, what: str, example: str, least: int = 0, most: int = 2**62) -> list[int]:
    """Read "0,1,2", different whole numbers, as a list; what: one of them, in words."""
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) if word.isdecimal() and len(word) <= MOST_DIGITS else -1 for word in words]
    if not all(least <= number <= most for number in numbers):
        bound = f" from {least} on" if least else ""
        bound = f" from {least} to {most:,}" if most < 2**62 else bound
        raise UsageError(f"{flag} {shorten(text)!r} is not a list of whole numbers{bound}; write it like {example}")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{flag} {text!r} names a {what} twice; name each once")
    return numbers


def shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}…"


def read_words(text: str) -> str:
    """Free text of the command line, which is UTF-8 whatever the locale says."""
    try:
        return os.fsencode(text).decode()
    except UnicodeEncodeError:
        return text  # it did not come from the system
    except UnicodeDecodeError:
        raise UsageError(f"{shorten(text)!a} is not UTF-8 text; convert it") from None


class Parser(argparse.ArgumentParser):
    """Arguments of one command, with errors of one sentence and no abbreviations."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action="help", help="print this help and stop")

    def error(self, message: str) -> NoReturn:
        sentence = message.replace("the following arguments are required:", f"`{self.prog}` needs")[:400]
        raise UsageError(f"{sentence}; see `{self.prog} --help`")

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


# Each word with a summary, and either the commands below it or, as "module:function", the one of
# `some_moe.commands` that runs with the remaining arguments. Nothing of it is imported before it is asked for.
Commands: TypeAlias = "dict[str, tuple[str, Commands | str]]"

OPTIONS = {"--help": "print this help and stop", "--version": "print the version and stop"}
EXIT_CODES = {
    0: "done",
    1: "it failed: no memory, a full disk, a loss that is no number",
    2: "bad input: one sentence says what, and how to mend it",
    INTERRUPTED: "interrupted; what training had done is saved",
    PIPE_CLOSED: "whoever read the output has gone",
}
SUMMARY = "SoME: a laboratory for self-organizing mixtures of experts"
COMMANDS: Commands = {
    "demo": ("train a small model on stories and show it", "first_steps:run_demo"),
    "init": ("write a commented config.yaml to begin with", "first_steps:write_config"),
    "doctor": ("what is installed, what will compute, where caches are", "first_steps:examine_machine"),
    "train": ("train a model", "training:train_model"),
    "resume": ("go on with a run that was stopped", "runs:resume_run"),
    "runs": ("list the runs in a folder", "runs:list_runs"),
    "grow": ("add experts that learn a new text; nothing old changes", "growing:grow_branch"),
    "merge": ("put what was grown side by side", "growing:merge_branches"),
    "prune": ("take a branch out again", "growing:prune_branch"),
    "export": ("write a run as a folder for transformers", "sharing:export_run"),
    "push": ("upload a run to the Hugging Face Hub", "sharing:push_run"),
    "eval": ("score a trained model on text", "training:evaluate_run"),
    "adapt": ("let keys move while they read a stream of texts", "adapting:adapt_keys"),
    "generate": ("let a trained model write", "training:generate_text"),
    "analyze": ("look inside a run: usage, keys, movement, guilds", "glassbox:analyze_run"),
    "trace": ("show which experts each token of a text uses", "tracing:trace_text"),
    "report": ("write a run, or a comparison of runs, as a page", "reporting:write_report"),
    "watch": ("show runs in the browser as they grow", "live:watch_runs"),
    "serve": ("answer OpenAI's completions API with a run", "live:serve_run"),
    "experiments": (
        "the registry: published runs, studies and baselines",
        {
            "list": ("list them all, by series", "experiments:list_experiments"),
            "show": ("print all about one", "experiments:show_experiment"),
            "run": ("run some of them, on any data", "experiments:run_experiments"),
            "submit": ("let a SLURM cluster run some of them", "experiments:submit_experiments"),
            "compare": ("set measured figures beside the published ones", "results:compare_published"),
        },
    ),
    "sweep": ("search good settings by many runs", "sweeping:sweep_settings"),
    "completion": ("a script by which a shell completes all this", "completion:write_completion"),
    "cache": (
        "prepared data, which is kept to be used again",
        {
            "list": ("list it, the last used first", "cache:list_cache"),
            "clear": ("remove it, or what was not used lately", "cache:clear_cache"),
        },
    ),
    "bench": (
        "how fast it is, beside what others do",
        {
            "layer": ("one layer's experts against their peers", "benchmarks:bench_layer"),
            "step": ("a whole training step", "benchmarks:bench_step"),
            "generate": ("text, beside transformers", "benchmarks:bench_generate"),
        },
    ),
}


def run() -> NoReturn:
    """The command as a program: one Ctrl-C ends it with its exit code, a second one at once."""
    gc.set_threshold(100_000, 50, 50)  # what is imported stays: to look for rubbish in it takes an eighth of a listing
    replace_closed_streams()
    interrupts = Interrupts()
    code = main()
    interrupts.end(code)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Here every refusal, error and interruption becomes a sentence."""
    arguments = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without "×" gets "?", not a traceback
    try:
        code = dispatch("some", SUMMARY, COMMANDS, arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        drop_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if Interrupts.noted:
            return INTERRUPTED  # some libraries answer Ctrl-C with errors of their own
        found = explain(error)
        if found is None:
            raise
        if isinstance(error, OSError) and error.filename is None:
            drop_output()
        from some_moe.system.reading import clean

        print("some:", clean(" ".join(str(found).splitlines())), file=sys.stderr)
        return found.code


class Interrupts:
    """Ctrl-C in a command that has no better answer to it: the first is an exception, the second the end.

    Code that does not listen, or swallows the exception, is ended after PATIENCE_SECONDS.
    """

    noted = False

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, self.note)
        heard, wakes = socket.socketpair()
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        self.sockets = (heard, wakes)
        threading.Thread(target=self.watch, daemon=True).start()

    def note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if Interrupts.noted:
            os._exit(INTERRUPTED)
        Interrupts.noted = True
        raise KeyboardInterrupt

    def watch(self) -> None:
        """Hear of signals even while the main thread computes outside Python."""
        while signal.SIGINT not in self.sockets[0].recv(1):
            pass
        time.sleep(PATIENCE_SECONDS)
        if signal.getsignal(signal.SIGINT) == self.note:  # else somebody answers it, as training does
            os._exit(INTERRUPTED)

    def end(self, code: int) -> NoReturn:
        """Leave; an interrupted command at once, for threads and libraries would take their time."""
        if Interrupts.noted or code == INTERRUPTED:
            sys.stderr.flush()
            os._exit(code)
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        sys.exit(code)


def replace_closed_streams() -> None:
    """Fill the places of closed streams: else the next file that is opened would take what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Written to, stdout then answers with an error, which is told; stderr is given up.
            opened = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            if opened != number:
                os.dup2(opened, number)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def drop_output() -> None:
    """What is still to be printed goes nowhere: its reader has gone, or its place is full. Exit cannot fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def dispatch(prog: str, summary: str, commands: Commands, arguments: list[str]) -> int:
    """Run the command that the first words name, with the rest of them."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return write(format_help(prog, summary, commands))
    word, *rest = arguments
    if word == "--version":
        return write(describe_version() + "\n")
    if word not in commands:
        raise UsageError(_refuse_word(prog, word, commands))
    summary, target = commands[word]
    if not isinstance(target, str):
        return dispatch(f"{prog} {word}", summary, target, rest)
    try:
        return int(resolve_name(f"some_moe.commands.{target}")(rest))
    except SystemExit as stop:  # argparse leaves this way after --help
        return stop.code if isinstance(stop.code, int) else 0


def describe_version() -> str:
    """Version and commit, and what it runs on, without loading it."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from some_moe import __version__
    from some_moe.system.processes import git_commit

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    commit = git_commit()
    built = "" if commit is None else f" (commit {commit[:12]}{'+' if commit.endswith('+') else ''})"
    return f"some {__version__}{built}, torch {torch}, Python {platform.python_version()}"


def _refuse_word(prog: str, word: str, commands: Commands) -> str:
    for name, (_, inner) in commands.items():
        if not isinstance(inner, str) and word in inner:
            return f"{word!r} is not a command of `{prog}`; did you mean `{prog} {name} {word}`?"
    if word.startswith("-"):
        return f"{word} is not an option of `{prog}`{suggest(word, list(OPTIONS), prog)}"
    return f"{word!r} is not a command of `{prog}`{suggest(word, list(commands), prog)}"


def format_help(prog: str, summary: str, commands: Commands) -> str:
    """Return the help of one level: its commands, and how to learn more."""
    longest = max(map(len, [*commands, *OPTIONS]))
    lines = [f"usage: {prog} COMMAND …", "", f"{summary[0].upper()}{summary[1:]}.", "", "commands:"]
    lines += [f"  {name.ljust(longest)}  {meaning}" for name, (meaning, _) in commands.items()]
    lines += ["", "options:", *(f"  {name.ljust(longest)}  {meaning}" for name, meaning in OPTIONS.items())]
    lines += ["", f"`{prog} COMMAND --help` says more about a command."]
    if prog == "some":
        lines += ["", "exit codes:", *(f"  {code:<{longest}}  {meaning}" for code, meaning in EXIT_CODES.items())]
    return "\n".join(lines) + "\n"


def suggest(word: str, known: list[str], prog: str) -> str:
    from some_moe.config import did_you_mean

    return did_you_mean(word, known) or f"; see `{prog} --help`"


def write(text: str) -> int:
    sys.stdout.write(text)
    return 0


def write_json(value: Any) -> int:
    import json

    in_full = "utf" in (sys.stdout.encoding or "").lower()  # else é would be printed as a question mark
    return write(json.dumps(value, indent=2, ensure_ascii=not in_full) + "\n")


def look() -> dict[str, Any]:
    """How wide a text may be and whether emphasis may be used, as the functions that format one ask for it."""
    from some_moe.layout import Style

    return {"width": terminal_width(), "style": Style(on_terminal())}


def on_terminal() -> bool:
    """Whether emphasis may be used."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def terminal_width() -> int | None:
    """Return the terminal's width, or None where stdout is a file or a pipe and nothing need be wrapped."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

"""`some completion SHELL`: what bash, zsh and fish need to complete commands, options, settings and presets."""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from pkgutil import resolve_name
from typing import NamedTuple, get_args

from some_moe.cli import COMMANDS, OPTIONS, Commands, Parser, write

PROBE = "--model.top-k=1"  # a setting: where it does not reach the parser, the command takes settings
INSTALL = {
    "bash": "some completion bash > ~/.local/share/bash-completion/completions/some",
    "zsh": "some completion zsh > ~/.zfunc/_some  (with ~/.zfunc in fpath before compinit)",
    "fish": "some completion fish > ~/.config/fish/completions/some.fish",
}


class Option(NamedTuple):
    name: str
    meaning: str
    values: tuple[str, ...] = ()  # that may follow it


class Level(NamedTuple):
    """What may follow some words."""

    words: dict[str, str]  # commands below it, with their meanings
    options: list[Option]
    names: tuple[str, ...] = ()  # experiments, where the command takes some


class FoundError(Exception):
    """A parser, caught before it parses."""


def write_completion(arguments: list[str]) -> int:
    """Print a shell's script."""
    parser = Parser("some completion", "Print a script for a shell: " + "; ".join(INSTALL.values()) + ".")
    parser.add_argument("shell", metavar="SHELL", choices=sorted(INSTALL), help="bash, fish or zsh")
    shell = parser.parse(arguments).shell
    tree = dict(list_levels((), COMMANDS))
    return write({"bash": format_bash, "zsh": format_zsh, "fish": format_fish}[shell](tree))


def list_levels(path: tuple[str, ...], commands: Commands) -> Iterator[tuple[tuple[str, ...], Level]]:
    """Every level of the command line, by the words that lead there."""
    own = [Option(name, meaning) for name, meaning in OPTIONS.items()]
    yield path, Level({name: meaning for name, (meaning, _) in commands.items()}, own)
    for name, (_, target) in commands.items():
        if isinstance(target, str):
            takes_names = path == ("experiments",) and name in ("show", "run", "submit")
            yield (*path, name), Level({}, list_options(target), list_names(presets=False) if takes_names else ())
        else:
            yield from list_levels((*path, name), target)


def list_options(target: str) -> list[Option]:
    """The options of a command, from the parser that it makes."""
    caught: list[tuple[Parser, list[str]]] = []

    def catch(parser: Parser, arguments: list[str]) -> argparse.Namespace:
        caught.append((parser, arguments))
        raise FoundError

    parse = Parser.parse
    try:
        Parser.parse = catch  # type: ignore[method-assign,assignment]
        with suppress(FoundError):
            resolve_name(f"some_moe.commands.{target}")([PROBE])
    finally:
        Parser.parse = parse  # type: ignore[method-assign]
    parser, left = caught[0]
    found = []
    for action in parser._actions:
        for name in action.option_strings:
            if name.startswith("--"):
                choices = tuple(map(str, action.choices or ()))
                choices = list_names(presets=True) if name == "--preset" else choices
                found.append(Option(name, (action.help or "").replace("%%", "%"), choices))
    if PROBE not in left:
        found += list_settings()
    return found


def list_names(*, presets: bool) -> tuple[str, ...]:
    from some_moe.lab.registry import EXPERIMENTS
    from some_moe.lab.registry.presets import PRESETS

    return (*(PRESETS if presets else ()), *(experiment.name for experiment in EXPERIMENTS))


def list_settings() -> list[Option]:
    """Every --ROOM.FIELD, with its meaning and choices."""
    from some_moe.config import Config, RunConfig
    from some_moe.config.base import field_docs

    found = []
    for room, field in RunConfig.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Config):
            docs = field_docs(inner)
            for name, one in inner.model_fields.items():
                values = tuple(word for word in get_args(one.annotation) if isinstance(word, str))
                found.append(Option(f"--{room}.{name.replace('_', '-')}", docs[name], values))
    return found


Tree = dict[tuple[str, ...], Level]


def quote(text: str) -> str:
    """Text for any of the shells, between single quotes that it does not leave."""
    return "'" + text.replace("\\", "").replace("'", "’").replace("\n", " ") + "'"


def list_groups(tree: Tree) -> str:
    return "|".join(" ".join(path) for path, level in tree.items() if path and level.words)


def list_values(tree: Tree) -> dict[str, tuple[str, ...]]:
    return {option.name: option.values for level in tree.values() for option in level.options if option.values}


def format_bash(tree: Tree) -> str:
    cases = []
    for path, level in tree.items():
        words, options = " ".join([*level.words, *level.names]), " ".join(one.name for one in level.options)
        cases.append(f"    {quote(' '.join(path))}) words={quote(words)} options={quote(options)} ;;")
    values = [f"    {name}) words={quote(' '.join(chosen))} ;;" for name, chosen in list_values(tree).items()]
    return "\n".join([
        "# bash completion of `some`: " + INSTALL["bash"],
        "_some() {",
        "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} key= words= options=",
        "  if [[ $cur == = ]]; then cur=; elif [[ $prev == = ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi",
        "  if (( COMP_CWORD > 1 )); then key=${COMP_WORDS[1]}; fi",
        f"  case $key in {list_groups(tree)}) if (( COMP_CWORD > 2 )); then key+=\" ${{COMP_WORDS[2]}}\"; fi ;; esac",
        "  COMPREPLY=()",
        "  case $prev in",
        *values,
        "  esac",
        "  if [[ -z $words ]]; then",
        "    case $key in",
        *(f"  {case}" for case in cases),
        "    esac",
        "    if [[ $cur == -* ]]; then words=$options; fi",
        "  fi",
        "  # without a match bash completes files",
        '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o default -F _some some",
        "",
    ])  # fmt: skip


def format_zsh(tree: Tree) -> str:
    def describe(pairs: list[tuple[str, str]]) -> str:
        return " ".join(quote(f"{name}:{meaning.replace(':', '·')}") for name, meaning in pairs)

    lines = ["#compdef some", "# zsh completion of `some`: " + INSTALL["zsh"], "_some() {", "  local -a found"]
    lines += ["  local key=", "  (( CURRENT > 2 )) && key=$words[2]"]
    lines += [f'  case $key in ({list_groups(tree)}) (( CURRENT > 3 )) && key="$key $words[3]" ;; esac']
    lines += ["  case $words[CURRENT-1] in"]
    for name, values in list_values(tree).items():
        lines.append(f"    ({name}) compadd -- {' '.join(map(quote, values))}; return ;;")
    lines += ["  esac", "  case $key in"]
    for path, level in tree.items():
        pairs = list(level.words.items())
        options = [(one.name, one.meaning) for one in level.options]
        lines.append(f"    ({quote(' '.join(path))})")
        if pairs:
            lines.append(f"      found=({describe(pairs)}); _describe command found; [[ $PREFIX == -* ]] || return")
        lines.append(f"      [[ $PREFIX == -* ]] && {{ found=({describe(options)}); _describe option found; return }}")
        lines.append(f"      compadd -- {' '.join(map(quote, level.names))}; return ;;" if level.names else "      ;;")
    lines += ["  esac", "  [[ -n $key ]] && _files", "}"]
    lines += ['if [[ $funcstack[1] == _some ]]; then _some "$@"; else compdef _some some; fi', ""]
    return "\n".join(lines)


def format_fish(tree: Tree) -> str:
    lines = ["# fish completion of `some`: " + INSTALL["fish"]]
    for path, level in tree.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in path) or "__fish_use_subcommand"
        below = " ".join(level.words)
        when = f"{seen}; and not __fish_seen_subcommand_from {below}" if path and below else seen
        for word, meaning in level.words.items():
            lines.append(f"complete -c some -f -n {quote(when)} -a {word} -d {quote(meaning)}")
        if level.names:
            lines.append(f"complete -c some -f -n {quote(seen)} -a {quote(' '.join(level.names))}")
        for one in level.options:
            follows = f" -x -a {quote(' '.join(one.values))}" if one.values else ""
            lines.append(f"complete -c some -n {quote(when)} -l {one.name[2:]}{follows} -d {quote(one.meaning)}")
    return "\n".join([*lines, ""])

"""`some demo`, `some init` and `some doctor`: the first minutes."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from some_moe.cli import Parser, look, write, write_json
from some_moe.commands.training import evaluate_run, generate_text, take_settings, train_model

DRAWING = ("matplotlib", "sklearn", "umap")


def run_demo(arguments: list[str]) -> int:
    """Train a small model, score it, let it write, and show it."""
    parser = Parser(
        "some demo",
        "Train a small model on generated stories, score it beside a trigram, let it tell two, and write a page. Takes "
        "a few minutes on two cores; goes on where it was stopped. Settings can be given as to `some train`.",
    )
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="the run folder (runs/demo)")
    parser.add_argument("--watch", action="store_true", help="show it in the browser meanwhile, until Ctrl-C")
    parser.add_argument("--no-browser", action="store_true", help="with --watch: print the address, open nothing")
    _, words = take_settings(arguments, "some demo")
    options = parser.parse(words)
    own = ("--out", options.out, f"--out={options.out}", "--watch", "--no-browser")
    settings = [word for word in arguments if word not in own]
    if not options.watch:
        return make_demo(options.out, settings)
    from some_moe.commands.live import watched

    with watched(Path(options.out), browser=not options.no_browser) as page:
        code = make_demo(options.out, settings)
        page.join()
    return code


def make_demo(out: str, settings: list[str]) -> int:
    code = train_model(["--preset=demo", f"--out={out}", "--resume=auto", *settings])
    for step in (evaluate_run, generate_text):
        if code == 0:
            write("\n")
            code = step([out, "--trigram"] if step is evaluate_run else [out, "--count=2", "--seed=0"])
    if code == 0 and all(find_spec(name) for name in DRAWING):
        from some_moe.commands.reporting import write_report

        write("\n")
        code = write_report([out])
        write(f'\nopen {Path(out) / "report.html"} in a browser; next: some trace {out} "Once upon a time"\n')
    elif code == 0:
        write(f"\na page of it needs pip install 'some-moe[analysis]'; then: some report {out}\n")
    return code


def write_config(arguments: list[str]) -> int:
    """Write a config.yaml to begin with."""
    prog = "some init"
    parser = Parser(
        prog,
        "Write a commented config.yaml, and beside it its JSON schema, by which editors complete and check it. "
        "Settings can be given as --ROOM.FIELD VALUE.",
    )
    parser.add_argument("file", nargs="?", default="config.yaml", metavar="FILE", help="where it goes (config.yaml)")
    parser.add_argument("--preset", metavar="NAME", help="start from smoke, demo, or any registered experiment")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--schema", action="store_true", help="print the schema alone, and write nothing")
    overrides, words = take_settings(arguments, prog)
    options = parser.parse(words)

    from some_moe.commands.training import resolve_config
    from some_moe.lab import template

    if options.schema:
        return write_json(template.make_schema())
    config = resolve_config(options.preset, None, overrides)
    schema = template.write_config(Path(options.file), config, force=options.force)
    return write(f"{options.file} and {schema}; next: some train --config {options.file} --dry-run\n")


def examine_machine(arguments: list[str]) -> int:
    """Tell what is installed, and what will compute."""
    parser = Parser("some doctor", "What is installed here, which kernels will run, where caches are and how large.")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse(arguments)

    from some_moe.lab.doctor import examine

    found = examine()
    return write_json(found) if options.json else write(format_examination(found))


def format_examination(found: dict[str, Any]) -> str:
    """The same for a reader."""
    from some_moe.commands.cache import format_size

    style = look()["style"]
    commit = f" (commit {found['commit'][:12]})" if found.get("commit") else ""
    lines = [style.bold("program"), f"  some-moe {found.get('some_moe', '?')}{commit}, Python {found['python']}"]
    lines += [f"  {found['platform']}, {found['cores']} cores"]
    free = "unknown" if found["memory_free_bytes"] is None else format_size(found["memory_free_bytes"])
    lines += [f"  {free} of memory free, {format_size(found['disk_free_bytes'])} of disk here"]
    if found["torch"] is not None:
        cuda = "without CUDA" if found["cuda"] is None else f"CUDA {found['cuda']}"
        lines += [
            "",
            style.bold("computing"),
            f"  torch {found['torch']}, {cuda}, triton {found['triton'] or 'absent'}",
        ]
        lines += [f"  {gpu['name']}, {format_size(gpu['memory_bytes'])}" for gpu in found["gpus"]]
        lines += [f"  a run computes on {found['runs_on']}, {found['threads']} threads, in {found['precision']}"]
        lines += [
            f"  by {found['kernels']}",
            f"  a small layer is within {found['layer_difference']:.1g} of the obvious",
        ]
    lines += ["", style.bold("optional")]
    for extra, packages in found["extras"].items():
        missing = [name for name, version in packages.items() if version is None]
        there = [f"{name} {version}" for name, version in packages.items() if version is not None]
        cure = f"missing {', '.join(missing)}: pip install 'some-moe[{extra}]'" if missing else ""
        lines.append(f"  {extra:12} {'; '.join(filter(None, [', '.join(there), cure]))}")
    lines += ["", style.bold("caches")]
    for cache in found["caches"]:
        limit = f" of at most {format_size(cache['limit_bytes'])}" if "limit_bytes" in cache else ""
        over = "" if cache["counted_whole"] else " and more"
        lines.append(f"  {cache['name']:17} {format_size(cache['bytes'])}{over}{limit} in {cache['path']}")
    lines += ["", style.bold("problems"), *(f"  {problem}" for problem in found["problems"] or ["none found"])]
    return "\n".join(lines) + "\n"

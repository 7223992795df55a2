"""`some runs`: what lies in a folder of runs; and `some resume`, which goes on with one."""

from some_moe.cli import Parser, look, write, write_json
from some_moe.commands.training import take_settings, train_model


def list_runs(arguments: list[str]) -> int:
    """Print the run folders below a place."""
    parser = Parser("some runs", "List the runs in a folder, the one that changed last at the end.")
    parser.add_argument("place", metavar="DIR", nargs="?", default="runs", help="where they are (runs)")
    parser.add_argument("--json", action="store_true", help="print an array of objects")
    options = parser.parse(arguments)

    from some_moe.lab import folders

    found = folders.list_runs(options.place)
    return write_json(found) if options.json else write(folders.format_runs(options.place, found, **look()))


def resume_run(arguments: list[str]) -> int:
    """Go on with a run."""
    parser = Parser("some resume", "Go on with a run that was stopped; the same as `some train --resume RUN`.")
    parser.add_argument("run", metavar="RUN", help="a run folder, or one of its checkpoints")
    _, words = take_settings(arguments, "some resume")
    run = parser.parse(words).run
    others = [word for word in arguments if word not in (run, "--")]
    return train_model([*others, f"--resume={run}"])

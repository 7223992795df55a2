"""`some sweep`: settings searched by many runs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from some_moe.cli import Parser, write, write_json
from some_moe.errors import INTERRUPTED, UsageError
from some_moe.system.claims import DEAD_AFTER
from some_moe.system.reading import clean

PAGE = "sweep.html"
MOST_WORKERS = 256


def sweep_settings(arguments: list[str]) -> int:
    """Search good settings."""
    parser = Parser(
        "some sweep",
        "Search settings for a low validation loss. The same command goes on after an interruption, and more of it may "
        "run at the same time, on any machine that sees the folder.",
    )
    parser.add_argument("space", metavar="SPACE.yaml", help="what varies, see docs/sweep.md")
    parser.add_argument("--out", metavar="DIR", help="where runs and page go (default: runs/SPACE)")
    parser.add_argument("--trials", type=int, metavar="N", help="how many, if not what the file says")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="runs at the same time (1)")
    parser.add_argument(
        "--dead-after", type=float, default=DEAD_AFTER, metavar="S", help="of silence, for workers elsewhere (120)"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as one object")
    options = parser.parse(arguments)
    if not 1 <= options.workers <= MOST_WORKERS:
        raise UsageError(f"--workers {options.workers} is out of range; use 1 to {MOST_WORKERS}")
    if not 1 <= options.dead_after <= 86_400:
        raise UsageError(f"--dead-after {options.dead_after} is out of range; use 1 to 86,400 seconds")
    if find_spec("optuna") is None:
        raise UsageError("some sweep needs optuna, which is not installed; run pip install 'some-moe[sweep]'")

    from some_moe.lab.space import Sweep

    sweep = Sweep.load(options.space)
    if options.trials is not None:
        sweep = sweep.override({"trials": options.trials})
    base = sweep.base_config(Path(options.space).parent)
    out = Path(options.out or f"runs/{Path(options.space).stem}")
    sweep.axes(base)

    from some_moe.glass.page.sweep import render_sweep
    from some_moe.lab.sweep import Sweeper
    from some_moe.system.files import write_whole

    def draw(found: dict[str, Any]) -> None:
        write_whole(out / PAGE, render_sweep(out.name, found))

    def say(text: str) -> None:
        if not options.json:
            print(clean(text), flush=True)

    sweeper = Sweeper(sweep, base, out, say, workers=options.workers, dead_after=options.dead_after, changed=draw)
    found = sweeper.run()
    if options.json:
        write_json(found)
    elif found["best"] is None:
        write(f"no trial has ended well yet; what the runs wrote is in {out / 'logs'}\n")
    else:
        best = found["best"]
        write(f"best {found['metric']} {best['value']:.4f}: {best['name']}\n{out / PAGE}\n")
    if sweeper.signals.count:
        return INTERRUPTED
    return 0 if found["best"] is not None else 1

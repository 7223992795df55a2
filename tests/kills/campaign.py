"""Kill every command that writes, at every kind of moment, and compare what it leaves when it is given again.

python -m tests.kills.campaign --kills 1000 --seed 0 --jobs 16 [--out FOUND.json]
python -m tests.kills.campaign --seed 0 --case 17      one case again
python -m tests.kills.campaign --only back --kills 50  only scenarios whose name begins so
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.kills import children
from tests.kills.cases import Case, Judged, Known, judge, plan, prepare
from tests.kills.scenarios import make_scenarios, missing_libraries

IN_MEMORY = Path("/dev/shm")


class Campaign:
    """Processes that fork commands, a folder for all of them, and the scenarios, each run undisturbed once."""

    def __init__(self, pool: ProcessPoolExecutor, base: Path) -> None:
        self.pool, self.base = pool, base
        self.scenarios = make_scenarios()
        self.known: dict[str, Known] = {}

    def learn(self, names: Iterable[str]) -> None:
        """Run scenarios undisturbed."""
        unknown = {name: self.base / name.replace("/", "-") for name in names if name not in self.known}
        futures = {name: self.pool.submit(prepare, self.scenarios[name], place) for name, place in unknown.items()}
        self.known |= {name: future.result() for name, future in futures.items()}

    def judge(self, case: Case) -> Judged:
        return self.pool.submit(judge, case, self.known[case.scenario]).result()

    def judge_all(self, cases: Iterator[Case], kills: int, jobs: int) -> Iterator[Judged]:
        """Judge cases until there were so many kills."""
        seen, running = 0, set()
        while running or seen < kills:
            if seen < kills:
                for case in islice(cases, 2 * jobs - len(running)):
                    running.add(self.pool.submit(judge, case, self.known[case.scenario]))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                found = future.result()
                seen += found.kills
                yield found


@contextmanager
def open_campaign(jobs: int) -> Iterator[Campaign]:
    """A campaign in memory, where the system has such a place."""
    base = Path(tempfile.mkdtemp(prefix="some-kills-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None)).resolve()
    try:
        with ProcessPoolExecutor(jobs, get_context("spawn"), children.preload) as pool:
            yield Campaign(pool, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def describe(found: Judged) -> dict[str, Any]:
    case = found.case
    return {"case": case.number, "scenario": case.scenario, "moments": found.moments, "problems": found.problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--case", type=int, help="judge this one alone")
    parser.add_argument("--only", default="", help="scenarios whose name begins so")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = [name for name in make_scenarios() if name.startswith(options.only)]
    if absent := missing_libraries():
        print(f"analyze and report are left out: {', '.join(absent)} is not installed", file=sys.stderr)
    started = time.monotonic()
    kills, cases, faults, kinds, failures = Counter[str](), Counter[str](), Counter[str](), set(), []
    with open_campaign(options.jobs) as campaign:
        campaign.learn(names)
        print(f"{len(names)} scenarios ran undisturbed in {time.monotonic() - started:.0f} s", file=sys.stderr)
        planned = plan(campaign.known, options.seed)
        if options.case is not None:
            judged: Iterator[Judged] = iter([campaign.judge(next(islice(planned, options.case, None)))])
        else:
            judged = campaign.judge_all(planned, options.kills, options.jobs)
        for found in judged:
            group = campaign.known[found.case.scenario].scenario.group
            kills[group] += found.kills
            cases[group] += 1
            faults[group] += found.faults
            kinds |= {f"{found.case.scenario} {moment.split(': ')[1]}" for moment in found.moments}
            if found.problems:
                failures.append(describe(found))
                print(json.dumps(failures[-1], ensure_ascii=False), file=sys.stderr)
            if sum(cases.values()) % 100 == 0:
                print(f"{kills.total()} kills, {time.monotonic() - started:.0f} s", file=sys.stderr)
    record = {
        "seed": options.seed, "kills": kills.total(), "full_or_readonly": faults.total(), "cases": cases.total(),
        "kinds_of_moments": len(kinds), "seconds": round(time.monotonic() - started), "failed": len(failures),
        "by_command": {name: {"kills": kills[name], "cases": cases[name]} for name in cases}, "failures": failures,
    }  # fmt: skip
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({name: value for name, value in record.items() if name != "failures"}, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

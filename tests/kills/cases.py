"""One case: a command is attacked once or several times, then given again until it ends, and judged."""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from some_moe.config import ConfigError
from some_moe.glass.inspect.runs import read_run
from tests.kills import children
from tests.kills.children import Ended
from tests.kills.folders import find_differences, find_torn, list_visible
from tests.kills.moments import Attack
from tests.kills.scenarios import BACK_TO, Scenario, missing_libraries

MOST_KILLS = 4  # of one case


@dataclass(frozen=True)
class Known:
    """A scenario that ran undisturbed: what it left is below `base`."""

    scenario: Scenario
    base: Path
    labels: tuple[str, ...]  # of its moments
    seconds: float

    @property
    def begun(self) -> Path:
        """What the command finds."""
        return self.base / "begun"

    @property
    def ended(self) -> Path:
        """What it leaves."""
        return self.base / "ended"


@dataclass(frozen=True)
class Case:
    """What is done to one folder."""

    number: int
    scenario: str
    attacks: tuple[Attack, ...]
    again: int  # which of the scenario's ways to give the command again
    looks: bool = False  # whether other commands read the torn folder, too
    repeats: bool = False  # until the run has begun, the command is given in the same words


@dataclass
class Judged:
    """What came of a case."""

    case: Case
    kills: int = 0
    faults: int = 0  # full disks and read-only folders that a command met
    moments: list[str] = field(default_factory=list)  # at which it was attacked
    problems: list[str] = field(default_factory=list)


def prepare(scenario: Scenario, place: Path) -> Known:
    """Run a scenario undisturbed."""
    place.mkdir(parents=True)
    known = Known(scenario, place, (), 0.0)
    known.begun.mkdir()
    for words in scenario.before:
        demand(children.run([*words], known.begun, place.parent / "cache"))
    labels = place / "labels.json"
    shutil.copytree(known.begun, known.ended)
    watched = Attack(target=scenario.target)
    ended = children.run([*scenario.words], known.ended, find_cache(scenario, known.ended), watched, labels)
    demand(ended)
    return replace(known, labels=tuple(json.loads(labels.read_text())), seconds=ended.seconds)


def demand(ended: Ended) -> None:
    if ended.code:
        raise RuntimeError(f"an undisturbed command failed with {ended.code}: {ended.said[-2000:]}")


def find_cache(scenario: Scenario, cwd: Path) -> Path:
    return cwd / "cache" if scenario.own_cache else cwd.parent.parent / "cache"


# --- what to do --------------------------------------------------------------------------------------------------


def plan(known: dict[str, Known], seed: int) -> Iterator[Case]:
    """Cases without end: the scenarios by their shares, each with every kind of moment in turn."""
    chance = random.Random(seed)
    names, shares = list(known), [one.scenario.share for one in known.values()]
    turns = {name: shuffle_moments(one, chance) for name, one in known.items()}
    for number in count():
        name = names[number] if number < len(names) else chance.choices(names, shares)[0]
        yield make_case(number, known[name], turns[name], chance)


def shuffle_moments(known: Known, chance: random.Random) -> Iterator[int]:
    """Moments without end: one of each kind in random order, then again."""
    kinds: dict[str, list[int]] = {}
    for moment, label in enumerate(known.labels, 1):
        kinds.setdefault(label, []).append(moment)
    while True:
        for moments in chance.sample(list(kinds.values()), len(kinds)):
            yield chance.choice(moments)


def make_case(number: int, known: Known, moments: Iterator[int], chance: random.Random, how: str = "") -> Case:
    """A case at the next moment. how: kill, clock, full or readonly; any of them where it is not said."""
    scenario = known.scenario
    how = how or chance.choices(("kill", "clock", "full", "readonly"), (72, 18, 6, 4))[0]
    first = Attack(how, next(moments), scenario.target, whole=chance.random() < 0.5)
    attacks = [first]
    if how in ("kill", "clock"):
        latest = max(1, 2 * len(known.labels) // 3)  # a resumed run has less to do
        attacks += [replace(first, moment=chance.randint(1, latest)) for _ in range(chance.randrange(MOST_KILLS))]
    if how == "clock":
        attacks = [Attack("kill", seconds=chance.random() * known.seconds) for _ in attacks]
    ways = max(1, len(scenario.again))
    again, looks, repeats = chance.randrange(ways), chance.random() < 0.25, chance.random() < 0.5
    return Case(number, scenario.name, tuple(attacks), again, looks, repeats or scenario.repeats)


# --- doing it ----------------------------------------------------------------------------------------------------


def judge(case: Case, known: Known) -> Judged:
    """Attack, look, go on, compare."""
    cwd = known.base / f"case-{case.number}"
    shutil.copytree(known.begun, cwd)
    try:
        return Judgement(case, known, cwd).run()
    finally:
        shutil.rmtree(cwd, ignore_errors=True)


class Judgement:
    """One case under way in a folder of its own."""

    def __init__(self, case: Case, known: Known, cwd: Path) -> None:
        self.case, self.known, self.cwd, self.scenario = case, known, cwd, known.scenario
        self.found = Judged(case)
        self.cache = find_cache(self.scenario, cwd)
        self.stamps = self.take_stamps()
        self.cut = False  # something that going back removes is gone

    def run(self) -> Judged:
        for attack in self.case.attacks:
            ended = children.run(self.choose_words(), self.cwd, self.cache, attack)
            self.note(attack, ended)
            self.cut = self.cut or self.has_lost()
            self.found.problems += [f"after {self.found.moments[-1]}: {one}" for one in self.look()]
            if ended.code == 0 or self.found.problems:
                break
        words = self.choose_words()
        if not self.found.problems:
            self.demand(children.run(words, self.cwd, self.cache), (0,), "given again")
        if not self.found.problems:
            self.found.problems += find_differences(self.cwd, self.known.ended)
        if not self.found.problems and self.scenario.goes_back and "auto" in words and self.cut:
            self.refuse_survivors()
        return self.found

    def choose_words(self) -> list[str]:
        """The command, or how it is given again."""
        repeats = self.case.repeats and not (self.cwd / "run" / "config.yaml").is_file()
        if not self.found.moments or repeats or not self.scenario.again:
            return [*self.scenario.words]
        return [*self.scenario.again[self.case.again]]

    def note(self, attack: Attack, ended: Ended) -> None:
        """Count an attack, and judge how the command took it."""
        labels = self.known.labels
        first = not self.found.moments
        moment = labels[attack.moment - 1] if first and 0 < attack.moment <= len(labels) else "while it is resumed"
        self.found.moments.append(f"{attack}: {moment if attack.seconds is None else 'by the clock'}")
        if ended.was_killed:
            self.found.kills += 1
        elif attack.how != "kill":
            self.found.faults += ended.code != 0
            self.demand(ended, (0, 1, 2), "with no room" if attack.how == "full" else "with nothing to be changed")
        elif attack.target == "run" and ended.code == 1 and "Traceback" not in ended.said:
            self.found.kills += 1  # the queue tells of a run that was killed
        elif ended.code != 0:
            self.demand(ended, (0,), "not yet killed")

    def demand(self, ended: Ended, good: tuple[int, ...], when: str) -> None:
        fault = ended.find_fault(good)
        # A queue tells of its runs in a table.
        if fault and not (self.scenario.group == "queue" and ended.code == 1 and "Traceback" not in ended.said):
            self.found.problems.append(f"{when}: {fault}")

    def look(self) -> list[str]:
        """Read the folder as it was left."""
        problems = find_torn(self.cwd)
        for config in self.cwd.glob("**/config.yaml"):
            try:
                read_run(config.parent)
            except ConfigError as error:
                problems.append(f"read_run refuses: {error}")
        if self.case.looks and (self.cwd / "run" / "config.yaml").is_file():
            page = str(self.known.base / f"page-{self.case.number}.html")
            readers = [["eval", "run"]] + (
                [] if missing_libraries() else [["report", "run", "--no-analyze", "--out", page]]
            )
            for words in readers:
                fault = children.run(words, self.cwd, self.cache).find_fault((0, 1, 2))
                problems += [f"some {words[0]}: {fault}"] if fault else []
        return problems

    # --- going back -------------------------------------------------------------------------------------------

    def take_stamps(self) -> dict[str, tuple[int, int]]:
        """When each file was made, and its number: the same only for a file that nobody has made again."""
        found = {name: path.stat() for name, path in list_visible(self.cwd).items()}
        return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}

    def has_lost(self) -> bool:
        """Whether anything is gone or replaced. result.json is made again from what is there, to the same bits."""
        now = self.take_stamps()
        return any(now.get(name) != stamp for name, stamp in self.stamps.items() if not name.endswith("result.json"))

    def refuse_survivors(self) -> None:
        """Once something was removed, `--resume auto` must have gone on from where the user went back to."""
        now = self.take_stamps()
        for name, stamp in self.stamps.items():
            if name.endswith("state.json") and now.get(name) == stamp:
                step = int(Path(name).parent.name.removeprefix("step-"))
                if step > BACK_TO:
                    self.found.problems.append(
                        f"something was removed, but --resume auto went on from step-{step}, not from step-{BACK_TO}"
                    )
                    return

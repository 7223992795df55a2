"""docs/studies/guilds.md from the records in results/guilds; what is missing there is said to be missing."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from some_moe.errors import ConfigError

Record = dict[str, Any]
LEVEL = 0.01
# The two-sided 95 % points of Student's t, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
ABSENT = "–"
ORIGIN = (
    "Made from `results/guilds/` by `python -m tools.guilds_study page`. Change nothing here by hand; the claims, "
    "their tests and what was predicted are in [guilds-predictions.md](guilds-predictions.md), written before the runs."
)
QUESTION = (
    "Do experts of A1 and A4 form a noun guild, do layers follow the order Lexicon, Mind's Eye, Storyteller, do keys "
    "form galaxies with still centres, and does gravity know whom it can spare, on real stories, and more than keys "
    "that never move do?"
)
HOW_TO_READ = (
    "Behind ± is half of the 95 % interval over seeds (Student's t), for depth with that over stories added; where it "
    "is missing, one seed was run. *Difference*: gravity minus still keys, paired by seed and by story."
)
CLAIMS = (
    ("Lexicon", "identity", "falls"),
    ("Mind's Eye", "part of speech", "peaks"),
    ("Storyteller", "place in story", "rises"),
)


class Estimate:
    """A mean over seeds, and half of its interval where there are several.

    within: half of an interval over stories, which all seeds share, so that it does not shrink with their number.
    """

    def __init__(self, values: Sequence[float], within: float = 0.0) -> None:
        self.values, count = list(values), len(values)
        self.mean = mean(self.values) if self.values else math.nan
        self.half = None
        if 1 < count <= 10:
            self.half = math.hypot(STUDENT[count - 1] * stdev(self.values) / math.sqrt(count), within)

    def show(self, form: str = "+.3f") -> str:
        if not self.values:
            return ABSENT
        return f"{self.mean:{form}}" + ("" if self.half is None else f" ± {self.half:{form.lstrip('+')}}")

    @property
    def is_above(self) -> bool:
        return self.half is not None and self.mean > self.half

    @property
    def is_below(self) -> bool:
        return self.half is not None and -self.mean > self.half


def read_records(folder: Path) -> list[Record]:
    """Every record, in order of its name."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{str(file)!r} cannot be read ({error}); remove it, or measure it again") from None
        if record.get("format") != 1:
            raise ConfigError(f"{str(file)!r} is no record of this study; remove it, or measure it again")
        found.append(record)
    return found


def make_page(folder: Path) -> str:
    records = read_records(folder) if folder.is_dir() else []
    models = sorted({record["experiment"] or record["run"] for record in records})
    parts = ["# Guilds on real text", ORIGIN, QUESTION, "## Verdict"]
    if not models:
        parts += ["Not measured yet: no record is in."]
        return "\n\n".join(parts) + "\n"
    arms = [Arm(name, records) for name in models]
    parts += [" ".join(arm.conclude() for arm in arms), "## Measured", HOW_TO_READ]
    for arm in arms:
        parts += arm.write()
    return "\n\n".join(parts) + "\n"


class Arm:
    """One model: its runs by gravity, and their twins with still keys."""

    def __init__(self, name: str, records: Sequence[Record]) -> None:
        self.name = name
        mine = [record for record in records if (record["experiment"] or record["run"]) == name]
        self.by_keys = {
            keys: {one["seed"]: one for one in mine if one["keys"] == keys} for keys in ("gravity", "still")
        }

    def estimate(self, keys: str, figure: Callable[[Record], float | None]) -> Estimate:
        records = [record for record in self.by_keys[keys].values() if figure(record) is not None]
        over_stories = [half_over_stories(record, figure) for record in records]
        return Estimate([figure(record) or 0.0 for record in records], mean(over_stories) if records else 0.0)

    def compare(self, figure: Callable[[Record], float | None]) -> Estimate:
        """Gravity minus still keys, of the seeds that both have."""
        one, other = self.by_keys["gravity"], self.by_keys["still"]
        pairs = [(figure(one[seed]), figure(other[seed])) for seed in one if seed in other]
        return Estimate([a - b for a, b in pairs if a is not None and b is not None])

    def row(self, what: str, figure: Callable[[Record], float | None], form: str = "+.3f") -> list[str]:
        sides = [self.estimate(keys, figure).show(form) for keys in ("gravity", "still")]
        return [what, *sides, self.compare(figure).show("+" + form.lstrip("+"))]

    def holds(self, name: str, keys: str = "gravity") -> bool | None:
        """Does a claim about depth hold? None where a run or its interval is missing."""
        figure = Contrast(name)
        found = self.estimate(keys, figure)
        if found.half is None:
            return None
        return found.is_above and all(is_sure(record, name) for record in self.by_keys[keys].values())

    def conclude(self) -> str:
        gravity, still = self.by_keys["gravity"], self.by_keys["still"]
        nouns = [sum(map(has_noun_guild, side.values())) for side in (gravity, still)]
        claims = [self.holds(name) for name, *_ in CLAIMS]
        order = (
            "is open"
            if None in claims
            else "holds"
            if all(claims)
            else f"does not hold ({sum(map(bool, claims))} of 3)"
        )
        return (
            f"{self.name}: a noun guild in the middle is supported in {nouns[0]} of {len(gravity)} runs by gravity and "
            f"{nouns[1]} of {len(still)} with still keys; the published order of depth {order}."
        )

    def write(self) -> list[str]:
        some = next(iter((self.by_keys["gravity"] or self.by_keys["still"]).values()))
        heads = ["", "gravity", "still keys", "difference"]
        about = (
            f"{len(self.by_keys['gravity'])} runs by gravity, {len(self.by_keys['still'])} with still keys; "
            f"{some['num_layers']} layers of {some['num_experts']} experts; {some['text']['num_tokens']:,} tokens of "
            f"{some['text']['name']}. {some['labels']}"
        )
        rows = [
            self.row("test loss, nats", lambda one: one["result"]["test_loss"], ".4f"),
            self.row("candidates", lambda one: one["passed"]["enrichment"], ".1f"),
            self.row("… beyond shuffled labels", lambda one: one["passed"]["association"], ".1f"),
            self.row("… beyond random keys", lambda one: one["passed"]["random_keys"], ".1f"),
            self.row("… and missed when taken away: supported", lambda one: one["passed"]["knockout"], ".1f"),
            self.row("runs with a supported noun guild in the middle", has_noun_guild, ".2f"),
        ]
        parts = [f"### {self.name}", about, table(heads, rows)]
        parts += ["**Depth**", table([*heads, "holds by gravity"], [self.write_claim(*claim) for claim in CLAIMS])]
        rows = [
            self.row("layers whose keys cluster beyond one cloud", count_clustered, ".1f"),
            self.row("mean silhouette", lambda one: mean(layer["silhouette"] for layer in one["clusters"])),
            self.row("… of one cloud", lambda one: mean(layer["one_cloud"] for layer in one["clusters"])),
            self.row("… of random keys", lambda one: mean(layer["random_keys"] for layer in one["clusters"])),
            self.row("load against drift, Spearman", lambda one: (one["drift"] or {}).get("rho")),
            self.row("load against late speed", lambda one: (one["drift"] or {}).get("late_rho")),
        ]
        parts += ["**Galaxies and their centres**", table(heads, rows)]
        return [*parts, "**Pruning**: nats that the loss rises by", table(heads, self.write_pruning(some))]

    def write_claim(self, name: str, family: str, how: str) -> list[str]:
        held = self.holds(name)
        return [
            *self.row(f"{name}: {family} {how}", Contrast(name)),
            ABSENT if held is None else "yes" if held else "no",
        ]

    def write_pruning(self, some: Record) -> list[list[str]]:
        rows = []
        for place, one in enumerate(some["pruning"]):
            for what in ("least_used", "least_central", "random", "most_used"):

                def cost(record: Record, place: int = place, what: str = what) -> float:
                    found = record["pruning"][place][what]
                    return float(mean(found) if isinstance(found, list) else found)

                rows.append(self.row(f"{one['share']:.1%} of the experts, {what.replace('_', ' ')}", cost, "+.4f"))
        return rows


class Contrast:
    """The figure of a claim about depth: see judge_depth."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, record: Record) -> float | None:
        found = self.find(record)
        return None if found is None else float(found["contrast"])

    def find(self, record: Record) -> Record | None:
        return next((one for one in record["depth"]["slopes"] if one.get("name") == self.name), None)


def half_over_stories(record: Record, figure: Callable[[Record], float | None]) -> float:
    """Half of the 95 % interval over stories of a claim about depth; 0 for what has none."""
    found = figure.find(record) if isinstance(figure, Contrast) else None
    # As it is filed it is wider: at a third of the level, on either side of a nearly normal spread.
    return 0.0 if found is None else (found["contrast_interval"][1] - found["contrast_interval"][0]) / 2 * 1.96 / 2.94


def is_sure(record: Record, name: str) -> bool:
    """Whether the association is sure in the layer where the claim puts it."""
    family = next((family for claim, family, _ in CLAIMS if claim == name), "")
    p_values = record["families"].get(family, {}).get("p_adjusted") or [1.0]
    place = {"Lexicon": 0, "Mind's Eye": len(p_values) // 2, "Storyteller": len(p_values) - 1}[name]
    return bool(p_values[place] <= LEVEL)


def has_noun_guild(record: Record) -> int:
    """1 where a supported guild of nouns lies in the middle half of the layers."""
    middle = range(math.ceil(record["num_layers"] / 4), math.ceil(3 * record["num_layers"] / 4))
    nouns = [one for one in record["guilds"] if one["class"] == "noun" and one["verdict"] == "supported"]
    return int(any(one["layer"] in middle for one in nouns))


def count_clustered(record: Record) -> int:
    return sum(one["p_cloud"] <= 0.05 for one in record["clusters"])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(heads) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rule, *rows))

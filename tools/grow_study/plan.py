"""What the study is made of: sizes, methods with the rates they are tuned among, and cells.

A cell is one method with one rate and one random seed; it leaves one JSON file. The first seed tries every rate; the
others take the one that did best there, by valid.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LIMITS = (0.02, 0.05, 0.2)  # nats that may be lost on the base's text
CHOSEN_AT = 0.05  # rates are chosen by what is gained at this loss
MOST_MORE = 3  # rates beyond those given that are tried, where the best lies at an end
OLD, TOLD = "old text", "labels"
# The points of a method's curve.
FAVOURS = (-28.0, -14.0, -7.0, -3.5, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0)  # of what looks back low ones too
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)  # of the way from the base
FACTORS = (0.02, 0.05, 0.1, 1 / 6, 0.25, 0.35, 0.5, 0.7, 1.0)  # of each domain's change; a sixth of six is the soup
LEANINGS = (-1.0, -0.5, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5)  # towards adapters, in cosines


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large models are, and how long they learn."""

    num_layers: int = 8
    d_model: int = 256
    num_heads: int = 4
    num_experts: int = 64
    d_ffn: int = 256
    top_k: int = 4
    vocab_size: int = 8192
    seq_len: int = 256
    batch_size: int = 32
    base_steps: int = 2000
    base_rate: float = 1.2e-3
    branch_steps: int = 250
    most_passes: int = 4  # over a domain's text: of a small one there are fewer steps
    gate_steps: int = 80
    new_experts: int = 16
    lora_rank: int = 8  # of branches
    adapter_rank: int = 32  # of adapters of the dense model
    written_rows: int = 512  # that a base writes itself
    score_rows: int = 256  # of each split of each text


SIZES = {
    "full": Size(),
    # A GPU for minutes: half as deep, a smaller vocabulary, and shorter lessons, so that all methods and seeds fit in.
    "medium": Size(
        num_layers=4, vocab_size=4096, base_steps=1500, branch_steps=150, gate_steps=60, written_rows=256,
        score_rows=128,
    ),
    # All methods and three seeds in two hours of two cores; longer lessons than those of `small`.
    "laptop": Size(
        num_layers=2, d_model=96, num_heads=4, num_experts=32, d_ffn=96, top_k=2, vocab_size=1024, seq_len=96,
        batch_size=16, base_steps=1500, base_rate=2e-3, branch_steps=150, gate_steps=60, new_experts=8,
        adapter_rank=16, written_rows=96, score_rows=64,
    ),
    # A real case for a CPU: a minute of one core for a base, and less for a cell.
    "small": Size(
        num_layers=2, d_model=96, num_heads=4, num_experts=16, d_ffn=96, top_k=2, vocab_size=1024, seq_len=96,
        batch_size=16, base_steps=300, base_rate=2e-3, branch_steps=60, gate_steps=30, new_experts=8,
        adapter_rank=16, written_rows=96, score_rows=64,
    ),
    # Proves that everything runs, and nothing else.
    "mini": Size(
        num_layers=2, d_model=32, num_heads=2, num_experts=8, d_ffn=32, top_k=2, vocab_size=512, seq_len=64,
        batch_size=8, base_steps=12, branch_steps=4, gate_steps=3, new_experts=3, lora_rank=2, adapter_rank=2,
        written_rows=8, score_rows=8,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Method:
    words: str
    family: str  # whose base it stands on: gravity, gradient or dense
    rates: tuple[float, ...]
    needs: str = ""  # what it has that the library does without


BRANCH = (1.5e-3, 4e-3, 1.1e-2)
LOW_RANK = (3e-3, 1e-2, 3.3e-2)
WHOLE = (3e-5, 1e-4, 3e-4)
METHODS = {
    "grow": Method(words="library, each token alone", family="gravity", rates=BRANCH),
    "grow-lora": Method(words="library, each token alone, low rank", family="gravity", rates=LOW_RANK),
    "grow-wide": Method(words="library, each token alone, more text", family="gravity", rates=BRANCH),
    "grow-context": Method(words="library, looking back", family="gravity", rates=BRANCH),
    "grow-context-lora": Method(words="library, looking back, low rank", family="gravity", rates=LOW_RANK),
    "grow-told": Method(words="library, domain told", family="gravity", rates=(), needs=TOLD),
    "gradient": Method(words="gradient keys", family="gradient", rates=BRANCH),
    "centroid": Method(words="one centroid a domain", family="gravity", rates=BRANCH),
    "gate": Method(words="a gate for each expert", family="gravity", rates=(3e-3, 1e-2, 3e-2)),
    "turn": Method(words="dense, in turn, interpolated", family="dense", rates=WHOLE),
    "arithmetic": Method(words="dense, soup and task arithmetic", family="dense", rates=WHOLE),
    "adapters": Method(words="adapters by nearest prototype", family="dense", rates=LOW_RANK),
    "adapters-words": Method(words="adapters by words", family="dense", rates=()),
    "adapters-told": Method(words="adapters, domain told", family="dense", rates=(), needs=TOLD),
    "alone-words": Method(words="dense alone, by words", family="dense", rates=()),
    "alone-told": Method(words="dense alone, domain told", family="dense", rates=(), needs=TOLD),
    "replay-written": Method(words="in turn, 20 % written by the base", family="dense", rates=WHOLE),
    "replay-1": Method(words="in turn, 1 % old text", family="dense", rates=WHOLE, needs=OLD),
    "replay-5": Method(words="in turn, 5 % old text", family="dense", rates=WHOLE, needs=OLD),
    "replay-20": Method(words="in turn, 20 % old text", family="dense", rates=WHOLE, needs=OLD),
    "joint": Method(words="joint, keys by gravity", family="gravity", rates=(6e-4, 1.2e-3, 2.4e-3), needs=OLD),
    "joint-dense": Method(words="joint, dense", family="dense", rates=(6e-4, 1.2e-3, 2.4e-3), needs=OLD),
}
# Measured in the cells of another method, from the same models.
BESIDE = {
    "grow-told": "grow-context",
    "adapters-words": "adapters",
    "adapters-told": "adapters",
    "alone-words": "arithmetic",
    "alone-told": "arithmetic",
}
PLACE = {"adapters-words": "by_words", "alone-words": "by_words"}  # of their rows in that cell; of others it is `told`
FAMILIES = ("gravity", "gradient", "dense")
REPLAY = {"turn": 0.0, "replay-1": 0.01, "replay-5": 0.05, "replay-20": 0.2, "replay-written": 0.2}


@dataclass(frozen=True)
class Cell:
    method: str  # or "base"
    seed: int
    rate: float = 0.0
    family: str = ""

    @property
    def name(self) -> str:
        if self.method == "base":
            return f"base-{self.family}-seed{self.seed}"
        return f"{self.method}-rate{self.rate:g}-seed{self.seed}"


def parse_cell(name: str) -> Cell:
    """The cell of that name; a KeyError or ValueError for any other."""
    before, _, seed = name.rpartition("-seed")
    if before.startswith("base-") and before.removeprefix("base-") in FAMILIES:
        return Cell("base", int(seed), family=before.removeprefix("base-"))
    method, _, rate = before.rpartition("-rate")
    return Cell(method, int(seed), float(rate), METHODS[method].family)


@dataclass(frozen=True, kw_only=True)
class Study:
    """What `run` was asked for; study.json of the work folder, which every cell reads."""

    work: Path
    out: Path
    size: str
    device: str
    base: tuple[str, ...]  # the texts that bases learn
    domains: tuple[str, ...]
    unseen: tuple[str, ...]  # which nobody grows
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    fast: bool
    processes: int
    command: str
    digests: Mapping[str, str]

    @property
    def sizes(self) -> Size:
        return SIZES[self.size]

    @property
    def texts(self) -> Path:
        return self.work / "texts"

    def save(self) -> str:
        return json.dumps(asdict(self), indent=1, default=str)

    @classmethod
    def load(cls, work: Path) -> "Study":
        found = json.loads((work / "study.json").read_text(encoding="utf-8"))
        lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
        return cls(**found | lists | {"work": Path(found["work"]), "out": Path(found["out"])})

    def base_run(self, family: str, seed: int) -> Path:
        return self.work / f"base-{family}-seed{seed}"

    def has_base(self, family: str, seed: int) -> bool:
        run = self.base_run(family, seed)
        return (run / "result.json").is_file() and run.with_suffix(".npz").is_file()

    def is_done(self, cell: Cell) -> bool:
        return (self.out / f"{cell.name}.json").is_file()


def list_cells(study: Study, results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Cell, list[Cell]]]:
    """Every cell that is known by now, and those that must be done before it.

    results: of the cells that are done, by name. Those of further seeds are known once the first has chosen their rate.
    """
    for name in study.methods:
        method = METHODS[name]
        for seed in study.seeds:
            first = seed == study.seeds[0]
            rates = [*find_rates(name, results, seed)] if first else choose_rates(name, results, study.seeds[0])
            for rate in rates:
                needed = [Cell("base", seed, family=method.family)]
                if name == "gate":  # of experts that were grown
                    grown = choose_rate("grow", results, study.seeds[0])
                    if grown is None:
                        continue
                    needed.append(Cell("grow", seed, grown, "gravity"))
                yield Cell(name, seed, rate, method.family), needed


def with_those_beside(method: str) -> list[str]:
    """A method, and those that are measured in its cells."""
    return [method, *(name for name, host in BESIDE.items() if host == method)]


def rows_of(method: str, cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A method's curve in one of its cells, or of the cells that it is measured in."""
    found: list[dict[str, Any]] = cell[PLACE.get(method, "told") if method in BESIDE else "rows"]
    return found


def find_rates(method: str, results: Mapping[str, Mapping[str, Any]], seed: int) -> dict[float, float | None]:
    """The rates that the first seed tries, with what each gains on valid (joint training: with its loss on the base's
    text); None for those that are not done.

    Where the best of them is the lowest or the highest, for the method or for one that is measured beside it, one
    beyond it follows.
    """
    host = BESIDE.get(method, method)
    base = results.get(Cell("base", seed, family=METHODS[host].family).name)

    def find(name: str, rate: float) -> float | None:
        cell = results.get(Cell(host, seed, rate).name)
        if cell is None or base is None:
            return None
        rows = rows_of(name, cell)
        if len(rows) == 1:  # no curve: everything was learned at once, or told
            return float(rows[0]["valid"]["base"] + rows[0]["valid"]["gained"])
        return float(best_point(rows, base, CHOSEN_AT)["valid"]["gained"])

    def find_beyond(name: str, rates: list[float]) -> set[float]:
        known = [value for value in (find(name, rate) for rate in rates) if value is not None]
        best = known.index(min(known)) if known and len(known) == len(rates) else -1
        if best == 0:
            return {float(f"{rates[0] ** 2 / rates[1]:.2g}")}
        if best == len(rates) - 1:
            return {float(f"{rates[-1] ** 2 / rates[-2]:.2g}")}
        return set()

    rates = sorted(METHODS[host].rates)
    for _ in range(MOST_MORE):
        beyond = set().union(*(find_beyond(name, rates) for name in with_those_beside(host)))
        rates = sorted({*rates, *beyond})
    return {rate: find(method, rate) for rate in rates}


def choose_rate(method: str, results: Mapping[str, Mapping[str, Any]], seed: int) -> float | None:
    """The rate that gained most on valid in the first seed; None before all were tried."""
    tried = find_rates(method, results, seed)
    found = {rate: gained for rate, gained in tried.items() if gained is not None}
    if not found or len(found) < len(tried):
        return None
    return min(found, key=lambda rate: found[rate])


def choose_rates(method: str, results: Mapping[str, Mapping[str, Any]], seed: int) -> list[float]:
    """What further seeds run: the rate of the method, and of each that is measured beside it."""
    chosen = {choose_rate(name, results, seed) for name in with_those_beside(method)}
    return sorted(rate for rate in chosen if rate is not None)


def best_point(rows: list[dict[str, Any]], base: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Of a curve's points, and the base itself, that which gains most on valid where no more than `limit` is lost."""
    own = base["rows"][0]
    fit = [row for row in rows if row["valid"]["base"] - own["valid"]["base"] <= limit]
    return min([*fit, own], key=lambda row: float(row["valid"]["gained"]))


def read_cells(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of all cells that are done, by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-seed*.json"))}
